"""What the page asks of the server for itself: whether it may send, its traffic, a shown prompt.

Owns the proofs of server/traffic.py and of what GET /session and an explanation tell a page; the
page in a browser is test_dashboard_request.py's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.config import ServerConfig
from server.prompts import PROMPTS_MAX, TOKENS_SHOWN, Prompts
from server.session_api import try_it
from server.traffic import IN_FLIGHT_MAX
from tests import tiny
from tests.servers import Server, serving

KEY = "operator-" + "k" * 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page-api")
    flags = ("--show-prompts", "--max-num-seqs=4", f"--history={folder / 'history'}")
    with serving(folder, tiny.write(folder / "tiny"), *flags) as running:
        yield running


def due(prompt: str, max_tokens: int = 8) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}


def state(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/traffic").json()
    return found


@pytest.mark.parametrize(
    ("host", "asked", "told"),
    [
        ("127.0.0.1", None, "loopback"),
        ("::1", None, "loopback"),
        ("0.0.0.0", None, "off"),
        ("0.0.0.0", True, "on"),
        ("127.0.0.1", False, "off"),
    ],
)
def test_a_page_may_send_on_loopback_or_where_told_so(
    host: str, asked: bool | None, told: str
) -> None:
    assert try_it(ServerConfig(host=host, try_it=asked)) == told


def test_traffic_runs_by_itself_and_each_answer_is_counted(server: Server) -> None:
    before = state(server)["answered"]
    asked = [due("one"), due("two"), due("three", 4), {"prompt": "bad", "max_tokens": -1}]
    answer = server.post("/traffic", {"requests": asked})
    assert answer.status_code == 200, answer.text
    assert answer.json()["in_flight_max"] == IN_FLIGHT_MAX
    server.wait(lambda: state(server)["in_flight"] == 0)
    after = state(server)["answered"]
    assert after["200"] - before.get("200", 0) == 3
    assert after["400"] - before.get("400", 0) == 1
    sql = "select count(*) from request_end where finish = 'length' and output_tokens in (4, 8)"
    rows = server.wait(
        lambda: [
            row for row in server.post("/telemetry/sql", {"sql": sql}).json()["rows"] if row[0] >= 3
        ]
    )
    assert rows[0][0] >= 3


def test_traffic_that_is_stopped_is_cancelled(server: Server) -> None:
    server.post("/traffic", {"requests": [due("on and on", 1500)] * 6})
    server.wait(lambda: len(server.get("/v1/requests").json()["data"]) == 6)
    assert httpx.delete(server.url + "/traffic", timeout=20).status_code == 200
    server.wait(lambda: state(server)["in_flight"] == 0)
    server.wait(lambda: not server.get("/v1/requests").json()["data"])
    server.wait_idle()


def test_traffic_beyond_its_bound_is_counted_and_bad_bodies_name_the_field(server: Server) -> None:
    for _ in range(IN_FLIGHT_MAX // 256 + 1):
        answer = server.post("/traffic", {"requests": [due("much", 400)] * 256})
    assert answer.json()["in_flight"] <= IN_FLIGHT_MAX
    assert answer.json()["beyond"] > 0
    httpx.delete(server.url + "/traffic", timeout=20)
    server.wait(lambda: state(server)["in_flight"] == 0)
    for body in ({}, {"requests": 3}, {"requests": [{}] * 257}, []):
        refused = server.post("/traffic", body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "requests"
    server.wait_idle()


def test_a_server_that_was_told_no_sends_nothing_and_keys_hold(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny")
    with serving(tmp_path, model, "--no-try-it", "--api-key", KEY, parrot=True) as server:
        assert server.get("/session").json()["try_it"] == "off"
        assert server.post("/traffic", {"requests": [due("x")]}).status_code == 401
        headers = {"authorization": f"Bearer {KEY}"}
        refused = httpx.post(
            f"{server.url}/traffic", json={"requests": [due("x")]}, headers=headers, timeout=20
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")


def test_traffic_has_the_rights_of_who_asked_for_it(tmp_path: Path) -> None:
    with serving(tmp_path, tiny.write(tmp_path / "tiny"), "--api-key", KEY, parrot=True) as server:
        headers = {"authorization": f"Bearer {KEY}"}

        def told() -> dict[str, Any]:
            found: dict[str, Any] = httpx.get(
                f"{server.url}/traffic", headers=headers, timeout=20
            ).json()
            return found

        httpx.post(
            f"{server.url}/traffic", json={"requests": [due("x")]}, headers=headers, timeout=20
        )
        server.wait(lambda: told()["answered"] == {"200": 1} and told()["in_flight"] == 0)


def test_a_prompt_is_shown_where_the_operator_says_so(server: Server) -> None:
    answer = server.post("/v1/completions", {**due("say hello"), "n": 1})
    told = server.get(f"/v1/requests/{answer.json()['id']}").json()
    assert told["prompt"]["left_out_tokens"] == 0
    assert "say hello" in told["prompt"]["text"]


class Spelling:
    """A tokenizer of one letter a token, as far as Prompts asks."""

    def detokenizer(self, *, special: bool) -> "Spelling":
        assert special
        return self

    def add(self, token: int) -> str:
        return chr(token)


def test_prompts_are_few_and_cut() -> None:
    prompts = Prompts(Spelling())  # type: ignore[arg-type]
    prompts.keep("long", [ord("a")] * (TOKENS_SHOWN + 5))
    assert prompts.of("long") == {"text": "a" * TOKENS_SHOWN, "left_out_tokens": 5}
    for number in range(PROMPTS_MAX):
        prompts.keep(f"r{number}", [ord("b")])
    assert prompts.of("long") is None
    assert prompts.of("r0") == {"text": "b", "left_out_tokens": 0}
