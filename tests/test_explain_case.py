"""A request is found by any of its ids, in the ring or in the history, and both tell the same.

Owns the proofs of telemetry/explain_case.py with a real history; what is made of a case is
test_explain_text.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from telemetry.explain_case import (
    PAGE_ROWS,
    TILES_MAX,
    case_from_bus,
    case_from_history,
    choose,
)
from telemetry.explain_tiles import Tile
from telemetry.explanation import explain
from tests import samples
from tests.histories import kept
from tests.lives import Told, published
from tests.planted import PLANTS


@pytest.mark.parametrize("cause", ["preempted_kv", "queue_slo"])
def test_ring_and_history_tell_the_same(cause: str, tmp_path: Path) -> None:
    plant = PLANTS[cause]()
    with kept(tmp_path, "run-1") as (bus, history):
        with plant.emit.bus.reader(0) as reader:
            for entry in reader.take(100_000).entries:
                bus.publish(entry.record)
                if entry.seq % 500 == 0:
                    assert history.flush(10)
        for record in Told(plant.emit.bus).fold.advance():
            bus.publish(record)
        assert history.flush(10)
        ringed = case_from_bus(bus, plant.request_id)
        stored = case_from_history(history.queries.run, plant.request_id)
        assert ringed is not None
        assert stored is not None
        assert stored.told == Told(plant.emit.bus).advance().causes[stored.start.request]
        assert explain(stored) == explain(ringed)
        assert case_from_history(history.queries.run, "nobody") is None


def test_a_request_that_outlived_the_ring_is_told_by_the_fold() -> None:
    """GIVEN a ring that forgot most of a life, THEN its causes are still those of all of it."""
    simulation, emit = published()
    small = type(emit)(capacity=60)
    simulation.core._emit = small
    told = Told(small.bus)
    simulation.add("A", 8, 100)
    while simulation.core.has_work:
        simulation.step()
        told.advance()
    case = case_from_bus(small.bus, "req-A")
    assert case is not None
    assert not case.whole
    causes = told.causes[1]
    assert "unexplained" not in causes
    assert sum(causes.values()) == (small.deliveries[1].last_write_at_ns or 0) - (
        small.deliveries[1].received_at_ns
    )


def test_an_id_means_a_sequence_then_a_request_then_what_a_client_said() -> None:
    def start(number: int, **changed: Any) -> Any:
        return samples.start(number, **changed)

    several = [
        start(1, request_id="r-0", parent_id="r", external_id="mine"),
        start(2, request_id="r-1", parent_id="r", external_id="mine"),
        start(3, request_id="s", external_id="mine"),
        start(4, request_id="mine"),
    ]
    known = [(one, one.request != 1) for one in several]
    assert choose("r-1", known) == (several[1], ["r-1"])
    assert choose("r", known) == (several[0], ["r"]), "the one that still lives"
    assert choose("mine", known) == (several[3], ["mine"])
    assert choose("mine", known[:3]) == (several[2], ["s", "r"])
    assert choose("x", known) is None


@dataclass
class Page:
    """Rows of an answer."""

    rows: list[list[Any]]
    truncated: bool = False


def test_what_is_read_of_an_endless_life_is_bounded() -> None:
    pages = 0

    def ask(sql: str, parameters: Sequence[object]) -> Page:
        nonlocal pages
        if "FROM request_start s" in sql:
            first = samples.start(1)
            names = list(first.__slots__)
            return Page([["run", 1, 0, *(getattr(first, name) for name in names), False]])
        if "FROM iteration" in sql and "LIMIT" in sql:
            pages += 1
            after = parameters[4]
            assert isinstance(after, int)
            return Page([tile_row(after + 1 + index) for index in range(PAGE_ROWS)])
        return Page([])

    case = case_from_history(ask, "req-1")
    assert case is not None
    assert (pages, len(case.tiles), case.whole) == (TILES_MAX // PAGE_ROWS, TILES_MAX, False)


def tile_row(place: int) -> list[Any]:
    record = samples.iteration(place + 1, [1])
    return [place, *(getattr(record, name) for name in Tile._fields)]
