"""A running server records a range when asked, and by itself when its engine dies.

Owns the end-to-end proofs of POST /telemetry/record, GET /telemetry/incidents, `iterscope record`
and `iterscope export` against one real server with a real engine.
"""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    own = ("--slo-burn-requests", "5", "--engine-stall-s", "3")
    flags = ("--history", str(folder / "history"), *own)
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
    # Causes are folded a moment after the ends are on record.
    told = {"sql": "SELECT count(*) FROM request_share"}
    server.wait(lambda: server.post("/telemetry/sql", told).json()["rows"] == [[6]])
    for number, flags in enumerate((("--url", server.url), ("--history", str(history_of(server))))):
        target = tmp_path / f"{number}.duckdb"
        asked = ("--last", "5m", "--detail", "a test", *flags)
        assert main(["record", "-o", str(target), *asked]) == 0
        assert rows(target, "SELECT count(*) FROM request_end") == [[6]]
        assert rows(target, "SELECT count(*) > 0 FROM request_cause") == [[True]]
        assert rows(target, "SELECT reason, detail FROM file.incident") == [["asked", "a test"]]
        listed = [item["name"] for item in server.get("/telemetry/incidents").json()["data"]]
        asked_for = [name for name in listed if name.endswith("-asked.duckdb")]
        assert len(asked_for) == number + 1, "the server keeps one too, within its bounds"
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


def incident(server: Server, reason: str) -> Path:
    """Wait for the file of an incident that the server makes by itself."""
    folder = history_of(server) / "incidents"
    (path,) = server.wait(lambda: list(folder.glob(f"*-{reason}.duckdb")), 60)
    assert rows(path, "SELECT reason FROM file.incident") == [[reason]]
    return path


def test_missed_objectives_leave_an_incident(server: Server) -> None:
    for _ in range(5):
        complete(server, {"prompt": ids(20), "max_tokens": 3, "slo": {"ttft_ms": 0.001}})
    path = incident(server, "slo")
    (told,) = rows(path, "SELECT detail FROM file.incident")
    assert told == ["5 of 5 requests of a minute missed theirs"]
    assert rows(path, "SELECT count(*) FROM request_start WHERE slo IS NOT NULL") == [[5]]


def test_an_engine_that_stands_still_leaves_an_incident(server: Server) -> None:
    pid = engine_pid(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(complete, server, {"prompt": ids(20), "max_tokens": 3})
            path = incident(server, "stall")
            os.kill(pid, signal.SIGCONT)
            assert answer.result(60)["usage"]["completion_tokens"] == 3
    finally:
        os.kill(pid, signal.SIGCONT)
    told = "SELECT count(*) FROM fault WHERE error LIKE 'stall: no progress for %'"
    assert rows(path, told) == [[1]]


def test_a_killed_engine_leaves_an_incident_with_what_led_to_it(server: Server) -> None:
    os.kill(engine_pid(server), signal.SIGKILL)
    path = incident(server, "crash")
    faults = [row[0] for row in rows(path, 'SELECT "where" FROM fault ORDER BY seq')]
    assert faults[-2:] == ["engine process", "flight recorder"]
    assert rows(path, "SELECT count(*) FROM request_end")[0][0] >= 6
    assert "recorded in" in server.log
    server.wait(lambda: server.get("/ready").status_code == 200, 90)
