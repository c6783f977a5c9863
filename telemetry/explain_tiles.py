"""One iteration and one life as explaining sees them: their instants, and what bounds them.

Owns Tile (what is needed of an iteration, from the bus or from SQL), Bounds (where a life is cut)
and the causes of what lies before and after the engine's part. explain_walk.py and explain_fold.py
read lives through it, so that both read them alike. Divides no step: that is explain.py's.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from telemetry.explain import Batch, Ints, Model
from telemetry.records import CAUSES, Delivery, Iteration, RequestEnd, RequestStart, StepModel

CAUSE_INDEX = {cause: index for index, cause in enumerate(CAUSES)}


class Tile(NamedTuple):
    """What explaining needs of an iteration; the fields have its names."""

    step: int
    begin_at_ns: int
    end_at_ns: int
    commit_ns: int
    device_ns: int
    admission_stop: str
    admission_blocker: int | None
    padding_tokens: int
    idle_rows: int
    requests: list[int]
    start_positions: list[int]
    token_counts: list[int]
    kv_block_counts: list[int]
    admitted: list[int]
    admitted_cached_tokens: list[int]
    passed_over: list[int]
    preempted: list[int]
    preempted_causes: list[str]
    preempted_lost_tokens: list[int]
    preempted_beneficiaries: list[int]


_facts = attrgetter(*Tile._fields)


def tile_of(record: Iteration) -> Tile:
    """Return an iteration as a tile."""
    return Tile(*_facts(record))


class Bounds(NamedTuple):
    """Instants in ns that cut a life: `last` ends it, the engine's part goes from arrived to stop.

    Of a sequence that got all it asked for, life ends with the last write: a stop string ends an
    answer before the engine hears of it. `cut` ends its rows; from there to `stop` it is held.
    """

    received: int
    submitted: int
    arrived: int
    cut: int
    stop: int
    last: int


def bounds(
    start: RequestStart, end: RequestEnd | None, delivery: Delivery | None, through_ns: int
) -> Bounds:
    """Return a life's bounds; one that has not ended is told as far as `through_ns`."""
    arrived = start.arrived_at_ns
    received = end.received_at_ns if end else arrived
    submitted = arrived
    written = None
    if delivery is not None:
        received, submitted = delivery.received_at_ns, delivery.submitted_at_ns
        written = delivery.last_write_at_ns
    if end is None:
        through = max(arrived, through_ns)
        return Bounds(received, submitted, arrived, through, through, through)
    freed = max(arrived, end.released_at_ns if end.freed_at_ns is None else end.freed_at_ns)
    last = written
    # A client that left while the engine went on to an end of its own, with no abort in time, has
    # not got what it asked for: its last write may lie any number of steps before that end.
    left = written is not None and written < end.decided_at_ns and not end.cancel_requested_at_ns
    if last is None or left or end.finish not in ("stop", "length"):
        last = max(freed, written or 0)
    stop = min(freed, max(arrived, last))
    return Bounds(received, submitted, arrived, min(end.decided_at_ns, stop), stop, max(stop, last))


def waits_for(stop: str) -> str:
    """Return the cause of waiting in a step whose admission ended with this check.

    Nobody waited when that step was planned: it was under way when the sequence arrived.
    """
    return "step_boundary" if stop == "no_waiting" else f"queue_{stop}"


def before(limits: Bounds, delivery: Delivery | None) -> dict[str, int]:
    """Return the causes of the time from receipt to arrival in the engine.

    Without the server's own record of it (the server was killed) nobody knows.
    """
    if delivery is None:
        return {"unexplained": limits.arrived - limits.received}
    return {
        "tokenize": limits.submitted - limits.received,
        "step_boundary": limits.arrived - limits.submitted,
    }


def after(limits: Bounds, delivery: Delivery | None, untold_ns: int) -> dict[str, int]:
    """Return the causes of the time from the last tile on, and what no tile told before it.

    Writes that waited for the client count from the engine's end on; earlier ones overlap tiles.
    """
    output = limits.last - limits.stop
    stalled = min(output, delivery.stall_ns) if delivery else 0
    return {"output": output - stalled, "client_stall": stalled, "unexplained": untold_ns}


def batch_of(
    tiles: Sequence[Tile], models: Sequence[Model], prompts: Mapping[int, int]
) -> tuple[Batch, Ints]:
    """Return all rows of these tiles, and the request of each row."""
    members = [request for tile in tiles for request in tile.requests]
    rows = [len(tile.requests) for tile in tiles]
    batch = Batch(
        steps=np.repeat(np.arange(len(tiles)), rows),
        starts=_flat(tile.start_positions for tile in tiles),
        counts=_flat(tile.token_counts for tile in tiles),
        prompts=np.array([prompts.get(request, 0) for request in members], dtype=np.int64),
        device_ns=np.array([tile.device_ns for tile in tiles], dtype=np.int64),
        spare=np.array([tile.padding_tokens + tile.idle_rows for tile in tiles], dtype=np.int64),
        models=np.array(models, dtype=np.float64).reshape(len(tiles), len(Model._fields)),
    )
    return batch, np.array(members, dtype=np.int64)


def _flat(lists: Iterable[list[int]]) -> Ints:
    return np.array([value for one in lists for value in one], dtype=np.int64)


def model_of(record: StepModel) -> Model:
    """Return a fit as the rules take it."""
    return Model(record.fixed, record.p, record.d, record.c, 1.0, record.error)
