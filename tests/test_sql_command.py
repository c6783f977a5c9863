"""`iterscope sql`: answers from a file, a folder or a server, as a table, JSON or CSV.

Owns the proofs of server/sql_command.py and server/source.py: where the answer comes from, what is
printed, exit codes, and that a file or a query cannot harm the terminal's user.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import duckdb
import pytest

from server.source import NoAnswer, file_source
from server.sql_command import add_sql_flags, run_sql_command
from telemetry import notes
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History
from telemetry.schema import ddl
from tests import samples
from tests.histories import wait_for

ROOT = Path(__file__).resolve().parent.parent


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_sql_flags(parser)
    return run_sql_command(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed")
    bus = Bus(run_id="r", capacity=1000)
    history = History(bus=bus, config=TelemetryConfig(history=str(folder)))
    history.start()
    bus.publish(samples.run(model="a\x1b[31mb"))
    bus.publish(samples.iteration(1, [1, 2]))
    assert history.flush(15)
    assert history.close(15)
    return folder


def test_the_command_prints_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT model, kv_blocks_total, NULL AS nothing, requests FROM run, iteration"
    assert command("--history", str(folder), sql) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["model", "kv_blocks_total", "nothing", "requests"]
    assert lines[2] == ["a\\x1b[31mb", "100", "null", "[1,2]"], "no control character is printed"
    assert lines[3][:2] == ["1", "row"]


def test_the_command_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--history", str(folder), "--json", "SELECT 1 AS one") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["rows"] == [[1]]
    assert body["columns"] == [{"name": "one", "type": "INTEGER"}]


def test_the_command_says_what_is_wrong(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--history", str(folder), "SELECT foo FROM run") == 1
    assert "(line 1, at: foo FROM run)" in capsys.readouterr().err
    assert command("--history", str(tmp_path / "none"), "SELECT 1") == 1
    assert "no history in" in capsys.readouterr().err
    assert command("--url", "http://127.0.0.1:9", "SELECT 1") == 1
    assert "does not answer" in capsys.readouterr().err
    assert command("--history", str(folder), " ") == 2
    (tmp_path / "history.duckdb").write_text("not a database")
    assert command("--history", str(tmp_path), "SELECT 1") == 1
    assert "cannot be read" in capsys.readouterr().err


def test_the_command_prints_csv(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT NULL AS nothing, true AS yes, requests, 'a,b' AS text FROM iteration"
    assert command("--history", str(folder), "--csv", sql) == 0
    assert capsys.readouterr().out == 'nothing,yes,requests,text\r\n,true,"[1,2]","a,b"\r\n'
    assert command("--history", str(folder), "--csv", "SELECT * FROM range(20000)") == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 10_001
    assert "there are more" in printed.err


# ---- files


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that holds a record, as segments and incidents do."""
    path = tmp_path_factory.mktemp("files") / "incident's.duckdb"
    with duckdb.connect(path) as connection:
        for statement in ddl():
            connection.execute(statement)
        row = ("r", 1, 1, 5, None, "engine", "it broke", "")
        connection.execute("INSERT INTO fault VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    return path


def test_the_command_reads_a_file(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT error, (SELECT count(*) FROM slice) AS slices FROM fault"
    assert command("--file", str(segment), "--csv", sql) == 0
    assert capsys.readouterr().out == "error,slices\r\nit broke,0\r\n"


def test_a_file_that_is_no_record_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {
        "garbage": b"x" * 10_000,
        "empty": b"",
        "t.csv": b"a,b\n1,2\n",
        "p.parquet": b"PAR1" * 9,
    }
    others |= {"lite.db": b"SQLite format 3\x00" + bytes(200), "cut": b"12345678DUCK"}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    with duckdb.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE customers AS SELECT 1 AS id")
    for name, reason in (
        *((name, "is not a DuckDB file") for name in others if name != "cut"),
        ("cut", "cannot be read"),
        ("other", "not a record"),
        ("missing", "there is no file"),
        (".", "is a folder; --history takes one"),
    ):
        assert command("--file", str(tmp_path / name), "SELECT 1") == 1, name
        assert reason in capsys.readouterr().err, name


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT list_sum(range(500000000))",
        "SELECT unnest(range(300000000))",
        "SELECT * FROM read_text('/etc/hostname')",
        "WITH c AS (COPY (SELECT 1) TO '{file}') SELECT 1",
        "WITH d AS (DELETE FROM file.fault RETURNING *) SELECT * FROM d",
        "SELECT 1; DROP TABLE file.fault",
        "SELECT * FROM read_text('{beside}')",
    ],
)
def test_a_file_is_read_in_the_same_sandbox(
    segment: Path, sql: str, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = segment.with_name("beside")
    beside.write_text("secret")
    before = segment.read_bytes()
    used_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert command("--file", str(segment), sql.format(file=segment, beside=beside)) == 1
    assert "secret" not in "".join(capsys.readouterr())
    assert segment.read_bytes() == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used_kb < 64 * 1024


def test_a_source_goes_on_after_a_query_that_cost_its_child(segment: Path) -> None:
    with file_source(segment) as source:
        for _ in range(2):
            with pytest.raises(NoAnswer, match="memory"):
                source.ask("SELECT * FROM range(100000000) ORDER BY random()")
            assert source.ask("SELECT error FROM fault").rows == [["it broke"]]


def test_control_c_ends_a_query_and_leaves_no_child(segment: Path) -> None:
    program = "import sys; from server.cli import main; sys.exit(main(sys.argv[1:]))"
    sql = "SELECT count(*) FROM range(1000000000) a, range(1000) b"
    arguments = [sys.executable, "-c", program, "sql", "--file", str(segment), sql]
    with subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        wait_for(lambda: busy(children))
        child = children.read_text().split()[0]
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=15)
        assert (running.returncode, error) == (130, "")
    assert not Path(f"/proc/{child}").exists()


def busy(children: Path) -> bool:
    """Tell whether the only child of a process computes."""
    pids = children.read_text().split()
    return bool(pids) and Path(f"/proc/{pids[0]}/comm").exists() and cpu_s(pids[0]) > 0.5


def cpu_s(pid: str) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


class Answering(BaseHTTPRequestHandler):
    """A server that answers every query with what it was asked, or 400 for a wrong key."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers.get("Authorization")
        body = {
            "columns": [{"name": "asked", "type": "VARCHAR"}, {"name": "key", "type": "VARCHAR"}],
            "rows": [[asked["sql"], key]],
            "row_count": 1,
            "truncated": False,
            "elapsed_ms": 1.0,
        }
        wrong = asked["sql"] == "wrong"
        if wrong:
            body = {"error": {"message": "it is wrong", "position": 0}}
        self.send_response(400 if wrong else 200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answering) as listening:
        thread = Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_the_command_asks_a_server(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--url", server + "/", "--json", "--api-key", "k", "SELECT 1") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [["SELECT 1", "Bearer k"]]
    assert command("--url", server, "wrong") == 1
    assert "it is wrong (line 1, at: wrong)" in capsys.readouterr().err


def test_the_command_finds_the_server_that_holds_the_folder(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import sys; from telemetry.bus import Bus; from telemetry.config import TelemetryConfig\n"
        "from telemetry.history import History; from tests import samples\n"
        "bus = Bus(run_id='r', capacity=10); bus.publish(samples.run())\n"
        "history = History(bus=bus, config=TelemetryConfig(history=sys.argv[1])); history.start()\n"
        "history.announce(sys.argv[2]); history.flush(10); history.announce(sys.argv[2])\n"
        "print('held', flush=True); sys.stdin.read(); history.close(10)"
    )
    held = [sys.executable, "-c", code, str(tmp_path), server]
    with subprocess.Popen(
        held, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        deadline = time.monotonic() + 10
        while notes.read_server_file(tmp_path) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert command("--history", str(tmp_path), "--json", "SELECT model FROM run") == 0
        assert json.loads(capsys.readouterr().out)["rows"] == [["SELECT model FROM run", None]]
        holder.communicate()
    assert command("--history", str(tmp_path), "--json", "SELECT model FROM run") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [["tiny"]], "now from the file"
