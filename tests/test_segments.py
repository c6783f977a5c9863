"""Closed spans leave the live file as segments, and every row stands in exactly one place.

Owns the proofs of telemetry/archive.py, segments.py and upkeep.py on real files: rotation and
merges while records come, each state that a crash can leave, damaged and foreign segments.
"""

import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest

from telemetry import database
from telemetry.bus import Bus
from telemetry.schema import tables
from telemetry.segments import Stopped
from telemetry.store import Store
from tests import samples
from tests.histories import ROOT, WAIT_S, ask, kept, wait_for

YESTERDAY_US = (time.time_ns() // 86_400_000_000_000 - 1) * 86_400_000_000
EVERY_SEQ = " UNION ALL ".join(
    f"SELECT run_id, seq FROM {name}" for name, _, _ in tables() if name != "telemetry_lost"
)
QUICK = 0.1


def now_us() -> int:
    return time.time_ns() // 1000


def publish_steps(bus: Bus, first: int, count: int) -> None:
    for step in range(first, first + count):
        bus.publish(samples.iteration(step, [1, 2]))
        bus.publish(samples.start(step))
        bus.publish(samples.end(step))


def look(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    """Ask the folder itself, as commands do once no server holds it."""
    with closing(database.open_read_only(folder)) as connection:
        return connection.execute(sql).fetchall()


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "segments").glob("*.duckdb"))


def assert_each_row_once(folder: Path, run_id: str, head: int) -> None:
    """Check that exactly the seqs 1 to `head` of a run are there, or on record as lost."""
    ((count, distinct, last),) = look(
        folder,
        f"SELECT count(*), count(DISTINCT seq), coalesce(max(seq), 0) FROM ({EVERY_SEQ})"
        f" WHERE run_id = '{run_id}'",
    )
    ((lost, lost_to),) = look(
        folder,
        "SELECT coalesce(sum(lost), 0)::BIGINT, coalesce(max(to_seq), 0) FROM telemetry_lost"
        f" WHERE run_id = '{run_id}'",
    )
    assert count == distinct, "a row is doubled"
    assert (count + lost, max(last, lost_to)) == (head, head)


class Book:
    """A store without its threads: records in, spans out, step by step."""

    def __init__(self, folder: Path, run_id: str, started_unix_us: int | None = None) -> None:
        self.bus = Bus(run_id=run_id, capacity=1000)
        self.reader = self.bus.reader(0)
        self.store = Store(folder, run_id, logging.getLogger("iterscope.history"))
        self.archive = self.store.archive
        self.bus.publish(samples.run(started_unix_us=started_unix_us or now_us()))

    def put(self, first: int) -> None:
        """Store thirty records of ten steps."""
        publish_steps(self.bus, first, 10)
        self.store.append(self.reader.take(1000))

    def merge(self, now: int) -> None:
        while self.archive.merge(now, bool):
            pass

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return self.store.cursor().execute(sql).fetchall()


@contextmanager
def book(folder: Path, run_id: str, started_unix_us: int | None = None) -> Iterator[Book]:
    opened = Book(folder, run_id, started_unix_us)
    try:
        yield opened
    finally:
        opened.store.close()


def rotated(folder: Path, run_id: str, pieces: int, started_unix_us: int | None = None) -> int:
    """Keep a run whose records become so many segments; return its last seq."""
    with book(folder, run_id, started_unix_us) as one:
        for piece in range(pieces):
            one.put(1 + 10 * piece)
            assert one.archive.rotate()
        return one.bus.head


# ---- in health


def test_rows_move_into_segments_and_each_is_seen_once(tmp_path: Path) -> None:
    with kept(tmp_path, "one", history_segment_s=QUICK) as (bus, history):
        bus.publish(samples.run(started_unix_us=now_us()))
        for piece in range(10):
            publish_steps(bus, 1 + 10 * piece, 10)
            assert history.flush(WAIT_S)
            count = f"SELECT count(*) = {bus.head}, count(DISTINCT seq) = {bus.head}"
            assert ask(history, f"{count} FROM ({EVERY_SEQ})") == [[True, True]]
        wait_for(lambda: history.status().segments >= 2)
        wait_for(lambda: history.status().rows == bus.head)
        # Sizes first: a segment may be finished between the two.
        wait_for(
            lambda: sum(path.stat().st_size for path in segments(tmp_path)) < history.status().bytes
        )
        assert history.status().lag_s < WAIT_S
        head = bus.head
    assert_each_row_once(tmp_path, "one", head)
    assert look(tmp_path, "SELECT count(*), sum(token_count) FROM slice") == [(200, 200)]


def test_a_segment_stands_alone_and_any_duckdb_reads_it(tmp_path: Path) -> None:
    head = rotated(tmp_path, "one", 1)
    (path,) = segments(tmp_path)
    assert not path.with_name(path.name + ".wal").exists()
    with duckdb.connect(path, read_only=True) as alone:
        assert alone.execute("SELECT count(*) FROM slice").fetchall() == [(20,)]
        assert alone.execute(
            "SELECT schema_version, level, run_id, first_seq, last_seq, rows, slices FROM segment"
        ).fetchall() == [(1, "minute", "one", 1, head, head, 20)]
        tags = "SELECT tags['storage_version'] FROM duckdb_databases() WHERE path IS NOT NULL"
        ((version,),) = alone.execute(tags).fetchall()
        assert version.startswith("v1.2")
        with pytest.raises(duckdb.Error):
            alone.execute("DELETE FROM run")


def test_minutes_of_a_past_day_become_one_file(tmp_path: Path) -> None:
    heads = {run: rotated(tmp_path, run, 2, YESTERDAY_US) for run in ("a", "b")}
    with book(tmp_path, "now") as one:
        one.merge(YESTERDAY_US + 86_399_000_000)
        assert ["-hour-" in path.name for path in segments(tmp_path)] == [True]
        one.put(1)
        one.archive.rotate()
        one.merge(now_us())
        assert len(segments(tmp_path)) == 2, "a day of one file, and this minute"
        assert one.ask("SELECT count(*) FROM run") == [(3,)]
    for run_id, head in heads.items():
        assert_each_row_once(tmp_path, run_id, head)


def test_a_query_that_runs_survives_a_merge(tmp_path: Path) -> None:
    for run_id in ("a", "b"):
        rotated(tmp_path, run_id, 1, YESTERDAY_US)
    with book(tmp_path, "now") as one:
        reading = one.store.cursor()
        reading.execute("SELECT count(*) FROM iteration a, iteration b, iteration c, iteration d")
        assert one.archive.merge(now_us(), bool)
        assert len(segments(tmp_path)) == 1
        assert reading.fetchall() == [(20**4,)]
        assert one.ask("SELECT count(*) FROM iteration") == [(20,)]


def test_a_merge_stops_between_two_tables_and_leaves_nothing(tmp_path: Path) -> None:
    head = rotated(tmp_path, "a", 2, YESTERDAY_US)
    with book(tmp_path, "now") as one, pytest.raises(Stopped):
        one.archive.merge(now_us(), lambda: True)
    assert len(segments(tmp_path)) == 2
    assert not list((tmp_path / "segments").glob("*.partial*"))
    assert_each_row_once(tmp_path, "a", head)


def test_retention_deletes_whole_segments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rotated(tmp_path, "old", 2, int((time.time() - 8 * 86_400) * 1e6))
    head = rotated(tmp_path, "new", 1)
    with book(tmp_path, "now") as one:
        assert one.archive.retire(now_us(), days=7, bytes_max=2**30)
        assert one.ask("SELECT DISTINCT run_id FROM iteration") == [("new",)]
        assert not one.archive.retire(now_us(), days=7, bytes_max=2**30)
    assert len(segments(tmp_path)) == 1
    with book(tmp_path, "after") as one:
        assert one.ask("FROM telemetry_lost") == [], "what retention took is not lost"
        assert "lost" not in caplog.text
        assert one.archive.retire(now_us(), days=7, bytes_max=2**20)
    assert segments(tmp_path) == [], "the newest goes too when even that is too much"
    assert head == 31


# ---- what a crash leaves


def test_killed_between_rename_and_delete_nothing_is_doubled(tmp_path: Path) -> None:
    """The state is made by hand: a segment in place, and the live file from before it."""
    live, before = tmp_path / "history.duckdb", tmp_path / "before"
    with book(tmp_path, "one") as one:
        one.put(1)
        head = one.bus.head
    shutil.copyfile(live, before)
    with book(tmp_path, "two") as one:
        assert one.archive.rotate()
    before.rename(live)
    assert_each_row_once(tmp_path, "one", head)
    with book(tmp_path, "three") as one:
        assert one.store.live_count == 0
        assert one.ask("SELECT count(*) FROM iteration") == [(10,)]
    assert_each_row_once(tmp_path, "one", head)


def test_killed_after_a_merge_its_sources_are_known_for_doubles(tmp_path: Path) -> None:
    heads = {run: rotated(tmp_path, run, 2, YESTERDAY_US) for run in ("a", "b")}
    sources = tmp_path / "sources"
    shutil.copytree(tmp_path / "segments", sources)
    with book(tmp_path, "now") as one:
        one.merge(now_us())
    for path in sources.glob("*.duckdb"):
        shutil.copyfile(path, tmp_path / "segments" / path.name)
    for run_id, head in heads.items():
        assert_each_row_once(tmp_path, run_id, head)
    with book(tmp_path, "again") as one:
        assert len(one.archive.segments) == 1
        assert one.ask("FROM telemetry_lost") == []
    assert len(segments(tmp_path)) == 1


def test_half_a_segment_is_removed(tmp_path: Path) -> None:
    head = rotated(tmp_path, "one", 1)
    (path,) = segments(tmp_path)
    for suffix in (".partial", ".partial.wal"):
        shutil.copyfile(
            path, tmp_path / "segments" / f"20200101T000000-day-00000000.duckdb{suffix}"
        )
    with book(tmp_path, "two"):
        assert not list((tmp_path / "segments").glob("*.partial*"))
    assert_each_row_once(tmp_path, "one", head)


HASTY_WRITER = """
import sys
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History
from tests import samples

bus = Bus(run_id=sys.argv[2], capacity=4096)
history = History(bus=bus, config=TelemetryConfig(history=sys.argv[1], history_segment_s=0.05))
history.start()
bus.publish(samples.run(started_unix_us=int(sys.argv[3])))
step = 0
while True:
    for _ in range(20):
        step += 1
        bus.publish(samples.iteration(step, [1, 2, 3]))
        bus.publish(samples.rejection())
    assert history.flush(10)
    print(bus.head, history.status().segments, flush=True)
"""


def test_kill_9_while_it_rotates_and_merges_tears_and_doubles_nothing(tmp_path: Path) -> None:
    flushed = {}
    for number, run_id in enumerate("abc", 1):
        command = [sys.executable, "-c", HASTY_WRITER, str(tmp_path), run_id, str(YESTERDAY_US)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(8 + 5 * number):
                line = process.stdout.readline()
            process.kill()
        flushed[run_id] = int(line.split()[0])
    with book(tmp_path, "after") as one:
        one.merge(now_us())
    for run_id, head in flushed.items():
        query = f"SELECT max(seq) FROM ({EVERY_SEQ}) WHERE run_id = '{run_id}'"
        ((last,),) = look(tmp_path, query)
        assert last >= head, "what was flushed is there"
        assert_each_row_once(tmp_path, run_id, last)
    assert look(tmp_path, "FROM telemetry_lost") == []
    assert look(tmp_path, "SELECT count(*) FROM iteration WHERE len(requests) <> 3") == [(0,)]


# ---- damage, and files of others


def flip_middle(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


SEGMENT_DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5000]),
    "flipped": lambda path: path.write_bytes(flip_middle(path.read_bytes())),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def three_segments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    assert rotated(folder, "one", 3) == 91
    return folder


@pytest.mark.parametrize("damage", SEGMENT_DAMAGE)
def test_a_damaged_segment_is_set_aside_and_counted_as_lost(
    three_segments: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(three_segments, tmp_path, dirs_exist_ok=True)
    first = segments(tmp_path)[0]
    with duckdb.connect(first, read_only=True) as alone:
        ((begin, end),) = alone.execute("SELECT first_seq, last_seq FROM segment").fetchall()
    SEGMENT_DAMAGE[damage](first)
    damaged = first.read_bytes() if first.exists() else b""
    for run_id in ("two", "three"):
        with book(tmp_path, run_id) as one:
            while one.archive.check_next():
                pass
            loss = ("one", 0, begin, end, end - begin + 1)
            assert one.ask("FROM telemetry_lost") == [loss]
    assert not first.exists()
    assert "history lost segment" in caplog.text
    kept_aside = list((tmp_path / "segments").glob("*.unreadable-*"))
    assert [path.read_bytes() for path in kept_aside] == ([] if damage == "gone" else [damaged])
    assert_each_row_once(tmp_path, "one", 91)


def test_a_segment_of_a_newer_version_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rotated(tmp_path, "one", 1)
    (path,) = segments(tmp_path)
    with duckdb.connect(path) as later:
        later.execute("ALTER TABLE fault ADD COLUMN severity BIGINT")
    content = path.read_bytes()
    for run_id in ("two", "three"):
        with book(tmp_path, run_id) as one:
            one.put(1)
            assert one.ask("SELECT run_id FROM run WHERE run_id = 'one'") == []
            one.archive.retire(now_us(), days=0.001, bytes_max=2**20)
    assert path.read_bytes() == content
    assert "newer version stays unread" in caplog.text
    assert "lost" not in caplog.text
