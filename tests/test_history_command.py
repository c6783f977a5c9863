"""`iterscope history`: what it says of a folder, held or not, and what it writes as Parquet.

Owns the proofs of server/history_command.py and telemetry/parquet.py, on real folders.
"""

import json
import logging
from pathlib import Path
from typing import Any

import duckdb
import pytest

from server.cli import main
from telemetry.bus import Bus
from telemetry.records import RequestCause
from telemetry.schema import tables
from telemetry.store import Store
from tests import samples

STARTED_US = 1_796_004_000_000_000  # 2026-11-30T02:00:00Z
HOUR_NS = 3_600 * 10**9


def opened(folder: Path, *, rotate: bool = True) -> Store:
    """Return an open store: a run of two hours, the first of them in a segment if asked to."""
    bus = Bus(run_id="one", capacity=1000)
    reader = bus.reader(0)
    store = Store(folder, "one", logging.getLogger("iterscope.history"))
    bus.publish(samples.run(started_unix_us=STARTED_US, replica="left"))
    for hour in range(2):
        for step in range(10):
            end_at_ns = hour * HOUR_NS + (step + 1) * 1000
            bus.publish(samples.iteration(step, [1, 2], end_at_ns=end_at_ns))
        bus.publish(RequestCause(request=hour, cause="output", ns=5, rule="counted"))
        store.append(reader.take(1000))
        if rotate and hour == 0:
            assert store.archive.rotate()
    return store


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["history", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_info_of_a_folder_that_nobody_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(tmp_path).close()
    found = told(capsys, "info", "--history", str(tmp_path))
    (segment,) = found["segments"]
    assert (segment["rows"], segment["slices"], segment["runs"]) == (12, 20, ["one"])
    assert segment["first"] == segment["last"] == "2026-11-30T02:00:00Z"
    assert (found["rows"], found["live_rows"], found["server"]) == (23, 11, None)
    assert found["bytes"] == segment["bytes"] + found["live_bytes"]
    assert main(["history", "info", "--history", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "1 segments, 23 rows" in text
    assert "the live file holds 11 of the rows" in text


def test_a_folder_that_a_server_holds_is_read_through_its_segments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The holder is this process: DuckDB refuses the live file all the same."""
    store = opened(tmp_path / "history")
    try:
        found = told(capsys, "info", "--history", str(tmp_path / "history"))
        assert (found["rows"], found["live_rows"]) == (12, None)
        target = tmp_path / "parquet"
        done = told(capsys, "export", str(target), "--history", str(tmp_path / "history"))
        assert (done["rows"]["iteration"], done["live"]) == (10, False)
        assert main(["history", "info", "--history", str(tmp_path / "history")]) == 0
        assert "not included: the live file" in capsys.readouterr().out
    finally:
        store.close()


def test_export_writes_every_row_by_replica_date_and_hour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(tmp_path / "history").close()
    target = tmp_path / "parquet"
    done = told(capsys, "export", str(target), "--history", str(tmp_path / "history"))
    assert done["live"]
    assert {name: count for name, count in done["rows"].items() if count} == {
        "run": 1,
        "iteration": 20,
        "request_cause": 2,
    }
    folders = {str(path.parent.relative_to(target)) for path in target.rglob("*.parquet")}
    assert folders == {
        f"{table}/replica=left/date=2026-11-30/hour={hour}"
        for table, hour in (
            ("run", "02"),
            ("iteration", "02"),
            ("iteration", "03"),
            ("request_cause", "02"),
            ("request_cause", "03"),
        )
    }
    with duckdb.connect() as reader:
        pattern = f"{target}/iteration/**/*.parquet"
        rows = reader.execute(
            f"SELECT hour, count(*), sum(len(requests))::BIGINT, min(step) FROM"
            f" read_parquet('{pattern}', hive_partitioning = true, hive_types_autocast = false)"
            " GROUP BY hour ORDER BY hour"
        ).fetchall()
        assert rows == [("02", 10, 20, 0), ("03", 10, 20, 0)]
        columns = reader.execute(f"SELECT * FROM read_parquet('{pattern}') LIMIT 0").description
    wanted = {name: [item.name for item in items] for name, _, items in tables()}
    assert [column[0] for column in columns] == [*wanted["iteration"], "date", "hour", "replica"]


def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "info", "--history", str(tmp_path / "none")]) == 1
    assert "no history in" in capsys.readouterr().err
    opened(tmp_path / "history", rotate=False).close()
    target = tmp_path / "full"
    target.mkdir()
    (target / "mine").write_text("kept")
    arguments = ["history", "export", str(target), "--history", str(tmp_path / "history")]
    assert main(arguments) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == ["mine"]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []
