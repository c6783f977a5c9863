"""Which segments to merge and which to delete: decisions over a list, and nothing else.

Owns the ladder (the minutes of a past hour become one file, the hours of a past day one more), the
most files there may be, and what age and size let go. archive.py acts on it. Knows no file and no
clock: it is told the time.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby

from telemetry.segments import LEVELS, Level, Segment

SEGMENTS_MAX = 100
CROWDED = 90
HOUR_US = 3_600 * 10**6
DAY_US = 24 * HOUR_US
CLOSING: tuple[tuple[Level, tuple[Level, ...], int], ...] = (
    ("day", ("minute", "hour"), DAY_US),
    ("hour", ("minute",), HOUR_US),
)
"""A level, those that it takes in, and how long a span of it is."""


def due_merge(segments: Sequence[Segment], now_us: int) -> tuple[Level, list[Segment]] | None:
    """Return the next merge, its level and its sources by age, or None.

    Days come before hours, so that what a server left at midnight is merged once. When the files
    are too many all the same (many restarts, a long retention), the older half of the level that
    has most of them moves up.
    """
    ours = sorted((s for s in segments if s.level in LEVELS), key=_age)
    for level, below, span_us in CLOSING:
        lower = [s for s in ours if s.level in below]
        by_number = groupby(lower, key=partial(_number, span_us))
        for number, group in by_number:
            sources = list(group)
            if len(sources) > 1 and number < now_us // span_us:
                return level, sources
    if len(ours) <= CROWDED:
        return None
    by_level = {level: [s for s in ours if s.level == level] for level in LEVELS}
    crowd = max(LEVELS, key=lambda level: len(by_level[level]))
    above: Level = "hour" if crowd == "minute" else "day"
    return above, by_level[crowd][: (len(by_level[crowd]) + 1) // 2]


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


def _number(span_us: int, segment: Segment) -> int:
    return segment.first_unix_us // span_us


def _age(segment: Segment) -> tuple[int, str]:
    return segment.first_unix_us, segment.path.name
