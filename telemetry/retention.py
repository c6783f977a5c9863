"""Which segments to merge and which to delete: decisions over a list, and nothing else.

Owns the ladder (minutes become hours, hours become days, unfinished ones in parts), the most files
there may be, and what age and size let go. archive.py acts on it. Knows no file and no clock: it is
told the time. Few files matter: each costs every query 0.2 to 0.5 ms before it reads a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from telemetry.segments import LEVELS, Level, Segment

CROWDED = 90
"""A merge is due above this, so that there are never 100 files."""
HOUR_US = 3_600 * 10**6
DAY_US = 24 * HOUR_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """How files become one of `level`: those of `closed` levels once its span of `span_us` is over,
    and in a span that goes on each `parts` files of the `open` level, once theirs is over.
    """

    level: Level
    span_us: int
    closed: tuple[Level, ...]
    open: Level
    open_span_us: int
    parts: int


LADDER = (
    Rung(level="day", span_us=DAY_US, closed=LEVELS, open="hour", open_span_us=HOUR_US, parts=8),
    Rung(
        level="hour",
        span_us=HOUR_US,
        closed=("minute", "hour"),
        open="minute",
        open_span_us=1,
        parts=10,
    ),
)
"""Days first: what a server left at midnight is merged once. A day ends as one file."""


def due_merge(segments: Sequence[Segment], now_us: int) -> tuple[Level, list[Segment]] | None:
    """Return the next merge, its level and its sources by age, or None.

    When the files are too many all the same (a long retention), the older half of the level that
    has most of them becomes one.
    """
    ours = sorted((s for s in segments if s.level in LEVELS), key=_age)
    for rung in LADDER:
        for number, sources in _spans(ours, rung.span_us):
            closed = [s for s in sources if s.level in rung.closed]
            if number < now_us // rung.span_us and len(closed) > 1:
                return rung.level, closed
            over = now_us // rung.open_span_us
            part = [
                s
                for s in sources
                if s.level == rung.open and s.first_unix_us // rung.open_span_us < over
            ]
            if len(part) >= rung.parts:
                return rung.level, part
    if len(ours) <= CROWDED:
        return None
    by_level = {level: [s for s in ours if s.level == level] for level in LEVELS}
    crowd = max(LEVELS, key=lambda level: len(by_level[level]))
    above: Level = "hour" if crowd == "minute" else "day"
    return above, by_level[crowd][: (len(by_level[crowd]) + 1) // 2]


def _spans(segments: Sequence[Segment], span_us: int) -> list[tuple[int, list[Segment]]]:
    by_span: dict[int, list[Segment]] = {}
    for segment in segments:
        by_span.setdefault(segment.first_unix_us // span_us, []).append(segment)
    return sorted(by_span.items())


def expired(
    segments: Sequence[Segment], *, now_us: int, days: float, bytes_max: int
) -> list[Segment]:
    """Return the segments to delete: all older than `days`, then the oldest above `bytes_max`."""
    ours = sorted((s for s in segments if s.level in LEVELS), key=_age)
    horizon_us = now_us - int(days * DAY_US)
    gone = [s for s in ours if s.last_unix_us < horizon_us]
    left = [s for s in ours if s.last_unix_us >= horizon_us]
    excess = sum(s.bytes for s in left) - bytes_max
    for segment in left:
        if excess <= 0:
            break
        gone.append(segment)
        excess -= segment.bytes
    return gone


def _age(segment: Segment) -> tuple[int, str]:
    return segment.first_unix_us, segment.path.name
