"""Which segments are merged and which deleted: a made-up server, minute by minute.

Owns the proofs of telemetry/retention.py, on lists alone; no file is touched.
"""

import random
from pathlib import Path

import pytest

from telemetry.retention import DAY_US, HOUR_US, due_merge, expired
from telemetry.segments import Reach, Segment

MINUTE_US = 60 * 10**6
MONDAY_US = 20_000 * DAY_US
MINUTES = 3 * 1440


def segment(first_us: int, last_us: int, level: str = "minute", size: int = 100) -> Segment:
    reach = Reach(
        first_seq=first_us,
        last_seq=last_us,
        first_unix_us=first_us,
        last_unix_us=last_us,
        rows=1,
        slices=1,
    )
    return Segment(
        path=Path(f"{first_us}-{level}-{last_us}.duckdb"),
        level=level,
        schema_version=1,
        runs={"run": reach},
        sources=frozenset(),
        bytes=size,
    )


def merged(segments: list[Segment], now_us: int) -> tuple[list[Segment], int]:
    """Do every merge that is due; return what is left and how many bytes were written."""
    written = 0
    while due := due_merge(segments, now_us):
        level, sources = due
        assert len(sources) > 1
        one = segment(
            min(s.first_unix_us for s in sources),
            max(s.last_unix_us for s in sources),
            level,
            sum(s.bytes for s in sources),
        )
        segments = [s for s in segments if s not in sources] + [one]
        written += one.bytes
    return segments, written


def test_days_have_few_files_and_each_byte_is_written_few_times() -> None:
    segments: list[Segment] = []
    most = written = 0
    for minute in range(MINUTES):
        now_us = MONDAY_US + (minute + 1) * MINUTE_US
        segments.append(segment(now_us - MINUTE_US, now_us - 1))
        segments, more = merged(segments, now_us)
        gone = expired(segments, now_us=now_us, days=2, bytes_max=10**9)
        segments = [s for s in segments if s not in gone]
        most, written = max(most, len(segments)), written + more
    assert most <= 28
    assert written / (MINUTES * 100) < 5
    covered = sum(s.last_unix_us - s.first_unix_us + 1 for s in segments)
    assert covered == sum(s.bytes for s in segments) / 100 * MINUTE_US, "no minute is lost"
    assert 2 * DAY_US <= covered <= 3 * DAY_US, "whole segments leave"


def test_a_past_day_is_one_file_whenever_the_server_comes_back() -> None:
    pieces = [segment(MONDAY_US + i * HOUR_US, MONDAY_US + i * HOUR_US + 5) for i in range(5)]
    assert len(merged(pieces, MONDAY_US + 6 * HOUR_US)[0]) == 5
    (day,), _ = merged(pieces, MONDAY_US + DAY_US)
    assert (day.level, day.first_unix_us) == ("day", MONDAY_US)
    late = segment(MONDAY_US + 23 * HOUR_US, MONDAY_US + 23 * HOUR_US + 5)
    assert [s.level for s in merged([day, late], MONDAY_US + 2 * DAY_US)[0]] == ["day"]


@pytest.mark.parametrize("seed", range(5))
def test_restarts_and_stepping_clocks_never_pile_up_files(seed: int) -> None:
    pick, segments, now_us = random.Random(seed), [], MONDAY_US
    for _ in range(700):
        now_us += pick.choice((1, MINUTE_US, HOUR_US, -HOUR_US, DAY_US // 3))
        segments.append(segment(now_us, now_us + pick.randrange(MINUTE_US)))
        segments, _ = merged(segments, now_us)
        assert len(segments) < 100


def test_age_then_size_let_the_oldest_go() -> None:
    days = [segment(MONDAY_US + i * DAY_US, MONDAY_US + (i + 1) * DAY_US - 1) for i in range(9)]
    now_us = MONDAY_US + 9 * DAY_US
    assert expired(days, now_us=now_us, days=7, bytes_max=10**9) == days[:2]
    assert expired(days, now_us=now_us, days=7, bytes_max=350) == days[:6]
    assert expired(days, now_us=now_us, days=100, bytes_max=900) == []
    assert expired(days, now_us=now_us, days=100, bytes_max=0) == days


def test_a_file_of_another_kind_is_never_touched() -> None:
    incident = segment(MONDAY_US, MONDAY_US + 5, level="record", size=10**9)
    other = [segment(MONDAY_US, MONDAY_US + 5), segment(MONDAY_US + 6, MONDAY_US + 9)]
    left, _ = merged([incident, *other], MONDAY_US + 10 * DAY_US)
    assert incident in left
    assert incident not in expired(left, now_us=MONDAY_US + 99 * DAY_US, days=1, bytes_max=0)
