"""Causes of requests that have none on record: an older history's, or those that a loss took.

Owns the second folding of records that were read back. sides.py asks for it when causes are
missing. Comes to the same causes as the server's own fold of the same records; a request that
began before the range keeps that part as `unexplained`. Must never change what is on record.
"""

from collections.abc import Iterable, Iterator

from telemetry.bus import Bus
from telemetry.explain_fold import CauseFold
from telemetry.reading import Placed
from telemetry.records import RequestCause

FOLDED = ("run", "request_start", "iteration", "request_end", "step_model", "delivery")
"""Kinds that the fold reads."""
RING = 4096


def causes_of(records: Iterable[Placed]) -> Iterator[RequestCause]:
    """Yield the causes of every request that ends in these records of one run, in order."""
    bus = Bus(run_id="read back", capacity=RING)
    fold = CauseFold(bus)
    for placed in records:
        bus.publish(placed.record, b"")
        if bus.head % (RING // 2) == 0:
            yield from _causes(fold)
    yield from _causes(fold)
    fold.close()


def _causes(fold: CauseFold) -> Iterator[RequestCause]:
    for record in fold.advance():
        if isinstance(record, RequestCause):
            yield record
