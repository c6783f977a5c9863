"""Random engines and random arrivals on the simulated core, a pure function of the seed's draws.

Owns what test_soak.py and the tests of explaining drive the core with: any pool, budget, mode,
policy, depth and cap, and requests of all shapes. Never checks anything itself.
"""

import random

from engine.config import BATCHING_MODES, POLICY_NAMES, EngineConfig, resolve
from tests.simulation import Simulation
from tests.test_scheduler import FACTS, SPEC


def random_settings(pick: random.Random) -> dict[str, object]:
    """Return the settings of a Simulation, its loop depth among them."""

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
    settings: dict[str, object] = {
        name: getattr(config, name) for name in EngineConfig.__dataclass_fields__
    }
    return settings | {"depth": pick.choice((1, 2))}


def arrive(simulation: Simulation, pick: random.Random) -> None:
    """Submit one random request."""
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
