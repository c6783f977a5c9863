"""What every test may use, the order of test files, and the seconds that each of them took.

Owns the report of time per file, printed before pytest's own closing line, which files come first,
and the fixtures of many files. Fixtures of one subject stand in that subject's test file.
"""

import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernels.native import TARGETS, keep_to, targets
from server.config import quiet_threads
from server.demo import DEMO_MODEL, demo_model_path, is_intact

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LONGEST_FIRST = tuple(
    f"test_{name}.py"
    for name in (
        *("hostile_models", "dashboard_post_mortem", "native_step", "watchdog", "sampler"),
        *("dashboard_live", "chaos", "drain", "dashboard_manners", "whole_path", "metrics_server"),
        *("explain_server", "overload", "model", "connections", "history_kill", "sandbox"),
    )
)
"""Files of over 15 s: begun first, so that no worker is left alone with one at the end."""


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
    # What a script starts in its background ignores Ctrl-C, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(SecondsPerFile())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Keep PyTorch from spinning on every core beside the tests' other processes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Let C++ share its work, whatever this machine has."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=TARGETS, scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let `threads()` find this target of kernels/native.py as the best that there is."""
    name: str = request.param
    if name not in targets():
        pytest.skip(f"this CPU does not run {name}")
    keep_to(name)
    yield name
    keep_to(next(iter(TARGETS)))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the demo model's file; a run without it fails rather than skips."""
    path = demo_model_path()
    if not is_intact(path, DEMO_MODEL):
        pytest.fail(f"the demo model is not at {path}: run `make demo-model`", pytrace=False)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """Start a browser for a file's tests."""
    from tests.browser import chromium

    with chromium() as made:
        yield made


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """Give a page of it that fails its test when it says anything."""
    from tests.browser import watched_page

    with watched_page(browser) as made:
        yield made
