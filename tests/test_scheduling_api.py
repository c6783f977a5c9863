"""Scheduling as clients see it: tenants, priorities, objectives, shared prefixes, fixed batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.api import complete, ids, post, still_answers
from tests.servers import WAIT_S, Server, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scheduling")
    flags = (
        *("--kv-blocks", "128", "--scheduling-policy", "slo", "--history", str(folder / "h")),
        *("--prefix-cache-isolation", "tenant"),
    )
    with serving(folder, model, *flags) as running:
        yield running


def rows(server: Server, sql: str) -> list[list[Any]]:
    answer = httpx.post(f"{server.url}/telemetry/sql", json={"sql": sql}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    found: list[list[Any]] = answer.json()["rows"]
    return found


def test_what_a_request_asks_of_the_scheduler_is_on_record(server: Server) -> None:
    body = {
        "prompt": ids(5),
        "max_tokens": 2,
        "priority": 3,
        "slo": {"ttft_ms": 250, "tpot_ms": 40.5},
    }
    named = {"X-Tenant": "red", "X-Request-Id": "asked"}
    assert post(server, "/v1/completions", body, **named).status_code == 200
    server.wait_idle()
    sql = "SELECT tenant, priority, slo FROM request_start WHERE external_id = 'asked'"
    assert rows(server, sql) == [["red", 3, '{"ttft_ms":250.0,"tpot_ms":40.5}']]


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("slo", {"ttft_ms": 0}),
        ("slo", {"ttft_ms": "fast"}),
        ("slo", 5),
        ("priority", 1.5),
        ("priority", 2**40),
        ("cache_salt", 7),
        ("cache_salt", "x" * 1000),
    ],
)
def test_what_cannot_be_asked_is_named(server: Server, field: str, wrong: object) -> None:
    answer = post(server, "/v1/completions", {"prompt": ids(4), "max_tokens": 1, field: wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)
    still_answers(server)


@pytest.mark.parametrize("name", ["", "x" * 65, "two words"])
def test_a_tenant_is_a_short_printable_name(server: Server, name: str) -> None:
    answer = post(server, "/v1/completions", {"prompt": ids(4)}, **{"X-Tenant": name})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Tenant"


def test_isolated_tenants_share_no_blocks_and_salts_part_them_further(server: Server) -> None:
    body = {"prompt": [11, *ids(70)], "max_tokens": 1}

    def cached(name: str, tenant: str, **more: object) -> int:
        headers = {"X-Tenant": tenant, "X-Request-Id": name}
        assert post(server, "/v1/completions", body | more, **headers).status_code == 200
        server.wait_idle()
        sql = f"SELECT cached_tokens FROM request_end WHERE external_id = '{name}'"
        found: int = rows(server, sql)[0][0]
        return found

    assert cached("first", "red") == 0
    assert cached("again", "red") == 64
    assert cached("other", "blue") == 0
    assert cached("salted", "red", cache_salt="pepper") == 0


def test_choices_of_one_prompt_share_its_blocks(server: Server) -> None:
    body = {"prompt": [12, *ids(100)], "max_tokens": 4, "n": 3, "temperature": 1, "seed": 1}
    answer = complete(server, body)
    assert len(answer["choices"]) == 3
    server.wait_idle()
    sql = f"SELECT cached_tokens FROM request_end WHERE parent_id = '{answer['id']}' ORDER BY 1"
    assert rows(server, sql) == [[0], [96], [96]]


def test_a_fixed_batch_bounds_what_nobody_asked_to_bound(model: Path, tmp_path: Path) -> None:
    """Static: no max_tokens means static_max_tokens, and the answer waits for the whole batch."""
    flags = ("--batching", "static", "--static-max-tokens", "9", "--kv-blocks", "64")
    with serving(tmp_path, model, *flags) as server:
        body = {"prompt": ids(5), "ignore_eos": True}
        assert complete(server, body)["usage"]["completion_tokens"] == 9
        assert complete(server, body | {"max_tokens": 20})["usage"]["completion_tokens"] == 20
        server.wait_idle()
