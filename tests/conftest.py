"""What every test may use, and the seconds that each test file took.

Owns the report of time per file, printed before pytest's own closing line, and the fixture of the
demo model. Fixtures of one subject stand in that subject's test file.
"""

from collections import defaultdict
from pathlib import Path

import pytest

from server.config import quiet_threads
from server.demo import DEMO_MODEL, demo_model_path, is_intact


class SecondsPerFile:
    """Adds up set-up, call and tear-down of each test under its file."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tests: defaultdict[str, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        self.tests[file] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds per file")
        for file, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{seconds:8.2f} s  {self.tests[file]:4d} tests  {file}")


def pytest_configure(config: pytest.Config) -> None:
    # Before torch is loaded: threads that spin at barriers slow every server that a test starts.
    quiet_threads()
    config.pluginmanager.register(SecondsPerFile())


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the demo model's file; a run without it fails rather than skips."""
    path = demo_model_path()
    if not is_intact(path, DEMO_MODEL):
        pytest.fail(f"the demo model is not at {path}: run `make demo-model`", pytrace=False)
    return path
