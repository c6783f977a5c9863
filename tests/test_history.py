"""The history survives what disks and kills do, and says exactly what it does not hold.

Owns the proofs of telemetry/history.py, store.py and database.py with a real DuckDB file: kill -9
of a writing process, damaged files, locked and unwritable folders, limits. Waits are conditions.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pytest

from telemetry import database
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig, TelemetryConfigError, check
from telemetry.history import History
from telemetry.queries import QueryRunner, QueryUnavailable
from tests import samples

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 15.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


@contextmanager
def kept(folder: Path, run_id: str, **settings: int) -> Iterator[tuple[Bus, History]]:
    """Keep a history of a new run in the folder, until the block ends."""
    bus = Bus(run_id=run_id, capacity=1000)
    history = History(bus=bus, config=TelemetryConfig(history=str(folder), **settings))
    history.start()
    try:
        wait_for(lambda: history.status().kept or history.status().reason is not None)
        yield bus, history
    finally:
        assert history.close(WAIT_S)


def ask(history: History, sql: str) -> list[list[object]]:
    return history.queries.run(sql).rows


def read(folder: Path, sql: str) -> list[list[object]]:
    """Ask the file itself, as `iterscope sql` does once no server holds it."""
    connection = database.open_read_only(folder)
    runner = QueryRunner(connection.cursor, rows_max=10_000, deadline_s=10)
    try:
        return runner.run(sql).rows
    finally:
        runner.close()
        connection.close()


def aside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".unreadable-" in path.name)


# ---- in health


def test_what_was_published_can_be_queried_and_stays(tmp_path: Path) -> None:
    with kept(tmp_path, "one") as (bus, history):
        for record in (samples.run(), samples.start(1), samples.iteration(1, [1]), samples.end(1)):
            bus.publish(record)
        assert history.flush(WAIT_S)
        assert ask(history, "SELECT request, finish FROM request_end") == [[1, "stop"]]
        assert history.status().records == 4
    assert not (tmp_path / "history.duckdb.wal").exists(), "a clean end leaves no log"
    assert read(tmp_path, "SELECT run_id, generation, seq FROM iteration") == [["one", 1, 3]]


def test_a_second_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for run_id in ("one", "two"):
        with kept(tmp_path, run_id) as (bus, history):
            bus.publish(samples.run())
            assert history.flush(WAIT_S)
    assert read(tmp_path, "SELECT run_id FROM run ORDER BY run_id") == [["one"], ["two"]]
    assert read(tmp_path, "SELECT * FROM telemetry_lost") == []
    assert aside(tmp_path) == []


def test_without_a_folder_nothing_is_kept_and_a_query_says_so() -> None:
    history = History(bus=Bus(run_id="r", capacity=10), config=TelemetryConfig(history=None))
    history.start()
    status = history.status()
    assert (status.kept, status.degraded, status.reason) == (False, False, "history is off")
    assert not history.flush(0.01) or history.status().records == 0
    with pytest.raises(QueryUnavailable, match="off"):
        history.queries.run("SELECT 1")
    assert history.close()


def test_the_folder_names_its_server_while_it_runs(tmp_path: Path) -> None:
    with kept(tmp_path, "one") as (_, history):
        history.announce("http://127.0.0.1:8123")
        wait_for(lambda: database.read_server_file(tmp_path) is not None)
        server = database.read_server_file(tmp_path)
        assert server == database.ServerFile("http://127.0.0.1:8123", os.getpid(), "one")
    assert database.read_server_file(tmp_path) is None


def test_records_that_the_ring_lost_are_on_record_as_lost(tmp_path: Path) -> None:
    bus = Bus(run_id="slow", capacity=10)
    for step in range(1, 31):
        bus.publish(samples.iteration(step))
    history = History(bus=bus, config=TelemetryConfig(history=str(tmp_path)))
    history.start()
    assert history.flush(WAIT_S)
    assert ask(history, "FROM telemetry_lost") == [["slow", 0, 1, 20, 20]]
    assert ask(history, "SELECT count(*), min(step), max(step) FROM iteration") == [[10, 21, 30]]
    assert history.status().lost == 20
    assert history.close(WAIT_S)


def test_a_record_that_no_table_takes_is_on_record_as_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kept(tmp_path, "odd") as (bus, history):
        bus.publish(samples.run())
        assert history.flush(WAIT_S)
        bus.publish(samples.start(2**70))
        assert history.flush(WAIT_S)
        bus.publish(samples.start(1))
        assert history.flush(WAIT_S)
        assert ask(history, "SELECT request FROM request_start") == [[1]]
        assert ask(history, "FROM telemetry_lost") == [["odd", 1, 2, 2, 1]]
        assert history.status().kept
    assert "could not store" in caplog.text


# ---- requests that a dead server left open


def test_starts_without_an_end_end_as_server_lost_at_the_next_start(tmp_path: Path) -> None:
    with kept(tmp_path, "dead") as (bus, history):
        bus.publish(samples.run())
        for request in (1, 2, 3):
            bus.publish(samples.start(request, prompt_tokens=8))
        bus.publish(samples.iteration(7, [1, 2], start_positions=[0, 0], token_counts=[8, 5]))
        bus.publish(samples.iteration(8, [1, 2], start_positions=[8, 5], token_counts=[1, 3]))
        bus.publish(samples.delivery(2, received_at_ns=55))
        bus.publish(samples.end(3))
        assert history.flush(WAIT_S)
    with kept(tmp_path, "next") as (bus, history):
        bus.publish(samples.run())
        bus.publish(samples.start(1))  # the same integer in another run
        assert history.flush(WAIT_S)
        ends = ask(
            history,
            "SELECT request, seq, finish, error, received_at_ns, iterations, output_tokens,"
            " released_at_ns FROM request_end WHERE run_id = 'dead' AND error IS NOT NULL"
            " ORDER BY request",
        )
        last_at_ns = 2000 + 900_000_000
        assert ends == [
            [1, 9, "error", "server lost", 1000, 2, 2, last_at_ns],
            [2, 10, "error", "server lost", 55, 2, 1, last_at_ns],
        ]
    counts = "SELECT (SELECT count(*) FROM request_{}), (SELECT count(*) FROM request_{})"
    with kept(tmp_path, "last"):
        pass
    assert read(tmp_path, counts.format("start", "end")) == [[4, 4]], "each start has one end"


# ---- kill -9

WRITER = """
import sys
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History
from tests import samples

bus = Bus(run_id=sys.argv[2], capacity=4096)
history = History(bus=bus, config=TelemetryConfig(history=sys.argv[1]))
history.start()
bus.publish(samples.run())
step = 0
while True:
    for _ in range(20):
        step += 1
        bus.publish(samples.iteration(step, [1, 2, 3]))
        bus.publish(samples.start(step))
    assert history.flush(10)
    print(bus.head, flush=True)
"""


def killed_writer(folder: Path, run_id: str, *, batches: int) -> int:
    """Run a process that writes, kill it in the middle of its work; return what it had flushed."""
    command = [sys.executable, "-c", WRITER, str(folder), run_id]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(batches):
            flushed = int(process.stdout.readline())
        process.kill()
    return flushed


def test_kill_9_loses_nothing_that_was_flushed_and_tears_nothing(tmp_path: Path) -> None:
    flushed = {run: killed_writer(tmp_path, run, batches=n) for n, run in enumerate("abc", 2)}
    with kept(tmp_path, "after") as (bus, history):
        bus.publish(samples.run())
        assert history.flush(WAIT_S)
        for run_id, seq in flushed.items():
            records = (
                "(SELECT seq FROM run WHERE run_id = $1 UNION ALL SELECT seq FROM iteration"
                " WHERE run_id = $1 UNION ALL SELECT seq FROM request_start WHERE run_id = $1)"
            )
            result = history.queries.run(
                f"SELECT count(*), count(DISTINCT seq), max(seq) FROM {records}", [run_id]
            )
            ((count, distinct, last),) = result.rows
            assert count == distinct == last >= seq, "no gap, nothing doubled, nothing missing"
        assert ask(history, "SELECT count(*) FROM iteration WHERE len(requests) <> 3") == [[0]]
        assert ask(history, "FROM telemetry_lost") == []
    starts, ends = read(
        tmp_path, "SELECT (SELECT count(*) FROM request_start), count(*) FROM request_end"
    )[0]
    assert starts == ends
    assert aside(tmp_path) == []


# ---- damaged files


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that a killed server left: a database and a write-ahead log."""
    folder = tmp_path_factory.mktemp("crashed")
    with kept(folder, "first") as (bus, history):
        bus.publish(samples.run())
        assert history.flush(WAIT_S)
    killed_writer(folder, "killed", batches=3)
    assert (folder / "history.duckdb.wal").stat().st_size > 1000
    return folder


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


LOG_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "whole": lambda log: log,
    "cut": lambda log: log[:-7],
    "empty": lambda log: b"",
    "longer": lambda log: log + bytes(range(100)),
    "flipped": lambda log: flip(log, len(log) // 2),
    "garbage": lambda log: bytes(range(256)) * 20,
}


@pytest.mark.parametrize("damage", LOG_DAMAGE)
def test_a_damaged_log_is_kept_aside_and_its_loss_is_on_record(
    crashed: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "history"
    shutil.copytree(crashed, folder)
    log = folder / "history.duckdb.wal"
    before = log.read_bytes()
    damaged = LOG_DAMAGE[damage](before)
    log.write_bytes(damaged)
    with kept(folder, "after") as (bus, history):
        bus.publish(samples.run())
        assert history.flush(WAIT_S)
        assert ask(history, "SELECT count(*) FROM run WHERE run_id = 'first'") == [[1]]
        ((stored,),) = ask(
            history,
            "SELECT count(*) FROM (SELECT seq FROM run WHERE run_id = 'killed' UNION ALL "
            "SELECT seq FROM iteration UNION ALL SELECT seq FROM request_start)",
        )
        lost = ask(history, "SELECT from_seq, to_seq, lost FROM telemetry_lost")
        if damage in ("whole", "longer"):
            assert stored == 1 + 3 * 40
            assert lost == []
            assert aside(folder) == []
        else:
            assert lost == [[stored + 1, 1 + 3 * 40, 1 + 3 * 40 - stored]]
            (copy,) = aside(folder)
            assert (folder / copy).read_bytes() == damaged
            assert "history lost" in caplog.text


DATABASE_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: 3 * 4096],
    "header": lambda content: flip(content, 5000),
    "other": lambda content: b"a file of another program" * 100,
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("damage", DATABASE_DAMAGE)
def test_a_database_that_cannot_be_read_is_moved_aside_whole(
    crashed: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "history"
    shutil.copytree(crashed, folder)
    path = folder / "history.duckdb"
    damaged = DATABASE_DAMAGE[damage](path.read_bytes())
    path.write_bytes(damaged)
    log = (folder / "history.duckdb.wal").read_bytes()
    for run_id in ("after", "again"):
        with kept(folder, run_id) as (bus, history):
            bus.publish(samples.run())
            assert history.flush(WAIT_S)
            assert history.status().kept
    kept_aside = aside(folder)
    assert [(folder / name).read_bytes() for name in kept_aside] == [damaged, log]
    assert kept_aside[1] == kept_aside[0] + ".wal", "they open together again"
    assert "moved aside" in caplog.text
    assert read(folder, "SELECT run_id FROM run ORDER BY 1") == [["after"], ["again"]]
    lost = read(folder, "SELECT run_id, from_seq, lost FROM telemetry_lost")
    assert lost == [["killed", 1, 1 + 3 * 40]], "what stands aside is not in this history"


def test_a_log_without_its_database_is_moved_aside(crashed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "history"
    shutil.copytree(crashed, folder)
    (folder / "history.duckdb").unlink()
    with kept(folder, "after") as (_, history):
        assert history.status().kept
    (name,) = aside(folder)
    assert name.endswith(".wal")


def test_a_database_of_another_program_is_moved_aside_unchanged(tmp_path: Path) -> None:

    with duckdb.connect(tmp_path / "history.duckdb") as other:
        other.execute("CREATE TABLE theirs AS SELECT 42 AS answer")
    with kept(tmp_path, "mine") as (_, history):
        assert history.status().kept
    (name,) = aside(tmp_path)
    with duckdb.connect(tmp_path / name, read_only=True) as other:
        assert other.execute("FROM theirs").fetchall() == [(42,)]


def test_a_table_of_another_version_is_moved_aside(tmp_path: Path) -> None:

    with kept(tmp_path, "old") as (bus, history):
        bus.publish(samples.run())
        assert history.flush(WAIT_S)
    with duckdb.connect(tmp_path / "history.duckdb") as old:
        old.execute("ALTER TABLE fault ADD COLUMN severity BIGINT")
    with kept(tmp_path, "new") as (_, history):
        assert history.status().kept
        assert ask(history, "SELECT count(*) FROM run") == [[0]]
    assert len(aside(tmp_path)) == 1


def test_a_folder_where_the_file_should_be_is_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "history.duckdb").mkdir()
    with kept(tmp_path, "r") as (_, history):
        assert history.status().kept


# ---- folders that cannot be used


def test_a_locked_folder_degrades_and_leaves_the_other_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("telemetry.history.LOCK_PATIENCE_S", 0.3)
    code = (
        "import sys; from pathlib import Path; import logging; from telemetry import database\n"
        "c = database.open_live(Path(sys.argv[1]), logging.getLogger())\n"
        "database.write_server_file(Path(sys.argv[1]), database.ServerFile('http://x', 1, 'o'))\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with kept(tmp_path, "second") as (bus, history):
            history.announce("http://127.0.0.1:1")
            bus.publish(samples.run())
            status = history.status()
            assert status.degraded
            assert "another process holds" in (status.reason or "")
            assert not history.flush(0.1)
            assert history.status().lost == 1
            with pytest.raises(QueryUnavailable, match="another process holds"):
                history.queries.run("SELECT 1")
            with pytest.raises(database.HistoryLocked):
                database.open_read_only(tmp_path)
        server = database.read_server_file(tmp_path)
        assert server is not None
        assert server.url == "http://x"
    assert "no history is kept" in caplog.text
    assert aside(tmp_path) == []


def test_a_server_waits_for_a_reader_that_holds_the_file_for_a_moment(tmp_path: Path) -> None:
    with kept(tmp_path, "one"):
        pass
    code = (
        "import sys, time; from pathlib import Path; from telemetry import database\n"
        "c = database.open_read_only(Path(sys.argv[1])); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "held\n"
        bus = Bus(run_id="two", capacity=10)
        history = History(bus=bus, config=TelemetryConfig(history=str(tmp_path)))
        history.start()
        assert not history.flush(0.5) or bus.head == 0
        assert not history.status().kept
        reader.communicate()
        wait_for(lambda: history.status().kept)
        assert history.close(WAIT_S)


def test_a_folder_that_cannot_be_made_degrades(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with kept(tmp_path / "file" / "history", "r") as (bus, history):
        bus.publish(samples.run())
        assert history.status().degraded
        assert "cannot be made" in (history.status().reason or "")


def test_a_history_at_its_limit_stops_and_can_still_be_queried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kept(tmp_path, "big", history_bytes_max=2**20) as (bus, history):
        bus.publish(samples.run(config="x" * 2**21))
        wait_for(lambda: history.status().degraded)
        bus.publish(samples.start(1))
        assert not history.flush(0.1)
        assert ask(history, "SELECT count(*) FROM run") == [[1]]
        assert history.status().lost == 1
        assert "limit" in (history.status().reason or "")
    assert "no history is kept" in caplog.text


FULL_DISK = """
import resource, signal, sys, time
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History
from tests import samples

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, 3 * 2**20))
bus = Bus(run_id="full", capacity=4096)
history = History(bus=bus, config=TelemetryConfig(history=sys.argv[1]))
history.start()
stored = 0
for step in range(1, 2000):
    bus.publish(samples.fault(error=f"{step}", traceback="".join(chr(33 + (step * j) % 90)
                                                                for j in range(20000))))
    if step % 20 == 0:
        if not history.flush(10) or history.status().degraded:
            break
        stored = bus.head
bus.publish(samples.run())
status = history.status()
history.close(10)
print(stored, status.degraded, status.lost > 0, bus.head, status.reason)
"""


def test_a_full_disk_stops_the_history_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    stored, degraded, lost, head, reason = done.stdout.split(maxsplit=4)
    assert (degraded, lost) == ("True", "True"), reason
    assert int(head) > int(stored) > 0
    assert "no history is kept" in done.stderr
    with kept(tmp_path, "after") as (bus, history):
        bus.publish(samples.run())
        assert history.flush(WAIT_S)
        ((count, last),) = ask(history, "SELECT count(*), max(seq) FROM fault")
        assert count == last >= int(stored), "all that was flushed is there"


def test_settings_out_of_range_are_refused() -> None:
    check(TelemetryConfig())
    for wrong in ({"ring_records": 0}, {"sql_deadline_s": float("nan")}):
        with pytest.raises(TelemetryConfigError, match=r"^--"):
            check(TelemetryConfig(**wrong))  # type: ignore[arg-type]
