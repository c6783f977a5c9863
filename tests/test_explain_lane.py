"""A request's lane and its named gaps: what a view draws is what the iterations have on record.

Owns the proofs of telemetry/explain_lane.py and of the neighbours that explanations name in the
longest gaps, on the real core over fakes.
"""

from itertools import pairwise
from typing import Any

import pytest

from telemetry import explain_lane
from telemetry.explain_case import case_from_bus
from telemetry.explain_walk import SLOW_MAX
from telemetry.explanation import explain
from telemetry.records import CAUSES
from tests.lives import Published, published
from tests.planted import PLANTS

COLUMNS = ("begin_ms", "end_ms", "kind", "row", "tokens", "blocks")


def told(emit: Published, request_id: str) -> dict[str, Any]:
    case = case_from_bus(emit.bus, request_id)
    assert case is not None
    return explain(case)


def spans(lane: dict[str, Any]) -> list[dict[str, Any]]:
    columns = [lane[name] for name in COLUMNS]
    return [dict(zip(COLUMNS, values, strict=True)) for values in zip(*columns, strict=True)]


@pytest.mark.parametrize("cause", CAUSES)
def test_a_lane_covers_the_engines_part_of_a_life_without_a_gap(cause: str) -> None:
    plant = PLANTS[cause]()
    case = case_from_bus(plant.emit.bus, plant.request_id)
    assert case is not None
    body = explain(case)
    drawn = spans(body["lane"])
    arrived = next(e["at_ms"] for e in body["timeline"] if e["event"] == "arrived")
    assert [one["begin_ms"] for one in drawn[1:]] == [one["end_ms"] for one in drawn[:-1]]
    assert not drawn or drawn[0]["begin_ms"] == arrived
    assert {one["kind"] for one in drawn} <= set(CAUSES)
    shown = {one["kind"] for one in drawn}
    if cause.startswith(("queue_", "preempted_")) or cause in ("recompute", "own_decode"):
        assert cause in shown
    batches = [
        (tile.requests.index(case.start.request), tile) for tile, _ in case.tiles
        if case.start.request in tile.requests
    ]  # fmt: skip
    rows = [one for one in drawn if one["row"] is not None]
    assert [(one["row"], one["tokens"], one["blocks"]) for one in rows] == [
        (row, tile.token_counts[row], tile.kv_block_counts[row]) for row, tile in batches
    ][: len(rows)]
    for one, after in pairwise(drawn):
        if one["row"] is None and after["row"] is None:
            assert one["kind"] != after["kind"], "a wait is one span"


def test_a_long_lane_keeps_its_newest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, emit = published()
    simulation.add("A", 8, 30)
    simulation.drain()
    whole = told(emit, "req-A")["lane"]
    monkeypatch.setattr(explain_lane, "SPANS_MAX", 10)
    short = told(emit, "req-A")["lane"]
    assert short["left_out"] == len(whole["kind"]) - 10 > 0
    assert [short[name] for name in COLUMNS] == [whole[name][-10:] for name in COLUMNS]


def test_the_longest_gaps_name_the_neighbour_that_made_them() -> None:
    """GIVEN a prompt of 100 tokens in the middle of an answer, THEN its gap alone says so."""
    simulation, emit = published(
        max_num_batched_tokens=128, kv_blocks=64, max_model_len=256, enable_prefix_caching=False
    )
    simulation.add("A", 8, 40)
    simulation.step(10)
    simulation.add("B", 100, 2)
    simulation.drain()
    gaps = told(emit, "req-A")["gaps"]
    longest = max(gaps, key=lambda gap: gap["ms"])
    part = next(one for one in longest["causes"] if one["cause"] == "neighbour_prefill")
    assert [(one["request_id"], one["tokens"]) for one in part["requests"]] == [("req-B", 100)]
    assert part["requests"][0]["ms"] == pytest.approx(part["ms"], abs=1e-5)
    named = [gap for gap in gaps if any("requests" in one for one in gap["causes"])]
    assert len(named) <= SLOW_MAX < len(gaps)
    assert [gap for gap in named if "neighbour_prefill" in {c["cause"] for c in gap["causes"]}] == [
        longest
    ]


def test_a_gap_of_a_preempted_request_names_for_whom() -> None:
    plant = PLANTS["preempted_kv"]()
    body = told(plant.emit, plant.request_id)
    parts = [part for gap in body["gaps"] for part in gap["causes"]]
    held = [part for part in parts if part["cause"] == "preempted_kv"]
    assert held
    assert held[0]["requests"][0]["request_id"] != plant.request_id


def test_what_it_used_is_null_until_it_is_settled() -> None:
    simulation, emit = published()
    simulation.add("A", 8, 20)
    simulation.step(4)
    running = told(emit, "req-A")
    assert set(running["receipt"].values()) == {None}
    assert running["run_id"] == "run-1"
    simulation.drain()
    ended = told(emit, "req-A")["receipt"]
    assert ended["iterations"] == emit.ends[1].iterations
    assert ended["bytes"] == emit.deliveries[1].bytes
