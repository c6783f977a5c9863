"""Is the blame right? A request with and without its neighbour: blamed time is what is gone.

On the fake device, whose cost is linear and exact, the two agree to the rounding. The real engine
is measured by bench/counterfactual.py; `make soak` runs ten seeds of it with 4,000 tokens.
"""

from pathlib import Path

import pytest

from tests.lives import Published, published, walked
from tests.simulation import Simulation

SETTINGS = {"max_model_len": 512, "kv_blocks": 100, "max_num_batched_tokens": 48}


def trained() -> tuple[Simulation, Published]:
    """Return a core whose step model has been fitted to decodes and prefills of many sizes."""
    simulation, emit = published(**SETTINGS)
    number = 0
    while not emit.models:
        number += 1
        simulation.add(f"t{number}", 5 + 7 * (number % 20), 4 + number % 9)
        simulation.add(f"u{number}", 9, 12)
        simulation.drain()
    return simulation, emit


def life_ns(*, neighbour: bool) -> tuple[Published, int]:
    simulation, emit = trained()
    simulation.add("background", 20, 60)
    victim = simulation.add("victim", 30, 40)
    simulation.step(8)
    if neighbour:
        simulation.add("neighbour", 400, 6)
    simulation.drain()
    end = emit.ends[victim]
    return emit, end.decided_at_ns - end.arrived_at_ns


def test_on_an_exact_device_the_blame_is_the_difference() -> None:
    _, alone = life_ns(neighbour=False)
    emit, disturbed = life_ns(neighbour=True)
    case, walk = walked(emit.bus, "req-victim")
    number = next(request for request, name in case.names.items() if name == "req-neighbour")
    blamed = sum(
        walk.named[cause][number].ns for cause in ("neighbour_prefill", "neighbour_decode")
    )
    assert disturbed - alone > 4_000_000
    assert blamed == pytest.approx(disturbed - alone, rel=0.01)


@pytest.mark.soak
def test_ten_seeds_on_the_real_engine(demo_model: Path) -> None:
    from bench.counterfactual import NEIGHBOUR_TOKENS, SEEDS, load, measure

    found = measure(load(demo_model, NEIGHBOUR_TOKENS, 256), range(1, SEEDS + 1))
    assert found["median_error"] <= 0.15, found
