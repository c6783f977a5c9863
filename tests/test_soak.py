"""Long proofs, run by `make soak`: a million scheduler steps under random traffic.

Every seed draws an engine (pool, block, slots, budget, chunks, mode, policy, depth, caching, caps)
and a traffic of arrivals, aborts and failing steps; check() runs after each step and the laws hold
at each engine's end. Prints how many steps and engines held.
"""

import random
import time

import pytest

from engine.messages import Abort
from tests.simulation import Simulation
from tests.test_scheduler import assert_laws, assert_tiles
from tests.traffic import arrive, random_settings

STEPS = 1_000_000
TURNS = 400


def run_engine(seed: int) -> int:
    """Drive one engine through its traffic; return its steps."""
    pick = random.Random(seed)
    simulation = Simulation(**random_settings(pick))  # type: ignore[arg-type]
    for _ in range(TURNS):
        for _ in range(pick.choice((0, 0, 1, 3))):
            arrive(simulation, pick)
        if pick.random() < 0.1 and simulation.names:
            number = pick.randrange(1, len(simulation.names) + 1)
            simulation.core.abort(Abort(request=number, finish="cancelled", delivered_tokens=1))
        if pick.random() < 0.005:
            error = pick.choice((RuntimeError("planted"), MemoryError()))
            simulation.runner.fails = lambda plan, error=error: error
            simulation.core.step()
            simulation.runner.fails = lambda plan: None
        if simulation.core.has_work:
            simulation.step()
    simulation.drain(limit=200_000)
    assert simulation.scheduler.pool.used == 0
    assert simulation.runner.kept == 0
    assert_laws(simulation)
    assert_tiles(simulation)
    return simulation.core.steps


@pytest.mark.soak
def test_a_million_steps(capsys: pytest.CaptureFixture[str]) -> None:
    steps = seed = 0
    began = time.monotonic()
    while steps < STEPS:
        steps += run_engine(seed)
        seed += 1
    with capsys.disabled():
        seconds = time.monotonic() - began
        print(f"\n{steps:,} steps of {seed:,} engines held every law, {seconds:.0f} s")
