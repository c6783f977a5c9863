"""SQL over HTTP: JSON or CSV, a status for each failure, and a server that no query slows down.

Owns the proofs of server/sql_response.py on a real uvicorn with a real history and real children:
formats, deadlines, crowds, clients that leave or read nothing, and the event loop beside a bomb.
"""

import asyncio
import csv
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from telemetry.queries import PLACES_MAX
from tests import samples
from tests.telemetry_server import WAIT_S, Running, running, wait_for

ENDLESS = "SELECT count(*) FROM range(1000000000) a, range(1000) b"
TYPES = """SELECT 1 AS number, 'nan'::DOUBLE AS nothing, true AS yes, [1, 2] AS list,
  'a,"b"' AS text"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(folder=tmp_path_factory.mktemp("history"), deadline_s=3.0) as server:
        wait_for(lambda: server.parts.history.status().kept)
        server.publish(samples.run())
        yield server


def ask(server: Running, sql: str, accept: str = "*/*", **more: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/telemetry/sql",
        json={"sql": sql, **more},
        headers={"Accept": accept},
        timeout=WAIT_S,
        trust_env=False,
    )


@pytest.mark.parametrize(
    ("accept", "more", "is_csv"),
    [
        ("text/csv", {}, True),
        ("text/csv; header=present, application/json;q=0.5", {}, True),
        ("*/*", {"format": "csv"}, True),
        ("application/json", {"format": "csv"}, True),
        ("application/json, text/csv", {}, False),
        ("*/*", {}, False),
        ("text/csv", {"format": "json"}, False),
    ],
)
def test_a_client_chooses_json_or_csv(
    server: Running, accept: str, more: dict[str, str], is_csv: bool
) -> None:
    response = ask(server, TYPES, accept, **more)
    assert response.status_code == 200
    assert response.headers["x-iterscope-row-count"] == "1"
    assert response.headers["x-iterscope-truncated"] == "false"
    if is_csv:
        assert response.headers["content-type"].startswith("text/csv")
        assert list(csv.reader(io.StringIO(response.text))) == [
            ["number", "nothing", "yes", "list", "text"],
            ["1", "", "true", "[1,2]", 'a,"b"'],
        ]
    else:
        assert response.headers["content-type"] == "application/json"
        assert response.json()["rows"] == [[1, None, True, [1, 2], 'a,"b"']]


def test_a_cut_csv_says_so_in_its_headers(server: Running) -> None:
    response = ask(server, "SELECT * FROM range(20000)", format="csv")
    assert response.headers["x-iterscope-row-count"] == "10000"
    assert response.headers["x-iterscope-truncated"] == "true"
    assert len(response.text.splitlines()) == 10_001


def test_each_failure_has_its_status_in_openais_shape(server: Running) -> None:
    for sql, status, code in (
        ("SELECT foo FROM run", 400, "sql_error"),
        (ENDLESS, 400, "sql_deadline"),
        ("SELECT list_sum(range(500000000))", 400, "sql_error"),
    ):
        response = ask(server, sql, "text/csv")
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "sql")
        assert error["code"] == code
    assert ask(server, "SELECT foo FROM run").json()["error"]["position"] == 7


@pytest.mark.parametrize(
    "body",
    [
        {"sql": "SELECT 1", "format": "xml"},
        {"sql": "SELECT 1", "parameters": "1"},
        {"sql": "SELECT 1", "parameters": {"a": 1}},
        {"sql": None},
        {"sql": ["SELECT 1"]},
        "SELECT 1",
    ],
)
def test_a_body_that_is_none_names_what_is_wrong(server: Running, body: Any) -> None:
    response = httpx.post(f"{server.url}/telemetry/sql", json=body, trust_env=False)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "sql"


def test_parameters_of_every_kind(server: Running) -> None:
    given = ["x'; DROP TABLE run", 5, -1.5, True, None, 2**63 - 1]
    response = ask(server, "SELECT $1, $2, $3, $4, $5, $6", parameters=given)
    assert response.json()["rows"] == [given]
    assert ask(server, "SELECT $1", parameters=[2**64]).status_code == 400
    assert ask(server, "SELECT $1", parameters=[]).status_code == 400


def test_a_crowd_is_told_to_come_again(server: Running) -> None:
    queries = server.parts.history.queries
    with ExitStack() as crowd:
        for _ in range(PLACES_MAX):
            crowd.enter_context(queries.submit("SELECT 1"))
        response = ask(server, "SELECT 1")
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "sql_busy"
    assert ask(server, "SELECT 1").status_code == 200


def raw(server: Running, sql: str) -> socket.socket:
    """Return a connection on which a query was sent and nothing is read."""
    body = json.dumps({"sql": sql}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.sendall(
        b"POST /telemetry/sql HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    return client


def busy(server: Running) -> int:
    """Return how many places are taken."""
    return PLACES_MAX - server.parts.history.queries._places._value


def test_a_client_that_leaves_frees_its_child(tmp_path: Path) -> None:
    with running(folder=tmp_path, deadline_s=60.0) as server:
        wait_for(lambda: server.parts.history.status().kept)
        server.publish(samples.run())
        clients = [raw(server, ENDLESS) for _ in range(3)]
        wait_for(lambda: busy(server) == 3)
        for client in clients:
            client.close()
        started = time.monotonic()
        wait_for(lambda: busy(server) == 0)
        assert time.monotonic() - started < 5
        assert ask(server, "SELECT count(*) FROM run").json()["rows"] == [[1]]
        assert time.monotonic() - started < 20


def test_a_client_that_reads_nothing_loses_its_place(tmp_path: Path) -> None:
    with running(folder=tmp_path, stall_s=0.5, deadline_s=20.0) as server:
        wait_for(lambda: server.parts.history.status().kept)
        with raw(server, "SELECT repeat('x', 10000) FROM range(1500)") as client:
            wait_for(lambda: busy(server) == 1)
            server.iterations(1, 100)
            assert server.parts.history.flush(WAIT_S), "the writer does not wait for a reader"
            wait_for(lambda: busy(server) == 0)
            client.settimeout(WAIT_S)
            while client.recv(2**20):  # what the kernel holds, then the end
                pass
        assert ask(server, "SELECT 1").status_code == 200


def lag_s(server: Running, meanwhile: Callable[[], None]) -> float:
    """Return how late the event loop wakes, but for one time in a hundred, while something runs."""

    async def lags_s(until: threading.Event) -> list[float]:
        lags = []
        while not until.is_set():
            started = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - started - 0.01)
        return sorted(lags)

    done = threading.Event()
    measured = asyncio.run_coroutine_threadsafe(lags_s(done), server.loop)
    meanwhile()
    done.set()
    lags = measured.result(WAIT_S)
    assert len(lags) > 10
    return lags[int(len(lags) * 0.99)]


def test_the_event_loop_does_not_wait_for_a_bomb(server: Running) -> None:
    def explode() -> None:
        bombs = ("SELECT * FROM range(100000000) ORDER BY random()", ENDLESS, ENDLESS)
        asking = [threading.Thread(target=ask, args=(server, bomb)) for bomb in bombs]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(WAIT_S)

    def be_quiet() -> None:
        for _ in range(20):
            assert ask(server, "SELECT 1").status_code == 200

    quiet_s = lag_s(server, be_quiet)  # what the machine's other work costs alone
    assert lag_s(server, explode) < max(0.5, 3 * quiet_s)
