"""`iterscope sql`: answers from a file, a folder or a server, as a table, JSON or CSV.

Owns the proofs of server/sql_command.py and server/source.py: where the answer comes from, what is
printed, exit codes, and that a file or a query cannot harm the terminal's user.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from server.sql_command import add_sql_flags, run_sql_command
from telemetry import database
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History
from tests import samples

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
        while database.read_server_file(tmp_path) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert command("--history", str(tmp_path), "--json", "SELECT model FROM run") == 0
        assert json.loads(capsys.readouterr().out)["rows"] == [["SELECT model FROM run", None]]
        holder.communicate()
    assert command("--history", str(tmp_path), "--json", "SELECT model FROM run") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [["tiny"]], "now from the file"
