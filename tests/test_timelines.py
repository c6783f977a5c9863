"""Golden timelines: the scheduler's behaviour as text files that are reviewed like code.

GIVEN a scenario, WHEN the real core runs it over a fake runner, THEN its timeline is that of
golden/NAME.txt.
After a deliberate change: `python -m tests.test_timelines` writes the files anew; read the diff.
"""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import scenarios, scenarios_ahead, scenarios_policies
from tests.simulation import Simulation

GOLDEN = Path(__file__).parent / "golden"
SCENARIOS = scenarios.SCENARIOS + scenarios_policies.SCENARIOS + scenarios_ahead.SCENARIOS


def render(scenario: Callable[[], Simulation]) -> str:
    return f"{inspect.cleandoc(scenario.__doc__ or '')}\n\n{scenario().timeline()}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_golden(scenario: Callable[[], Simulation]) -> None:
    expected = (GOLDEN / f"{scenario.__name__}.txt").read_text()
    assert render(scenario) == expected


def test_no_golden_file_is_left_over() -> None:
    names = {scenario.__name__ for scenario in SCENARIOS}
    assert {path.stem for path in GOLDEN.glob("*.txt")} == names


if __name__ == "__main__":
    for scenario in SCENARIOS:
        (GOLDEN / f"{scenario.__name__}.txt").write_text(render(scenario))
