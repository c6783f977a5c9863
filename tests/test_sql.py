"""SQL for people: one SELECT and nothing else, strict JSON out, bounded.

Owns the proofs of telemetry/answer.py and of the child that runs it, on a real history. Traps are
those that others fell into: writes inside WITH, files read by name, second statements, settings,
values that JSON cannot hold. What a query may cost is tests/test_sandbox.py's.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from telemetry.answer import Caps, QueryError, answer
from telemetry.bus import Bus
from telemetry.catalog import (
    Part,
    attach,
    columns_of,
    open_catalog,
    seal,
    show,
    without_empty,
)
from telemetry.config import TelemetryConfig
from telemetry.history import History
from telemetry.schema import ddl
from tests import samples

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    bus = Bus(run_id="r", capacity=1000)
    folder = tmp_path_factory.mktemp("history")
    history = History(bus=bus, config=TelemetryConfig(history=str(folder), sql_deadline_s=5.0))
    history.start()
    bus.publish(samples.run())
    for step in range(1, 51):
        bus.publish(samples.iteration(step, [1, 2]))
    assert history.flush(15)
    yield history
    history.close(15)


REFUSED = {
    "delete": "DELETE FROM run",
    "delete in with": "WITH d AS (DELETE FROM run RETURNING *) SELECT * FROM d",
    "insert in with": "WITH i AS (INSERT INTO fault SELECT * FROM fault RETURNING *) FROM i",
    "copy": "COPY (SELECT 1) TO '{folder}/out.csv'",
    "copy in with": "WITH c AS (COPY (SELECT 1) TO '{folder}/out.csv') SELECT 1",
    "comment before copy": "/* c */ COPY run TO '{folder}/out.csv'",
    "export": "EXPORT DATABASE '{folder}/out'",
    "attach": "ATTACH '{folder}/other.db'",
    "second statement": "SELECT 1; DROP TABLE run",
    "second select": "SELECT 1; SELECT 2",
    "out of the transaction": "COMMIT; DROP TABLE run",
    "set": "SET memory_limit = '100GB'",
    "set access": "SET enable_external_access = true",
    "set zone": "SET TimeZone = 'Asia/Kolkata'",
    "pragma": "PRAGMA database_list",
    "call": "CALL pragma_version()",
    "install": "INSTALL httpfs",
    "load": "LOAD httpfs",
    "checkpoint": "CHECKPOINT",
    "explain a write": "EXPLAIN ANALYZE DELETE FROM run",
    "prepare": "PREPARE p AS SELECT 1",
    "create": "CREATE TABLE mine AS SELECT 1",
    "create temp": "CREATE TEMP TABLE mine AS SELECT 1",
    "update": "UPDATE run SET model = 'x'",
    "query of a write": "SELECT * FROM query('DELETE FROM run')",
    "read a file": "SELECT * FROM read_text('/etc/hostname')",
    "quoted function": "SELECT * FROM \"read_text\"('/etc/hostname')",
    "file as a table": "SELECT * FROM '/etc/hostname'",
    "csv": "SELECT * FROM read_csv('/etc/passwd')",
    "parquet": "SELECT * FROM parquet_scan('/etc/passwd')",
    "list files": "SELECT * FROM glob('/*')",
    "sniff": "SELECT * FROM sniff_csv('/etc/passwd')",
    "environment": "SELECT getenv('HOME')",
    "secrets": "SELECT * FROM duckdb_secrets()",
    "python variable": "SELECT * FROM REFUSED",
    "nothing": "",
    "comment": "-- nothing",
    "semicolon": " ; ",
}


@pytest.mark.parametrize("trap", REFUSED)
def test_a_trap_is_refused_and_leaves_no_trace(history: History, tmp_path: Path, trap: str) -> None:
    sql = REFUSED[trap].format(folder=tmp_path)
    with pytest.raises(QueryError) as refused:
        history.queries.run(sql)
    message = refused.value.message
    assert message
    assert "\n" not in message
    for place in ("/etc", "/root", "/home", str(tmp_path), "history.duckdb"):
        assert place not in message
    assert list(tmp_path.iterdir()) == []
    assert history.queries.run("SELECT count(*) FROM run").rows == [[1]]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    """A catalog as a child has it, over a segment; the kernel does not confine this process."""
    path = tmp_path_factory.mktemp("segment") / "a.duckdb"
    with duckdb.connect(path) as segment:
        for statement in ddl():
            segment.execute(statement)
    connection = open_catalog()
    attach(connection, path, "segment0")
    columns = columns_of(connection, ["segment0"])["segment0"]
    show(connection, [Part(alias="segment0", columns=columns)], first=True)
    seal(connection)
    yield connection
    connection.close()


OF_SEGMENTS = {
    "delete from a segment": "WITH d AS (DELETE FROM segment0.run RETURNING *) SELECT * FROM d",
    "copy over a segment": "WITH c AS (COPY (SELECT 1) TO '{segment}') SELECT 1",
    "beside a segment": "SELECT * FROM glob('{folder}/*')",
    "another database": "SELECT * FROM read_duckdb('{folder}/other.duckdb')",
    "attach in with": "WITH c AS (ATTACH '{folder}/other.duckdb' AS o) SELECT 1",
    "log to a file": "SELECT * FROM enable_logging(storage = 'file', storage_path = '{folder}/l')",
    "profile to a file": "SELECT * FROM enable_profiling(format = 'json')",
    "serialized": (
        "SELECT * FROM json_execute_serialized_sql(json_serialize_sql("
        "'SELECT * FROM read_text(''/etc/hostname'')'))"
    ),
}


@pytest.mark.parametrize("trap", [*REFUSED, *OF_SEGMENTS])
def test_the_database_alone_refuses_a_trap_too(
    sealed: duckdb.DuckDBPyConnection, tmp_path: Path, trap: str
) -> None:
    rows = sealed.execute("SELECT path FROM duckdb_databases() WHERE database_name = 'segment0'")
    segment = Path(rows.fetchall()[0][0])
    before = segment.read_bytes()
    sql = (REFUSED | OF_SEGMENTS)[trap].format(folder=tmp_path, segment=segment)
    with sealed.cursor() as cursor, pytest.raises(QueryError) as refused:
        answer(cursor, sql, (), Caps(rows_max=10, bytes_max=10_000))
    for place in ("/etc", "/root", "/home", str(tmp_path), str(segment.parent)):
        assert place not in refused.value.message
    assert list(tmp_path.iterdir()) == []
    assert list(segment.parent.iterdir()) == [segment]
    assert segment.read_bytes() == before


def test_the_live_file_still_takes_records_and_checkpoints(history: History) -> None:
    before = history.status().records
    history._bus.publish(samples.start(1))
    assert history.flush(15)
    assert history.status().records == before + 1
    assert history._store is not None
    assert history.queries.run("SELECT count(*) FROM request_start").rows == [[1]]


def test_an_answer_has_columns_types_rows_and_counts(history: History) -> None:
    result = history.queries.run(
        "SELECT step, requests FROM iteration WHERE step <= $1 AND admission_stop = $2"
        " ORDER BY step",
        [2, "no_waiting"],
    )
    body = json.loads(result.json())
    assert body["columns"] == [
        {"name": "step", "type": "BIGINT"},
        {"name": "requests", "type": "BIGINT[]"},
    ]
    assert body["rows"] == [[1, [1, 2]], [2, [1, 2]]]
    assert (body["row_count"], body["truncated"]) == (2, False)
    assert body["elapsed_ms"] >= 0


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("'nan'::DOUBLE", None),
        ("'inf'::DOUBLE", None),
        ("'-inf'::FLOAT", None),
        ("['nan'::DOUBLE, 1]", [None, 1.0]),
        ("{'a': 'nan'::DOUBLE}", {"a": None}),
        ("1.25", 1.25),
        ("sum(1::BIGINT)", 1),
        ("170141183460469231731687303715884105727::HUGEINT", 2**127 - 1),
        ("'\\xAA\\x42'::BLOB", "\\xaaB"),
        ("TIMESTAMP '2026-11-29 14:03:00.5'", "2026-11-29T14:03:00.500000"),
        ("TIMESTAMPTZ '2026-11-29 14:03:00+05:30'", "2026-11-29T08:33:00+00:00"),
        ("DATE '2026-11-29'", "2026-11-29"),
        ("TIME '14:03'", "14:03:00"),
        ("INTERVAL 90 SECOND", "0:01:30"),
        ("MAP {1: 'x'}", {"1": "x"}),
        ("NULL", None),
        ("true", True),
        ("'caf\u00e9 \U0001f600'", "caf\u00e9 \U0001f600"),
        ("'9f8b1e9c-0000-4000-8000-000000000000'::UUID", "9f8b1e9c-0000-4000-8000-000000000000"),
    ],
)
def test_every_value_becomes_strict_json(history: History, expression: str, value: object) -> None:
    def no_constant(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    with history.queries.submit(f"SELECT {expression}") as asked:
        body = asked.future.result(15).content
    assert json.loads(body, parse_constant=no_constant)["rows"] == [[value]]


def test_rows_are_capped_and_the_answer_says_so(history: History) -> None:
    result = history.queries.run("SELECT * FROM range(20000)")
    assert (len(result.rows), result.truncated) == (10_000, True)
    assert not history.queries.run("SELECT * FROM range(10000)").truncated


def test_bytes_are_capped_and_the_answer_says_so(history: History) -> None:
    result = history.queries.run("SELECT repeat('x', 20000) FROM range(2500)")
    assert result.truncated
    assert 0 < len(result.json()) < 40 * 2**20


@pytest.mark.parametrize(
    ("sql", "at"),
    [
        ("SELECT foo FROM run", "foo"),
        ("SELECT\n  model,\n  foo\nFROM run", "foo"),
        ("SELECT " + "1 + " * 200 + "foo FROM run", "foo"),
        ("SELECT * FRO run", "run"),
    ],
)
def test_an_error_points_at_its_place(history: History, sql: str, at: str) -> None:
    with pytest.raises(QueryError) as error:
        history.queries.run(sql)
    assert error.value.position == sql.index(at)


def test_wrong_parameters_and_endless_text_are_errors_not_faults(history: History) -> None:
    for sql, parameters in (("SELECT $1", []), ("SELECT 1", [1]), ("SELECT '" + "x" * 10**6, [])):
        with pytest.raises(QueryError):
            history.queries.run(sql, parameters)


def test_an_error_that_lists_each_of_many_parameters_stays_short(history: History) -> None:
    with pytest.raises(QueryError, match="Parameter argument/count mismatch") as error:
        history.queries.run("SELECT 1 WHERE $1 = 1", [1] * 10_000)
    assert len(str(error.value)) < 3000


def test_wall_clock_is_utc_whatever_the_host_says(tmp_path: Path) -> None:
    code = (
        "import sys; from telemetry.bus import Bus; from telemetry.config import TelemetryConfig\n"
        "from telemetry.history import History; from tests import samples; import time\n"
        "bus = Bus(run_id='r', capacity=10)\n"
        "history = History(bus=bus, config=TelemetryConfig(history=sys.argv[1])); history.start()\n"
        "bus.publish(samples.run(started_unix_us=time.time_ns() // 1000)); history.flush(10)\n"
        "q = 'SELECT make_timestamp(started_unix_us)::VARCHAR, started_unix_us,'\n"
        "q += ' make_timestamptz(started_unix_us) BETWEEN now() - INTERVAL 5 MINUTE AND now()'\n"
        "q += ', current_setting($$TimeZone$$) FROM run'\n"
        "print(history.queries.run(q).json().decode()); history.close(10)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "TZ": "Asia/Kolkata"}
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True, timeout=60)
    ((shown, unix_us, recent, zone),) = json.loads(printed)["rows"]
    seconds = math.floor(unix_us / 1e6)
    assert shown.startswith(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)))
    assert (recent, zone) == (True, "UTC")


def test_a_view_spans_only_files_that_hold_rows_of_its_table(tmp_path: Path) -> None:
    connection = open_catalog()
    for name in ("one", "two"):
        with duckdb.connect(tmp_path / name) as segment:
            for statement in ddl():
                segment.execute(statement)
            if name == "two":
                segment.execute("INSERT INTO telemetry_lost VALUES ('r', 1, 2, 3, 2)")
        attach(connection, tmp_path / name, name)
    found = columns_of(connection, ["one", "two"])
    parts = [Part(alias=alias, columns=columns) for alias, columns in found.items()]
    show(connection, without_empty(connection, parts), first=True)
    views = dict(connection.execute("SELECT view_name, sql FROM duckdb_views()").fetchall())
    assert ("one." in views["telemetry_lost"], "two." in views["telemetry_lost"]) == (False, True)
    assert connection.execute("SELECT lost FROM telemetry_lost").fetchall() == [(2,)]
    assert connection.execute("SELECT * FROM run, slice").fetchall() == []
    connection.close()
