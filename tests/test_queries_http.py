"""Named queries over HTTP: the list, one by its name, and the errors that name what is wrong.

Owns the proofs of server/queries_api.py on a real uvicorn with a real history: an answer is that of
POST /telemetry/sql, parameters in the address and in a body mean the same, and what was published a
moment ago is seen.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from telemetry.named import catalogue
from telemetry.records import Run
from tests.sick_runs import healthy
from tests.telemetry_server import WAIT_S, Running, running, wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(folder=tmp_path_factory.mktemp("history"), ring=2000) as server:
        wait_for(lambda: server.parts.history.status().kept)
        server.publish(*healthy())
        yield server


def get(server: Running, path: str, **given: object) -> httpx.Response:
    url = f"{server.url}/telemetry/queries{path}"
    return httpx.get(url, params=given, timeout=WAIT_S, trust_env=False)  # type: ignore[arg-type]


def post(server: Running, path: str, body: Any) -> httpx.Response:
    url = f"{server.url}/telemetry/queries{path}"
    return httpx.post(url, json=body, timeout=WAIT_S, trust_env=False)


def test_the_list_tells_all_that_a_page_needs(server: Running) -> None:
    listed = get(server, "").json()["queries"]
    assert [query["name"] for query in listed] == list(catalogue())
    assert {query["kind"] for query in listed} == {"post_mortem", "lint", "law"}
    (goodput,) = (query for query in listed if query["name"] == "goodput")
    assert goodput.keys() == {
        *("name", "kind", "title", "meaning", "unit", "chart", "windowed", "parameters", "sql")
    }
    assert (goodput["chart"], goodput["unit"]) == ("lines", "requests/s")
    takes = {parameter["name"]: parameter for parameter in goodput["parameters"]}
    assert list(takes) == [
        *("from_unix_us", "to_unix_us", "last_s", "run_id", "points", "ttft_ms", "tpot_ms")
    ]
    assert takes["ttft_ms"] == {
        "name": "ttft_ms",
        "type": "number",
        "required": False,
        "default": 1000.0,
        "min": 0.0,
        "max": 3600000.0,
        "doc": "the longest good time to first byte, ms",
    }


def test_every_query_runs_where_sql_does(server: Running) -> None:
    for query in catalogue().values():
        given = {p.name: "req-1" for p in query.parameters if p.required}
        response = get(server, f"/{query.name}", **given)
        assert response.status_code == 200, f"{query.name}: {response.text}"
        answer = response.json()
        assert answer.keys() == {"columns", "rows", "row_count", "truncated", "elapsed_ms"}
        if query.kind != "post_mortem":
            assert answer["rows"] == [], query.name


def test_an_answer_is_that_of_sql(server: Running) -> None:
    bound = catalogue()["why_waiting"].bind({"last_s": 3})
    body = {"sql": bound.sql, "parameters": bound.parameters}
    url = f"{server.url}/telemetry/sql"
    plain = httpx.post(url, json=body, timeout=WAIT_S, trust_env=False).json()
    named = get(server, "/why_waiting", last_s=3).json()
    assert named["rows"] == plain["rows"] != []
    assert named["columns"] == plain["columns"]


def test_parameters_in_the_address_and_in_a_body_mean_the_same(server: Running) -> None:
    address = get(server, "/throughput", last_s="4.5", points="7").json()
    body = post(server, "/throughput", {"last_s": 4.5, "points": 7}).json()
    both = post(server, "/throughput?points=7", {"last_s": 4.5}).json()
    assert address["rows"] == body["rows"] == both["rows"]
    assert address["row_count"] == 7
    assert post(server, "/runs", {}).json()["row_count"] == 1


def test_what_was_just_published_is_seen(server: Running) -> None:
    before = get(server, "/runs").json()["row_count"]
    (run,) = (record for record in healthy() if isinstance(record, Run))
    server.publish(run)
    assert get(server, "/runs").json()["row_count"] == before + 1


def test_an_unknown_query_is_a_404(server: Running) -> None:
    for path in ("/nothing", "/window", "/..%2fwindow", "/why_waiting.sql"):
        response = get(server, path)
        assert response.status_code == 404, path
    error = get(server, "/nothing").json()["error"]
    assert error["message"] == "there is no such query; GET /telemetry/queries lists them"


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ("why_waiting?last_s=soon", "last_s", "last_s: must be a number"),
        ("why_waiting?last_s=", "last_s", "last_s: must be a number"),
        ("why_waiting?last_s=1&last_s=2", "last_s", "last_s is given twice"),
        ("slowest_requests?requests=0", "requests", "requests: must be at least 1"),
        ("request_timeline", "request", "request: is missing: id of the sequence"),
        ("runs?last_s=5", "last_s", "last_s: runs does not take it; it takes no parameters"),
        ("goodput?from_unix_us=9&to_unix_us=3", "from_unix_us", "from_unix_us: must be before"),
    ],
)
def test_a_bad_parameter_is_a_400_that_names_it(
    server: Running, query: str, param: str, message: str
) -> None:
    url = f"{server.url}/telemetry/queries/{query}"
    response = httpx.get(url, timeout=WAIT_S, trust_env=False)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(message)


@pytest.mark.parametrize("body", [b"[1]", b"{", b'{"last_s": [1]}', b'{"last_s": true}', b"\xff"])
def test_a_body_that_holds_no_parameters_is_a_400(server: Running, body: bytes) -> None:
    url = f"{server.url}/telemetry/queries/why_waiting"
    response = httpx.post(url, content=body, timeout=WAIT_S, trust_env=False)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("the body must be an object")


def test_a_body_over_the_limit_is_a_413_and_a_repeat_is_a_400(server: Running) -> None:
    assert post(server, "/why_waiting", {"run_id": "x" * 2**20}).status_code == 413
    response = post(server, "/why_waiting?last_s=3", {"last_s": 3})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "last_s")


def test_a_value_reaches_no_query_as_text(server: Running) -> None:
    evil = "x' OR 1=1 --"
    assert get(server, "/request_timeline", request=evil).json()["rows"] == []
    assert get(server, "/throughput", run_id="'; SELECT 1").json()["rows"] == []
