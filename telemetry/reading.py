"""Records read back from the history, in the order in which they were published, page by page.

Owns the way from rows to records. perfetto.py and diff.py read through it, from a server, a history
or a file alike: it knows only `Ask`. Holds one page of each kind, never a whole range, so that a
day can be read. Must never reorder: within a run, seq rises.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from telemetry.records import KINDS, Record, columns
from telemetry.schema import quoted
from telemetry.spans import LIES_IN, Ask, Span, parameters

PAGE_ROWS = 2000


@dataclass(frozen=True, slots=True)
class Placed:
    """A record and its place in its run."""

    run_id: str
    generation: int
    seq: int
    record: Record


def read_records(
    ask: Ask, spans: Iterable[Span], kinds: Collection[str] = tuple(KINDS)
) -> Iterator[Placed]:
    """Yield the records of these kinds that lie in the spans, span by span, by seq in each."""
    for span in spans:
        pages = [_rows(ask, span, kind) for kind in kinds]
        yield from heapq.merge(*pages, key=lambda placed: placed.seq)


def _rows(ask: Ask, span: Span, kind: str) -> Iterator[Placed]:
    made = KINDS[kind]
    names = [column.name for column in columns(made)]
    sql = (
        f"SELECT generation, seq, {', '.join(map(quoted, names))} FROM {kind} "
        f"WHERE run_id = $1 AND seq > $4 AND {LIES_IN[kind]} ORDER BY seq LIMIT {PAGE_ROWS}"
    )
    if "$2" not in LIES_IN[kind]:  # DuckDB refuses a parameter that stands nowhere
        sql = sql.replace("WHERE ", "WHERE $2 IS NOT NULL AND $3 IS NOT NULL AND ", 1)
    after = -1
    while True:
        page = ask(sql, [*parameters(span), after])
        for generation, seq, *values in page.rows:
            record = made(**dict(zip(names, values, strict=True)))
            yield Placed(span.run_id, generation, seq, record)
            after = seq
        if not page.rows or not (page.truncated or len(page.rows) == PAGE_ROWS):
            return
