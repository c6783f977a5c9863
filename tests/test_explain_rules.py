"""The two rules by themselves: small steps whose division anybody can check, and random ones.

Owns the proofs of telemetry/explain.py: parts of a row sum to its time, shares of a step to its
device time, and each sentence of the rules in SCHEMA.md has an example.
"""

import numpy as np
import numpy.typing as npt
import pytest

from telemetry.explain import (
    COUNTED,
    SPLIT,
    Batch,
    Model,
    Parts,
    named_neighbours,
    shares,
    split,
)

FIT = Model(fixed=1000.0, p=10.0, d=50.0, c=1.0, fitted=1.0, error=0.02)


def whole(values: list[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def step(
    rows: list[tuple[int, int, int]],
    *,
    device_ns: int,
    spare: int = 0,
    model: Model = FIT,
) -> Batch:
    """Return one step of rows (start, count, prompt)."""
    return Batch(
        steps=whole([0] * len(rows)),
        starts=whole([row[0] for row in rows]),
        counts=whole([row[1] for row in rows]),
        prompts=whole([row[2] for row in rows]),
        device_ns=whole([device_ns]),
        spare=whole([spare]),
        models=np.array([model], dtype=np.float64),
    )


def divided(batch: Batch, *, tile_ns: int, lost: int = 0) -> list[dict[str, int]]:
    """Return what each row's time was spent on."""
    rows = len(batch.steps)
    parts = Parts(
        starts=batch.starts,
        counts=batch.counts,
        prompts=batch.prompts,
        lost=whole([lost] * rows),
        lengths=whole([tile_ns] * rows),
        device_ns=batch.device_ns[batch.steps],
        models=batch.models[batch.steps],
        totals=batch.totals()[batch.steps],
    )
    return [
        {cause: ns for cause, ns in zip(SPLIT, row, strict=True) if ns}
        for row in split(parts).tolist()
    ]


def test_alone_everything_is_its_own_even_above_the_model() -> None:
    (row,) = divided(step([(20, 1, 8)], device_ns=9000), tile_ns=9500)
    assert row == {"own_decode": 9000, "scheduler": 500}


def test_own_is_what_it_would_have_taken_alone_and_the_rest_is_the_others() -> None:
    """A decode costs 1000 + 50 + 21 alone; a prefill of 100 tokens adds 1000 + 100."""
    decode, prefill = divided(step([(20, 1, 8), (0, 100, 100)], device_ns=2171), tile_ns=2171)
    assert decode == {"own_decode": 1071, "neighbour_prefill": 1100}
    assert prefill == {"own_prefill": 2100, "neighbour_decode": 71}


def test_noise_above_the_model_is_charged_to_neighbours() -> None:
    decode, _ = divided(step([(20, 1, 8), (0, 100, 100)], device_ns=3171), tile_ns=3171)
    assert decode == {"own_decode": 1071, "neighbour_prefill": 2100}


def test_a_step_faster_than_the_model_leaves_nothing_to_others() -> None:
    decode, _ = divided(step([(20, 1, 8), (0, 100, 100)], device_ns=900), tile_ns=1000)
    assert decode == {"own_decode": 900, "scheduler": 100}


def test_device_time_beyond_the_tile_is_no_negative_scheduler() -> None:
    """At loop depth 2 the device may have begun before the tile did."""
    (row,) = divided(step([(20, 1, 8)], device_ns=9000), tile_ns=7000)
    assert row == {"own_decode": 7000}


def test_neighbours_share_in_proportion_to_what_they_add() -> None:
    """The others add 50 + 11, 50 + 31 (decodes) and 10 x 20 + 20 (a prefill); T leaves twice."""
    rows = [(20, 1, 8), (10, 1, 8), (30, 1, 8), (0, 20, 20)]
    batch = step(rows, device_ns=1071 + 2 * 362)
    first = divided(batch, tile_ns=1071 + 2 * 362)[0]
    assert first == {"own_decode": 1071, "neighbour_prefill": 440, "neighbour_decode": 284}
    causes = whole([0, 0, 1071, 0, 440, 284, 0]).reshape(1, 7)
    prefill, decode = named_neighbours(batch, whole([0]), causes)
    assert prefill.tolist() == pytest.approx([0, 0, 0, 440])
    assert decode.tolist() == pytest.approx([0, 122, 162, 0])


def test_padding_and_idle_rows_weigh_as_decodes() -> None:
    (row,) = divided(step([(20, 1, 8)], device_ns=1371, spare=3), tile_ns=1371)
    assert row == {"own_decode": 1071, "padding": 300}


def test_neighbours_without_modelled_cost_weigh_by_their_tokens() -> None:
    free = Model(fixed=1000.0, p=0.0, d=0.0, c=0.0, fitted=1.0, error=0.5)
    rows = [(20, 1, 8), (20, 1, 8), (0, 3, 3)]
    first = divided(step(rows, device_ns=1400, model=free), tile_ns=1400)[0]
    assert first == {"own_decode": 1000, "neighbour_prefill": 300, "neighbour_decode": 100}


def test_before_the_first_fit_tokens_count() -> None:
    rows = [(20, 1, 8), (0, 3, 3)]
    decode, prefill = divided(step(rows, device_ns=400, model=COUNTED), tile_ns=400)
    assert decode == {"own_decode": 100, "neighbour_prefill": 300}
    assert prefill == {"own_prefill": 300, "neighbour_decode": 100}


def test_own_time_goes_by_position() -> None:
    """Of 40 tokens from 10 on, 20 were computed before, 10 belong to the prompt, 10 are new."""
    (row,) = divided(step([(10, 40, 40)], device_ns=4000), tile_ns=4000, lost=30)
    assert row == {"recompute": 2000, "own_prefill": 1000, "own_decode": 1000}


def test_shares_split_the_fixed_cost_equally() -> None:
    """1000 fixed to each half, the rest 71 to 1100."""
    batch = step([(20, 1, 8), (0, 100, 100)], device_ns=2171)
    assert shares(batch).tolist() == [571, 1600]


def test_shares_of_a_step_shorter_than_its_fixed_cost_are_equal() -> None:
    assert shares(step([(20, 1, 8), (0, 100, 100)], device_ns=601)).tolist() == [301, 300]


def test_no_rows_no_shares() -> None:
    assert shares(step([], device_ns=0)).tolist() == []


def test_random_steps_are_divided_exactly() -> None:
    pick = np.random.default_rng(7)
    for _ in range(200):
        count = int(pick.integers(1, 12))
        fits = pick.random() < 0.7
        some = pick.random(4) * np.array([1e6, 1e4, 1e5, 50.0]) * (pick.random(4) < 0.8)
        model = Model(*(float(one) for one in some), fitted=1.0, error=0.1) if fits else COUNTED
        rows = [
            (int(pick.integers(0, 900)), int(pick.choice((1, 1, 1, 7, 300))), 400)
            for _ in range(count)
        ]
        device_ns, tile_ns = int(pick.integers(0, 10**8)), int(pick.integers(1, 10**8))
        batch = step(rows, device_ns=device_ns, spare=int(pick.integers(0, 5)), model=model)
        for row in divided(batch, tile_ns=tile_ns, lost=int(pick.integers(0, 500))):
            assert sum(row.values()) == tile_ns
            assert min(row.values()) > 0
        paid = shares(batch)
        assert paid.sum() == device_ns
        assert paid.min() >= 0
