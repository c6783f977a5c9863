"""What one request did, tile by tile: the columns from which a view draws its lane.

Owns the shape of `lane` in `GET /v1/requests/{id}`; explanation.py puts it there. Pure, from a walk
to columns of plain values. Must never grow with a wait: its tiles are merged, and of a life with
too many of them the newest are kept, with a count of the rest.
"""

from typing import Any

import numpy as np

from telemetry.explain_tiles import CAUSE_INDEX
from telemetry.explain_walk import Walk
from telemetry.records import CAUSES

SPANS_MAX = 10_000

WORK = ("recompute", "own_prefill", "own_decode")
"""What a row of the request can be, the first that it has any time of."""


def lane(walked: Walk) -> dict[str, Any]:
    """Return columns, an entry a span: `begin_ms`, `end_ms` from receipt, and `kind`, a cause.

    `row`, `tokens` and `blocks` are null where the request was in no batch; a span in a batch is
    one tile. `left_out` counts older spans beyond the bound.
    """
    columns: dict[str, list[Any]] = {
        name: [] for name in ("begin_ms", "end_ms", "kind", "row", "tokens", "blocks")
    }
    received = walked.bounds.received
    kinds = _kinds(walked)
    begin_ns = walked.bounds.arrived
    for tile, row, end_ns, kind in zip(walked.tiles, walked.rows, walked.at_ns, kinds, strict=True):
        here = (
            (row, tile.token_counts[row], tile.kv_block_counts[row])
            if row >= 0
            else (None, None, None)
        )
        goes_on = row < 0 and columns["kind"] and columns["row"][-1] is None
        if goes_on and columns["kind"][-1] == kind:
            columns["end_ms"][-1] = _ms(end_ns - received)
        else:
            entry = (_ms(begin_ns - received), _ms(end_ns - received), kind, *here)
            for column, value in zip(columns.values(), entry, strict=True):
                column.append(value)
        begin_ns = end_ns
    left_out = max(0, len(columns["kind"]) - SPANS_MAX)
    return {**{name: column[left_out:] for name, column in columns.items()}, "left_out": left_out}


def _kinds(walked: Walk) -> list[str]:
    """Return what each tile was to the request: its own work, or what took most of the tile."""
    if not walked.tiles:
        return []
    kinds = [CAUSES[index] for index in walked.by_tile.argmax(axis=1).tolist()]
    own = walked.by_tile[:, [CAUSE_INDEX[cause] for cause in WORK]] > 0
    first, worked = own.argmax(axis=1), np.array(walked.rows) >= 0
    for index in np.flatnonzero(worked & own.any(axis=1)).tolist():
        kinds[index] = WORK[first[index]]
    return kinds


def _ms(ns: float) -> float:
    return round(ns / 1e6, 6)
