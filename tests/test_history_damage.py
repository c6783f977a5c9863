"""The history and a hostile disk: damaged files, locked and unwritable folders, no room left.

Owns the proofs of telemetry/database.py: what cannot be read is moved aside whole and loudly, what
is lost is on record, and serving goes on. Runs on real files.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from telemetry import database, notes
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History
from telemetry.query_lane import QueryUnavailable
from tests import samples
from tests.histories import ROOT, WAIT_S, aside, ask, kept, killed_writer, read, wait_for

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
        "import sys; from pathlib import Path; import logging\n"
        "from telemetry import database, notes\n"
        "c = database.open_live(Path(sys.argv[1]), logging.getLogger())\n"
        "notes.write_server_file(Path(sys.argv[1]), notes.ServerFile('http://x', 1, 'o'))\n"
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
        server = notes.read_server_file(tmp_path)
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
