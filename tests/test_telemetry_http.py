"""SQL and the schema over HTTP: what was just published is found, and nothing else is possible.

Owns the proofs of server/telemetry_api.py's POST /telemetry/sql and GET /telemetry/schema on a real
uvicorn with a real history.
"""

import json
import threading
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from telemetry.records import KINDS
from tests import samples
from tests.telemetry_server import WAIT_S, Running, running, stream, wait_for

# ---- SQL and schema over HTTP


def ask(server: Running, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{server.url}/telemetry/sql", content=content, timeout=WAIT_S, trust_env=False
    )


def test_sql_sees_what_was_just_published(tmp_path: Path) -> None:
    with running(folder=tmp_path) as server:
        wait_for(lambda: server.parts.history.status().kept)
        server.publish(samples.run())
        for request in range(1, 6):
            server.publish(samples.start(request), samples.end(request))
            sql = "SELECT count(*), max(request) FROM request_end WHERE request <= $1"
            answer = ask(server, {"sql": sql, "parameters": [100]}).json()
            assert answer["rows"] == [[request, request]]
        assert answer["columns"][1] == {"name": "max(request)", "type": "BIGINT"}
        assert answer.keys() == {"columns", "rows", "row_count", "truncated", "elapsed_ms"}


def test_a_wrong_query_is_a_400_with_its_place(tmp_path: Path) -> None:
    with running(folder=tmp_path) as server:
        wait_for(lambda: server.parts.history.status().kept)
        response = ask(server, {"sql": "SELECT 1,\n foo"})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"], error["position"]) == ("sql", "sql_error", 11)
        assert "\n" not in error["message"]
        for sql in (
            "DROP TABLE run",
            "SELECT * FROM read_text('/etc/hostname')",
            "SELECT 1; SELECT 2",
        ):
            response = ask(server, {"sql": sql})
            assert response.status_code == 400
            assert "/etc" not in response.text


def test_a_body_that_is_no_query_is_a_400(tmp_path: Path) -> None:
    with running() as server:
        for body in (b"", b"{", [], {"sql": 5}, {"sql": "SELECT 1", "parameters": [[1]]}, {}):
            response = ask(server, body)
            assert response.status_code == 400, body
            assert response.json()["error"]["param"] == "sql"
        assert ask(server, b"x" * 2_000_000).status_code == 413


def test_sql_without_a_history_says_so() -> None:
    with running() as server:
        response = ask(server, {"sql": "SELECT 1"})
        assert response.status_code == 503
        assert "history is off" in response.json()["error"]["message"]


def test_a_slow_query_leaves_the_stream_alone(tmp_path: Path) -> None:
    with running(folder=tmp_path) as server, stream(server, "?hz=60") as client:
        wait_for(lambda: server.parts.history.status().kept)
        client.next()
        slow = {"sql": "SELECT count(*) FROM range(1000000000) a, range(1000) b"}
        responses: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: responses.append(ask(server, slow)))
        asking.start()
        for step in range(1, 21):
            server.iterations(step, step)
            client.until(step)
        asking.join(WAIT_S)
        assert responses[0].status_code == 400
        assert "deadline" in responses[0].json()["error"]["message"]


def test_what_the_stream_sends_fits_the_schema_that_is_served() -> None:
    with running(ring=4) as server:
        schema = httpx.get(f"{server.url}/telemetry/schema", timeout=WAIT_S, trust_env=False).json()
        server.publish(samples.run(), samples.start(1), samples.start(2), samples.end(2))
        with stream(server) as client:
            client.next()
            server.iterations(1, 3)
            client.until(7)
            first = client.last_id
        server.iterations(4, 20)
        with stream(server, last_event_id=first) as again:
            again.until(24)
        events = [*client.events, *again.events]
        assert {event.name for event in events} == {"hello", "iteration", "lost"}
        for event in events:
            Draft202012Validator(schema["events"][event.name]).validate(event.body)


def test_the_schema_is_served() -> None:
    with running() as server:
        url = f"{server.url}/telemetry/schema"
        body = httpx.get(url, timeout=WAIT_S, trust_env=False).json()
        assert body["run_id"] == "run-1"
        assert body["events"].keys() == {*KINDS, "hello", "lost"}
