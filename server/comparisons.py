"""Two windows of the record compared inside a server: `iterscope diff` for the page.

Owns what bounds a comparison (one at a time, its length, its time) and the look-up of both sides;
telemetry/diff.py judges. server/diff_api.py asks it, on a thread of its own. All SQL goes the way
of clients' SQL. Must never run on the event loop.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from telemetry.answer import Answer, QueryError
from telemetry.case_files import CaseFiles
from telemetry.diff import Diff, compare
from telemetry.history import History
from telemetry.query_lane import QueriesBusy
from telemetry.sandbox import DeadlinePassed
from telemetry.sides import Side, read_side
from telemetry.spans import BadRange, Span, TimeRange, spans_named, spans_of

HOURS_MAX = 24
TIME_MAX_S = 60.0
FLUSH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """One side as asked for: what spans_named reads, of a recorded file where one is named."""

    text: str | None
    file: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a side turned out to be; `requests` that ended by themselves in it."""

    runs: list[str]
    from_unix_us: int
    to_unix_us: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both sides and what differs; `worse` when B is, beyond chance."""

    a: About
    b: About
    worse: bool
    diff: Diff


class Comparisons:
    """Compares, one at a time; who asks meanwhile is told to come again."""

    def __init__(
        self, history: History, files: CaseFiles, *, now_unix_us: Callable[[], int]
    ) -> None:
        self._history = history
        self._files = files
        self._now_unix_us = now_unix_us
        self._one = threading.Lock()

    def compare(self, a: Named, b: Named, given_up: threading.Event) -> Comparison:
        """Return what differs; raises BadRange or QueryError. Blocks for as long as a minute."""
        if not self._one.acquire(blocking=False):
            raise QueriesBusy("another comparison is being made")
        try:
            self._history.flush(FLUSH_S)
            until = time.monotonic() + TIME_MAX_S

            def side(name: str, named: Named) -> tuple[Side, About]:
                ask = _within(self._asker(named), until, given_up)
                try:
                    return self._read(named, ask)
                except BadRange as error:
                    raise BadRange(f"{name}: {error}") from error

            (one, about_one), (two, about_two) = side("A", a), side("B", b)
            diff = compare(one, two)
        finally:
            self._one.release()
        return Comparison(a=about_one, b=about_two, worse=diff.worse, diff=diff)

    def _asker(self, named: Named) -> Callable[[str, Sequence[object]], Answer]:
        name = named.file
        if name is None:
            return self._history.queries.run
        return lambda sql, parameters: self._files.run(name, sql, parameters)

    def _read(
        self, named: Named, ask: Callable[[str, Sequence[object]], Answer]
    ) -> tuple[Side, About]:
        if named.text is None:
            spans = spans_of(ask, TimeRange())
        else:
            now = self._now_unix_us() if named.file is None else None
            spans = spans_named(ask, named.text, now_unix_us=now)
        if sum(span.to_ns - span.from_ns for span in spans) > HOURS_MAX * 3600e9:
            raise BadRange(f"a server compares at most {HOURS_MAX} hours; `iterscope diff` any")
        side = read_side(ask, spans)
        if not side.requests.sum():
            raise BadRange("no request ended by itself in it: there is nothing to compare")
        return side, _about(spans, side)


def _about(spans: Sequence[Span], side: Side) -> About:
    return About(
        runs=[span.run_id for span in spans],
        from_unix_us=spans[0].from_unix_us,
        to_unix_us=spans[-1].to_unix_us,
        requests=int(side.requests.sum()),
    )


def _within(
    ask: Callable[[str, Sequence[object]], Answer], until: float, given_up: threading.Event
) -> Callable[[str, Sequence[object]], Answer]:
    """Return `ask` that refuses once the time is over, or nobody waits any more."""

    def bounded(sql: str, parameters: Sequence[object]) -> Answer:
        if given_up.is_set():
            raise QueryError("nobody waits for this comparison any more")
        if time.monotonic() > until:
            raise DeadlinePassed(f"stopped: comparing took longer than {TIME_MAX_S:g} s")
        return ask(sql, parameters)

    return bounded
