"""A running server records a range when asked, and by itself when its engine dies.

Owns the end-to-end proofs of POST /telemetry/record, GET /telemetry/incidents, `iterscope record`
and `iterscope export` against one real server with a real engine.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.cli import main
from server.source import file_source
from tests import tiny
from tests.api import complete, ids
from tests.servers import Server, engine_pid, serving
from tests.trace_format import check_trace


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("recorder")
    flags = ("--history", str(folder / "history"), "--slo-burn-requests", "5")
    with serving(folder, tiny.write(folder / "model"), *flags, "--kv-blocks", "64") as running:
        for number in range(6):
            complete(running, {"prompt": ids(20 + number), "max_tokens": 8})
        yield running


def history_of(server: Server) -> Path:
    return server.log_file.parent / "history"


def rows(path: Path, sql: str) -> list[list[Any]]:
    with file_source(path) as source:
        return source.ask(sql).rows


def record(server: Server, body: Any) -> httpx.Response:
    return httpx.post(server.url + "/telemetry/record", json=body, timeout=60)


def test_the_command_gets_a_file_from_a_running_server(server: Server, tmp_path: Path) -> None:
    for number, flags in enumerate((("--url", server.url), ("--history", str(history_of(server))))):
        target = tmp_path / f"{number}.duckdb"
        asked = ("--last", "5m", "--detail", "a test", *flags)
        assert main(["record", "-o", str(target), *asked]) == 0
        assert rows(target, "SELECT count(*) FROM request_end") == [[6]]
        assert rows(target, "SELECT count(*) > 0 FROM request_cause") == [[True]]
        assert rows(target, "SELECT reason, detail FROM file.incident") == [["asked", "a test"]]
        live = server.get("/telemetry/incidents").json()["data"]
        assert len(live) == number + 1, "the server keeps one too, within its bounds"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.duckdb", "1.duckdb"]


def test_the_command_exports_a_trace_of_a_running_server(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    flags = ("--last", "10m", "--url", server.url)
    assert main(["export", "--perfetto", "-o", str(target), *flags]) == 0
    slices = check_trace(json.loads(target.read_bytes()))
    told = {name for (pid, _), lane in slices.items() if pid == 2 for _, _, name in lane}
    assert {"tokenize", "prefill", "decode", "output"} <= told


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"last": "soon"}, 400, "no length of time"),
        ({"from": "2036-01-01"}, 400, "newest record"),
        ({"last": "5m", "from": "2026-01-01"}, 400, "exclude each other"),
        ({"last": 5}, 400, "the body"),
        ([], 400, "the body"),
        ({"run_id": "../../x"}, 400, "no run ../../x"),
    ],
)
def test_what_cannot_be_recorded_is_a_400(
    server: Server, body: Any, status: int, words: str
) -> None:
    answer = record(server, body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_a_client_never_says_where(server: Server) -> None:
    before = sorted(history_of(server).rglob("*.duckdb"))
    answer = record(server, {"last": "5m", "detail": "../../../tmp/x", "path": "/tmp/elsewhere"})
    assert answer.status_code == 200
    made = set(history_of(server).rglob("*-asked.duckdb")) - set(before)
    assert {path.parent.name for path in made} == {"incidents"}
    assert "-asked.duckdb" in answer.headers["content-disposition"]
    assert not Path("/tmp/elsewhere").exists()


def test_a_killed_engine_leaves_an_incident_with_what_led_to_it(server: Server) -> None:
    os.kill(engine_pid(server), signal.SIGKILL)
    folder = history_of(server) / "incidents"
    (path,) = server.wait(lambda: list(folder.glob("*-crash.duckdb")))
    assert rows(path, "SELECT reason FROM file.incident") == [["crash"]]
    faults = [row[0] for row in rows(path, 'SELECT "where" FROM fault ORDER BY seq')]
    assert faults == ["engine process", "flight recorder"]
    assert rows(path, "SELECT count(*) FROM request_end")[0][0] >= 6
    assert "recorded in" in server.log
    server.wait(lambda: server.get("/ready").status_code == 200, 90)
