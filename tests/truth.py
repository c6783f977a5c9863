"""What a run's records say, computed in plain Python: what named queries are held against.

Owns the figures' definitions a second time, from the records themselves and without SQL, and the
file of runs that queries are asked on. Tests of post-mortems use it. Never looks at a query's text.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from telemetry.named import catalogue
from telemetry.records import (
    Delivery,
    Fault,
    Iteration,
    Record,
    Rejection,
    RequestCause,
    RequestEnd,
    RequestShare,
    RequestStart,
    Run,
    StepModel,
)
from tests import sick_runs
from tests.sick_runs import DAY_US, FIRST_STARTED_UNIX_US, of

RUNS: dict[str, Callable[[], list[Record]]] = {
    "healthy": sick_runs.healthy,
    "thrash": sick_runs.preemption_thrash,
    "restart": sick_runs.engine_deaths,
    "faulty": sick_runs.survived_faults,
    "gaps": sick_runs.telemetry_gaps,
    "graphs": sick_runs.graph_misses,
}


@contextmanager
def opened(folder: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Write every run into one file, a day apart, and open it."""
    path = sick_runs.write_runs(
        folder / "runs.duckdb", {name: make() for name, make in RUNS.items()}
    )
    with duckdb.connect(path, read_only=True) as connection:
        yield connection


def ask(
    connection: duckdb.DuckDBPyConnection, name: str, *, run: str = "healthy", **given: object
) -> list[dict[str, Any]]:
    """Run a named query, on the whole of one run if it is windowed."""
    query = catalogue()[name]
    window = {"from_unix_us": 0, "run_id": run} if query.windowed else {}
    bound = query.bind(window | given)
    answer = connection.execute(bound.sql, bound.parameters)
    names = [column[0] for column in answer.description]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


def started_us(name: str) -> int:
    return FIRST_STARTED_UNIX_US + list(RUNS).index(name) * DAY_US


def truth(name: str) -> "Truth":
    return Truth(RUNS[name](), started_us(name))


def quantile(values: Iterable[float], share: float) -> float:
    return float(np.quantile(list(values), share))


@dataclass(frozen=True)
class Step:
    """An iteration with what follows from it."""

    record: Iteration
    at_us: int

    @property
    def ns(self) -> int:
        return self.record.end_at_ns - self.record.begin_at_ns


@dataclass(frozen=True)
class Truth:
    """One run's records, read without SQL."""

    records: list[Record]
    started_us: int

    @cached_property
    def run(self) -> Run:
        return of(Run, self.records)[0]

    @cached_property
    def steps(self) -> list[Step]:
        return [Step(i, self.at_us(i.end_at_ns)) for i in of(Iteration, self.records)]

    @cached_property
    def starts(self) -> dict[int, RequestStart]:
        return {start.request: start for start in of(RequestStart, self.records)}

    @cached_property
    def ends(self) -> list[RequestEnd]:
        return of(RequestEnd, self.records)

    @cached_property
    def deliveries(self) -> dict[int, Delivery]:
        return {delivery.request: delivery for delivery in of(Delivery, self.records)}

    @cached_property
    def causes(self) -> dict[int, dict[str, int]]:
        found: defaultdict[int, dict[str, int]] = defaultdict(dict)
        for cause in of(RequestCause, self.records):
            found[cause.request][cause.cause] = cause.ns
        return found

    @cached_property
    def shares(self) -> dict[int, RequestShare]:
        return {share.request: share for share in of(RequestShare, self.records)}

    @cached_property
    def faults(self) -> list[Fault]:
        return of(Fault, self.records)

    @cached_property
    def rejections(self) -> list[Rejection]:
        return of(Rejection, self.records)

    @cached_property
    def models(self) -> list[StepModel]:
        return of(StepModel, self.records)

    def at_us(self, at_ns: int) -> int:
        return self.started_us + at_ns // 1000

    def name(self, request: int) -> str:
        return self.starts[request].request_id

    # ---- figures of a request

    def e2e_ms(self, end: RequestEnd) -> float:
        last = self.deliveries[end.request].last_write_at_ns
        return ((last or end.released_at_ns) - end.received_at_ns) / 1e6

    def ttft_ms(self, end: RequestEnd) -> float | None:
        first = self.deliveries[end.request].first_write_at_ns
        return None if first is None else (first - end.received_at_ns) / 1e6

    def tpot_ms(self, end: RequestEnd) -> float | None:
        delivery = self.deliveries[end.request]
        if delivery.last_write_at_ns is None or end.output_tokens < 2:
            return None
        assert delivery.first_write_at_ns is not None
        whole = delivery.last_write_at_ns - delivery.first_write_at_ns
        return whole / 1e6 / (end.output_tokens - 1)

    def waited_ms(self, end: RequestEnd) -> float:
        until = end.admitted_at_ns if end.admitted_at_ns is not None else end.decided_at_ns
        return (until - end.arrived_at_ns) / 1e6

    def token_gaps(self) -> list[tuple[int, Step, Step]]:
        """Every (request, step of a token, step of its next one), in order of the later."""
        reached: dict[int, int] = {}
        last: dict[int, Step] = {}
        gaps = []
        for step in self.steps:
            record = step.record
            for row, request in enumerate(record.requests):
                reach = record.start_positions[row] + record.token_counts[row]
                if reach < self.starts[request].prompt_tokens or reach <= reached.get(request, 0):
                    reached[request] = max(reach, reached.get(request, 0))
                    continue
                reached[request] = reach
                if request in last:
                    gaps.append((request, last[request], step))
                last[request] = step
        return gaps

    # ---- time cut into buckets

    @property
    def newest_us(self) -> int:
        instants = [step.record.end_at_ns for step in self.steps]
        instants += [end.released_at_ns for end in self.ends]
        instants += [d.last_write_at_ns or 0 for d in self.deliveries.values()]
        return self.at_us(max(instants))

    def buckets(self, points: int) -> tuple[list[int], list[float], Callable[[int], int]]:
        """Return where each begins, how long each is [s], and which one an instant falls into."""
        begin, end = self.started_us, self.newest_us + 1
        length = -(-(end - begin) // points)
        begins = list(range(begin, end, length))
        lengths = [(min(at + length, end) - at) / 1e6 for at in begins]
        return begins, lengths, lambda at_us: (at_us - begin) // length
