"""A history of another version: an older one opens with all it holds, a newer one is never altered.

Owns the proofs of catalog.py's comparison and of the archive's renewal. The older samples are made
here, by leaving out what this version's tables have.
"""

import logging
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import duckdb
import pytest

from telemetry import database
from telemetry.bus import Bus
from telemetry.schema import ddl
from telemetry.store import Store
from tests import samples
from tests.histories import ROOT, WAIT_S, aside, ask, kept

LOG = logging.getLogger("iterscope.history")
AGED = (
    "DROP VIEW slice",
    "ALTER TABLE iteration DROP COLUMN admission_blocker",
    "ALTER TABLE iteration DROP COLUMN idle_rows",
    "ALTER TABLE iteration DROP COLUMN passed_over_reasons",
    "ALTER TABLE request_start DROP COLUMN tenant",
    "DROP TABLE request_share",
)
"""From this version's tables to those of one that knew less: columns, a list, a whole table."""
SEEN = (
    "SELECT count(*), max(admission_blocker), max(idle_rows), max(len(passed_over_reasons)),"
    " sum(len(requests))::BIGINT FROM iteration WHERE run_id = 'old'"
)
FILLED = [10, None, 0, 0, 20]


def aged(path: Path) -> None:
    with duckdb.connect(path) as old:
        for statement in AGED:
            old.execute(statement)


def written(folder: Path, run_id: str, *, rotate: bool) -> None:
    """Leave a folder with ten iterations of a run, in the live file or in a segment."""
    bus = Bus(run_id=run_id, capacity=100)
    bus.publish(samples.run())
    for step in range(1, 11):
        bus.publish(samples.iteration(step, [1, 2], admission_blocker=3, idle_rows=4))
    bus.publish(samples.start(1))
    bus.publish(samples.end(1))
    store = Store(folder, run_id, LOG)
    store.append(bus.reader(0).take(100))
    if rotate:
        assert store.archive.rotate()
    store.close()


def test_an_older_live_file_opens_with_all_it_holds(tmp_path: Path) -> None:
    written(tmp_path, "old", rotate=False)
    aged(tmp_path / "history.duckdb")
    with closing(database.open_read_only(tmp_path)) as connection:
        assert connection.execute(SEEN).fetchall() == [tuple(FILLED)], "without a server"
    with kept(tmp_path, "new") as (bus, history):
        bus.publish(samples.run())
        bus.publish(samples.iteration(1, [1], admission_blocker=5))
        assert history.flush(WAIT_S)
        assert ask(history, SEEN) == [FILLED]
        assert ask(history, "SELECT tenant FROM request_start") == [[""]]
        assert ask(history, "SELECT count(*) FROM slice") == [[21]]
    assert aside(tmp_path) == []
    with kept(tmp_path, "again") as (_, history):
        assert ask(history, SEEN) == [FILLED]
        assert ask(history, "SELECT max(admission_blocker) FROM iteration") == [[5]]
        assert ask(history, "FROM telemetry_lost") == []


def test_an_older_segment_stays_readable_and_is_merged(tmp_path: Path) -> None:
    written(tmp_path, "old", rotate=True)
    (path,) = (tmp_path / "segments").glob("*.duckdb")
    (tmp_path / "segments" / "ledger.json").unlink()
    aged(path)
    written(tmp_path, "new", rotate=True)
    store = Store(tmp_path, "now", LOG)
    cursor = store.cursor()
    assert cursor.execute(SEEN).fetchall() == [tuple(FILLED)]
    assert store.archive.merge(2 * samples.run().started_unix_us, bool)
    assert cursor.execute(SEEN).fetchall() == [tuple(FILLED)]
    store.close()


OPENER = """
import sys
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History

history = History(bus=Bus(run_id="new", capacity=10), config=TelemetryConfig(history=sys.argv[1]))
history.start()
if len(sys.argv) > 2:
    while not history.status().kept:
        assert history.status().reason is None
print("open", flush=True)
sys.stdin.read()
"""


def test_kill_9_right_after_the_renewal_leaves_it_openable(tmp_path: Path) -> None:
    written(tmp_path, "old", rotate=False)
    aged(tmp_path / "history.duckdb")
    for wait in ([], ["until it is open"]):
        command = [sys.executable, "-c", OPENER, str(tmp_path), *wait]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            process.kill()
    with kept(tmp_path, "last") as (_, history):
        assert ask(history, SEEN) == [FILLED]
        assert ask(history, "FROM telemetry_lost") == []
    assert aside(tmp_path) == []


@pytest.mark.parametrize("change", ["column", "table", "version"])
def test_a_newer_live_file_is_set_aside_unchanged(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.duckdb"
    with duckdb.connect(path) as later:
        for statement in ddl():
            later.execute(statement)
        if change == "column":
            later.execute("ALTER TABLE fault ADD COLUMN severity BIGINT")
        elif change == "table":
            later.execute("CREATE TABLE thought (run_id VARCHAR)")
        else:
            row = samples.run(schema_version=99)
            values = ["future", 1, 1, *(getattr(row, name) for name in row.__slots__)]
            marks = ", ".join("?" * len(values))
            later.execute(f"INSERT INTO run VALUES ({marks})", values)
    content = path.read_bytes()
    with kept(tmp_path, "now") as (bus, history):
        bus.publish(samples.run())
        assert history.flush(WAIT_S)
        assert ask(history, "SELECT run_id FROM run") == [["now"]]
    (name,) = aside(tmp_path)
    assert (tmp_path / name).read_bytes() == content
    assert "moved aside" in caplog.text
