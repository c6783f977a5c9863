"""Ranges of time on record: what people write for one, and which rows of each table lie in it.

Owns the reading of `5m` and of ISO instants, the split of a range into one span for each run, and
the condition that says which rows belong to a span. reading.py pages through such rows,
recorder.py copies them: both mean the same rows. Must never open anything: it asks through `Ask`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Protocol

LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
RUN_WORDS = MappingProxyType({"last": -1, "previous": -2})
"""What names a run by its place, and that place."""


class Page(Protocol):
    """What an answer to one SELECT has: rows, and whether there are more."""

    @property
    def rows(self) -> list[list[Any]]:
        """Values that JSON can hold."""
        ...

    @property
    def truncated(self) -> bool:
        """Whether a limit cut the rows off."""
        ...


Ask = Callable[[str, Sequence[object]], Page]
"""One SELECT with $1, $2... and its parameters to its rows."""


class BadRange(Exception):
    """A range that cannot be read or holds nothing: one line that says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """A range as asked for, wall time [us]; None is open, `last_us` reaches back from the end."""

    from_unix_us: int | None = None
    to_unix_us: int | None = None
    last_us: int | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One run's part of a range, on the run's own clock [ns]; `started_unix_us` is its zero."""

    run_id: str
    started_unix_us: int
    from_ns: int
    to_ns: int

    @property
    def from_unix_us(self) -> int:
        """Return the begin as wall time."""
        return self.started_unix_us + self.from_ns // 1000

    @property
    def to_unix_us(self) -> int:
        """Return the end as wall time."""
        return self.started_unix_us + self.to_ns // 1000


def length_us(text: str) -> int:
    """Return a length such as `90s`, `5m` or `1.5h` in us; raises BadRange."""
    found = LENGTH.fullmatch(text.strip())
    if found is None:
        raise BadRange(f"{text!r} is no length of time such as 30s, 5m or 2h")
    length = round(float(found[1]) * SECONDS[found[2]] * 1e6)
    if not 0 < length < 10**17:
        raise BadRange(f"{text!r} is no length of time that a history could have")
    return length


def instant_us(text: str) -> int:
    """Return an ISO instant in us since 1970, UTC unless it names a zone; raises BadRange."""
    try:
        instant = datetime.fromisoformat(text.strip())
        if instant.tzinfo is None:
            instant = instant.replace(tzinfo=UTC)
        since = instant - EPOCH
    except (ValueError, OverflowError) as error:
        raise BadRange(f"{text!r} is no instant such as 2026-11-30T14:03:00") from error
    return since // timedelta(microseconds=1)


def range_of(
    *, last: str | None, since: str | None, until: str | None, run_id: str | None
) -> TimeRange:
    """Return the range that these texts ask for; raises BadRange."""
    if last and since:
        raise BadRange("last and from exclude each other")
    return TimeRange(
        from_unix_us=instant_us(since) if since else None,
        to_unix_us=instant_us(until) if until else None,
        last_us=length_us(last) if last else None,
        run_id=run_id,
    )


def window_of(text: str, *, now_unix_us: int) -> TimeRange:
    """Return the range of `FROM/TO`, each an instant, a time ago such as `15m`, or `now`."""
    since, _, until = text.partition("/")

    def end(part: str) -> int:
        if part.strip() == "now":
            return now_unix_us
        ago = LENGTH.fullmatch(part.strip())
        return now_unix_us - length_us(part) if ago else instant_us(part)

    return TimeRange(from_unix_us=end(since), to_unix_us=end(until))


def shown(unix_us: int) -> str:
    """Return an instant as people read it, in UTC."""
    return (EPOCH + timedelta(microseconds=unix_us)).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def spans_of(ask: Ask, asked: TimeRange, *, now_unix_us: int | None = None) -> list[Span]:
    """Return each run's part of a range, oldest first, ends clipped to what is on record.

    `last_us` reaches back from `now_unix_us`, or where that is None from the newest record. Raises
    BadRange when nothing on record lies in the range.
    """
    runs = runs_of(ask)
    if asked.run_id is not None:
        runs = [run for run in runs if run.run_id == asked.run_id]
    if not runs:
        what = f"no run {asked.run_id}" if asked.run_id else "no run at all"
        raise BadRange(f"there is {what} on record")
    newest = max(run.to_unix_us for run in runs)
    until = asked.to_unix_us
    since = asked.from_unix_us
    if asked.last_us is not None:
        until = until if until is not None else now_unix_us or newest
        since = until - asked.last_us
    if since is not None and until is not None and since >= until:
        raise BadRange(f"the range ends at {shown(until)}, before it begins")
    found = []
    for run in runs:
        begin = 0 if since is None else max(0, (since - run.started_unix_us) * 1000)
        end = run.to_ns if until is None else min(run.to_ns, (until - run.started_unix_us) * 1000)
        if begin <= end:
            found.append(replace(run, from_ns=begin, to_ns=end))
    if not found:
        raise BadRange(f"nothing on record in that range; the newest record is of {shown(newest)}")
    return found


def spans_named(ask: Ask, text: str, *, now_unix_us: int | None = None) -> list[Span]:
    """Return what one side of a comparison names, oldest first; raises BadRange.

    A side is a window `FROM/TO`, a run_id or its beginning, `last` or `previous`. Times ago count
    back from `now_unix_us`, or where that is None from the newest record.
    """
    runs = runs_of(ask)
    if not runs:
        raise BadRange("nothing is on record")
    if "/" in text:
        now = max(run.to_unix_us for run in runs) if now_unix_us is None else now_unix_us
        return spans_of(ask, window_of(text, now_unix_us=now))
    if text in RUN_WORDS:
        place = RUN_WORDS[text]
        if len(runs) < -place:
            raise BadRange(f"there is no {text!r} run; on record is only {runs[-1].run_id}")
        return [runs[place]]
    found = [run for run in runs if run.run_id == text]
    found = found or [run for run in runs if text and run.run_id.startswith(text)]
    if len(found) != 1:
        what = "several runs begin with" if found else "there is neither a file nor a run"
        raise BadRange(f"{what} {text!r}; on record: {', '.join(run.run_id for run in runs[-5:])}")
    return found


def runs_of(ask: Ask) -> list[Span]:
    """Return all that is on record, a span for each run, oldest first."""
    return [
        Span(run_id=run_id, started_unix_us=started, from_ns=0, to_ns=last_ns)
        for run_id, started, last_ns in ask(RUNS, []).rows
    ]


RUNS = """
SELECT run_id, min(started_unix_us), max(at_ns) FROM (
  SELECT run_id, started_unix_us, 0 AS at_ns FROM run
  UNION ALL SELECT run_id, NULL, max(end_at_ns) FROM iteration GROUP BY run_id
  UNION ALL SELECT run_id, NULL, max(arrived_at_ns) FROM request_start GROUP BY run_id
  UNION ALL SELECT run_id, NULL, max(released_at_ns) FROM request_end GROUP BY run_id
  UNION ALL SELECT run_id, NULL, max(last_write_at_ns) FROM delivery GROUP BY run_id
  UNION ALL SELECT run_id, NULL, max(rejected_at_ns) FROM rejection GROUP BY run_id
  UNION ALL SELECT run_id, NULL, max(fault_at_ns) FROM fault GROUP BY run_id
) GROUP BY run_id HAVING min(started_unix_us) IS NOT NULL ORDER BY 2, 1"""
"""Every run with the wall time of its zero and its newest instant."""

_LIVED = """request IN (
  SELECT request FROM request_start
  WHERE run_id = $1 AND arrived_at_ns <= $3 AND request NOT IN (
    SELECT request FROM request_end WHERE run_id = $1 AND released_at_ns < $2))"""
"""A request that lived in the span, even if it began before or ended after."""

_STEPS = "SELECT {} FROM iteration WHERE run_id = $1 AND end_at_ns > $2 AND begin_at_ns < $3"

LIES_IN: dict[str, str] = {
    "run": "true",
    "request_start": _LIVED,
    "iteration": "end_at_ns > $2 AND begin_at_ns < $3",
    "request_end": _LIVED,
    # The fit in force when the span begins, and every later one until its end.
    "step_model": "seq <= (" + _STEPS.format("coalesce(max(seq), 0)") + ") AND seq >= coalesce(("
    "SELECT max(seq) FROM step_model WHERE run_id = $1 AND seq < ("
    + _STEPS.format("min(seq)")
    + ")), 0)",
    "delivery": _LIVED,
    "request_cause": _LIVED,
    "request_share": _LIVED,
    "rejection": "rejected_at_ns BETWEEN $2 AND $3",
    "fault": "fault_at_ns BETWEEN $2 AND $3",
    "telemetry_lost": "to_seq >= (" + _STEPS.format("coalesce(min(seq), 0)") + ") "
    "AND from_seq <= (" + _STEPS.format("coalesce(max(seq), 0)") + ")",
}
"""Which rows of run $1 belong to a span from $2 to $3 ns, by table; who lived in it is whole."""


def parameters(span: Span) -> list[object]:
    """Return $1, $2 and $3 of a condition in LIES_IN."""
    return [span.run_id, span.from_ns, span.to_ns]
