"""Recorded files for tests: records in, one DuckDB file with every table out, as a segment is.

Owns the way from the simulated core's records (tests/simulation.py) to a file that any command
opens, in the order in which a server publishes them. Starts no server and no thread.
"""

from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path

import duckdb

from telemetry.bus import KIND_NAMES
from telemetry.reading import Placed
from telemetry.records import KINDS, Iteration, Record, RequestEnd, Run, columns
from telemetry.schema import ddl
from telemetry.spans import Ask, Page
from tests import samples
from tests.simulation import Recorder

STARTED_US = 1_796_000_000_000_000


def placed(records: Iterable[Record], run_id: str = "run-1") -> list[Placed]:
    """Give records their place, as the bus does."""
    generation, found = 0, []
    for seq, record in enumerate(records, 1):
        generation += isinstance(record, Run)
        found.append(Placed(run_id, generation, seq, record))
    return found


def published(emitted: Recorder, **run: object) -> list[Record]:
    """Return what a core emitted in a bus's order: starts early, each end after its step."""
    records: list[Record] = [samples.run(**({"started_unix_us": STARTED_US} | run))]
    starts, ends = list(emitted.starts), {end.request: end for end in emitted.ends}
    models, faults = list(emitted.step_models), list(emitted.faults)
    for iteration in emitted.iterations:
        while starts and starts[0].arrived_at_ns <= iteration.end_at_ns:
            records.append(starts.pop(0))
        records.append(iteration)
        records += [ends.pop(request) for request in iteration.finished]
        while models and models[0].step <= iteration.step:
            records.append(models.pop(0))
        while faults and faults[0].fault_at_ns <= iteration.end_at_ns:
            records.append(faults.pop(0))
    return [*records, *starts, *ends.values()]


def write_file(path: Path, *runs: list[Placed]) -> Path:
    """Write runs into a file of ours and return its path."""
    with duckdb.connect(path) as connection:
        for statement in ddl():
            connection.execute(statement)
        rows: dict[str, list[tuple[object, ...]]] = {}
        for one in (one for run in runs for one in run):
            name = KIND_NAMES[type(one.record)]
            fields = attrgetter(*(column.name for column in columns(KINDS[name])))
            row = (one.run_id, one.generation, one.seq, *fields(one.record))
            rows.setdefault(name, []).append(row)
        for name, new in rows.items():
            appender = connection.appender(name)
            appender.append_rows(new)
            appender.flush()
    return path


class Rows:
    """An answer as `Ask` gives it."""

    def __init__(self, rows: list[list[object]], truncated: bool) -> None:
        self.rows = rows
        self.truncated = truncated


def asking(path: Path, *, rows_max: int = 10_000) -> Ask:
    """Return a way to ask a file that cuts answers off at `rows_max`, as a server may."""
    connection = duckdb.connect(path, read_only=True)

    def ask(sql: str, parameters: object) -> Page:
        rows = [list(row) for row in connection.execute(sql, parameters).fetchall()]
        return Rows(rows[:rows_max], len(rows) > rows_max)

    return ask


def steps_of(records: Iterable[Record]) -> list[Iteration]:
    return [record for record in records if isinstance(record, Iteration)]


def ends_of(records: Iterable[Record]) -> dict[int, RequestEnd]:
    return {record.request: record for record in records if isinstance(record, RequestEnd)}
