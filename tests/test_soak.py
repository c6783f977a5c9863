"""Long proofs, run by `make soak`: a million scheduler steps under random traffic.

Every seed draws an engine (pool, block, slots, budget, chunks, mode, policy, depth, caching, caps)
and a traffic of arrivals, aborts and failing steps; check() runs after each step and the laws hold
at each engine's end. Prints how many steps and engines held.
"""

import random
import time

import pytest

from engine.config import BATCHING_MODES, POLICY_NAMES, EngineConfig, resolve
from engine.messages import Abort
from tests.simulation import Simulation
from tests.test_scheduler import FACTS, SPEC, assert_laws, assert_tiles

STEPS = 1_000_000
TURNS = 400


def random_engine(pick: random.Random) -> Simulation:
    def cap(high: int) -> int | None:
        return pick.choice([None, None, pick.randrange(1, high)])

    seqs = pick.randrange(1, 9)
    asked = EngineConfig(
        kv_blocks=pick.randrange(2, 60),
        block_size=pick.choice((1, 4, 16)),
        max_model_len=256,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + pick.randrange(64),
        enable_chunked_prefill=pick.random() < 0.7,
        enable_prefix_caching=pick.random() < 0.5,
        scheduling_policy=pick.choice(POLICY_NAMES),
        batching=pick.choice(BATCHING_MODES),
        long_prefill_tokens=cap(20),
        partial_prefills_max=cap(4),
        tenant_seqs_max=cap(4),
        priority_age_ms=pick.choice((1, 5, 1000)),
    )
    config = resolve(asked, SPEC, FACTS)
    settings = {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}
    return Simulation(depth=pick.choice((1, 2)), **settings)


def arrive(simulation: Simulation, pick: random.Random) -> None:
    model_len = simulation.config.max_model_len
    assert model_len is not None
    prompt = min(model_len - 1, pick.choice((1, 3, 16, 17, 40, pick.randrange(1, model_len))))
    output = pick.randrange(1, min(60, model_len - prompt) + 1)
    simulation.add(
        f"r{len(simulation.names)}",
        prompt,
        output,
        stop_at=pick.choice((0, 0, pick.randrange(1, output + 1))),
        shared=pick.choice((0, 0, 8, 40)),
        tenant=pick.choice("abc"),
        priority=pick.randrange(3),
        parent_id=pick.choice((None, None, f"parent-{len(simulation.names) // 3}")),
    )


def run_engine(seed: int) -> int:
    """Drive one engine through its traffic; return its steps."""
    pick = random.Random(seed)
    simulation = random_engine(pick)
    for _ in range(TURNS):
        for _ in range(pick.choice((0, 0, 1, 3))):
            arrive(simulation, pick)
        if pick.random() < 0.1 and simulation.names:
            number = pick.randrange(1, len(simulation.names) + 1)
            simulation.core.abort(Abort(request=number, finish="cancelled", delivered_tokens=1))
        if pick.random() < 0.005:
            simulation.runner.fails = lambda plan: RuntimeError("planted")
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
