"""Two steps in flight: the same answers, one row more at most, the record whole and one step late.

GIVEN random engines and traffic, WHEN the same requests run at loop depth 1 and 2, THEN tokens are
the same, whoever ends unforced has at most one row dropped, and it is on record; host time is
hidden behind the device; causes still sum to each life.
"""

import random

import pytest

from engine.plan import Plan
from server.explain_text import explanation_text
from telemetry.explain_case import Case, case_from_bus
from telemetry.explanation import explain
from tests.lives import Published, published
from tests.simulation import FakeRunner, FakeStep, Simulation
from tests.test_explain_text import GOLDEN
from tests.test_scheduler import assert_laws, assert_tiles
from tests.traffic import arrive, random_settings

LAUNCH_NS = 300_000
SEEDS = range(16)


def played(seed: int, depth: int) -> Simulation:
    """Run a random engine under random traffic, the same at each depth, to everybody's end."""
    pick = random.Random(seed)
    settings = random_settings(pick) | {"depth": depth}
    simulation = Simulation(**settings)  # type: ignore[arg-type]
    for _ in range(pick.randrange(4, 24)):
        arrive(simulation, pick)
        for _ in range(pick.randrange(3)):
            if simulation.core.has_work and not simulation.core.opens_in_ns():
                simulation.step()
    simulation.drain(20_000)
    return simulation


@pytest.mark.parametrize("seed", SEEDS)
def test_what_runs_ahead_answers_the_same_and_costs_a_row_at_most(seed: int) -> None:
    behind, ahead = played(seed, 1), played(seed, 2)
    assert ahead.outputs() == behind.outputs()
    assert_laws(ahead)
    assert_tiles(ahead)
    for end in ahead.emitted.ends:
        if end.preemptions == 0:
            assert end.dropped_tokens <= 1, "one row, of one token"
    computed = sum(sum(record.token_counts) for record in ahead.emitted.iterations)
    needed = sum(sum(record.token_counts) for record in behind.emitted.iterations)
    if not any(end.preemptions for end in ahead.emitted.ends + behind.emitted.ends):
        hits = [
            sum(sum(record.admitted_cached_tokens) for record in one.emitted.iterations)
            for one in (behind, ahead)
        ]
        dropped = sum(end.dropped_tokens for end in ahead.emitted.ends)
        assert computed + hits[1] == needed + hits[0] + dropped, "nothing else is computed twice"


def test_some_of_these_engines_drop_rows_and_preempt() -> None:
    """Else the test above would prove nothing."""
    ends = [end for seed in SEEDS for end in played(seed, 2).emitted.ends]
    assert sum(end.dropped_tokens > 0 for end in ends) > 10
    assert any(end.preemptions for end in ends)


class SlowToLaunch(FakeRunner):
    """Launching takes the host a while, in which the device works on what it has."""

    def run(self, plan: Plan) -> FakeStep:
        self._clock.ns += LAUNCH_NS
        return super().run(plan)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_host_works_while_the_device_does(depth: int) -> None:
    simulation = Simulation(depth=depth)
    slow = SlowToLaunch(simulation.clock, simulation.config.block_size)
    simulation.runner = simulation.core._runner = slow
    simulation.add("A", 8, 21)
    began = simulation.clock.ns
    simulation.drain()
    records = simulation.emitted.iterations
    device_ns = sum(record.device_ns for record in records)
    hidden = simulation.clock.ns - began - device_ns
    assert len(records) == 21
    assert hidden == (LAUNCH_NS if depth == 2 else 21 * LAUNCH_NS)
    assert_tiles(simulation)


def test_the_causes_of_a_life_with_a_row_dropped() -> None:
    """A ends at its third token while its fourth row is computed: D's wait holds that tile too."""
    simulation, emit = published(max_num_seqs=2, depth=2)
    simulation.add("A", 8, 20, stop_at=3)
    simulation.add("B", 8, 8)
    simulation.add("D", 8, 2)
    simulation.drain()
    text = explanation_text(explain(case_of(emit, "req-D")))
    assert text == (GOLDEN / "ahead.txt").read_text(encoding="utf-8")
    body = explain(case_of(emit, "req-A"))
    causes = {part["cause"]: part["ms"] for part in body["causes"]}
    assert sum(causes.values()) == pytest.approx(body["e2e_ms"], abs=1e-6)
    assert "unexplained" not in causes


def case_of(emit: Published, request_id: str) -> Case:
    case = case_from_bus(emit.bus, request_id)
    assert case is not None
    return case


if __name__ == "__main__":
    made, published_to = published(max_num_seqs=2, depth=2)
    made.add("A", 8, 20, stop_at=3)
    made.add("B", 8, 8)
    made.add("D", 8, 2)
    made.drain()
    text = explanation_text(explain(case_of(published_to, "req-D")))
    (GOLDEN / "ahead.txt").write_text(text, encoding="utf-8")
