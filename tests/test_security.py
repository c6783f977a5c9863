"""A real server with keys: operators, tenants, sessions; and that no text leaves a request.

A canary goes in by every field that a client may fill, and must not be found in logs, metrics,
history or errors.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pytest

from tests import tiny
from tests.api import LONG, post, raw_request
from tests.servers import Server, answers, serving

OPERATOR, TENANT, OTHER = "operator-" + "k" * 24, "tenant-" + "k" * 24, "other-" + "k" * 24
CANARY = "zq7Canary"


# ---- a real server with keys


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("security")
    hashed = hashlib.sha256(OTHER.encode()).hexdigest()
    (folder / "keys.toml").write_text(
        f'[[key]]\nname = "acme"\nkey = "{TENANT}"\ntenant = "acme"\n'
        f'[[key]]\nname = "zeta"\nkey_sha256 = "{hashed}"\ntenant = "zeta"\n'
    )
    flags = (
        *("--api-key", OPERATOR, "--api-key", "second-" + "k" * 24),
        *("--api-keys-file", str(folder / "keys.toml"), "--history", str(folder / "history")),
    )
    with serving(folder, tiny.write(folder / "model"), *flags, ready=False) as running:
        running.wait(lambda: answers(running, "/ready"), 60)
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(server: Server, path: str, key: str | None, method: str = "GET") -> httpx.Response:
    headers = bearer(key) if key else {}
    return httpx.request(method, server.url + path, headers=headers, timeout=20)


def rows(server: Server, sql: str) -> list[list[Any]]:
    found = post(server, "/telemetry/sql", {"sql": sql}, **bearer(OPERATOR))
    assert found.status_code == 200, found.text
    answer: list[list[Any]] = found.json()["rows"]
    return answer


def test_a_tenants_key_generates_in_its_name_and_no_more(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    spoofed = bearer(TENANT) | {"X-Tenant": "zeta", "X-Request-Id": "mine"}
    assert post(server, "/v1/completions", body, **spoofed).status_code == 200
    found = rows(server, "SELECT tenant FROM request_start WHERE external_id = 'mine'")
    assert found == [["acme"]]
    for path in ("/v1/models", "/version"):
        assert ask(server, path, TENANT).status_code == 200
    for path in ("/metrics", "/v1/requests", "/telemetry/schema", "/dashboard/", "/v1/requests/x"):
        assert ask(server, path, TENANT).status_code == 403, path
        assert ask(server, path, None).status_code == 401, path
    sql = {"sql": "SELECT 1"}
    assert post(server, "/telemetry/sql", sql, **bearer(TENANT)).status_code == 403


def test_a_tenant_cancels_its_own_requests_alone(server: Server) -> None:
    def listed() -> list[Any]:
        found: list[Any] = ask(server, "/v1/requests", OPERATOR).json()["data"]
        return found

    with raw_request(server, LONG | {"stream": True, "max_tokens": 2000}, **bearer(TENANT)):
        (running,) = server.wait(listed)
        path = f"/v1/requests/{running['request_id']}"
        assert ask(server, path, OTHER, "DELETE").status_code == 404
        assert listed()
        assert ask(server, path, TENANT, "DELETE").status_code == 200
        server.wait(lambda: not listed())


def test_signing_in_and_out(server: Server) -> None:
    own = {"Origin": server.url}
    with httpx.Client(base_url=server.url, timeout=20) as page:
        assert page.get("/session").json() == {
            "key_needed": True,
            "signed_in": False,
            "name": None,
            "try_it": "loopback",
        }
        assert page.post("/session", json={"key": "wrong"}).status_code == 401
        assert page.post("/session", json={"key": TENANT}).status_code == 403
        assert page.post("/session", content=b'{"kex": "' + OPERATOR.encode()).status_code == 400
        assert page.post("/session", content=b"x" * 10_000).status_code == 413
        entered = page.post("/session", json={"key": OPERATOR}, headers=own)
        assert (entered.status_code, OPERATOR in entered.text) == (200, False)
        assert page.get("/session").json()["signed_in"]
        assert page.get("/dashboard/").status_code == 200
        assert page.get("/metrics").status_code == 200
        body = {"sql": "SELECT 1"}
        # What changes something needs this server's own origin beside the cookie.
        assert page.post("/telemetry/sql", json=body).status_code == 403
        foreign = {"Origin": "http://evil.example"}
        assert page.post("/telemetry/sql", json=body, headers=foreign).status_code == 403
        assert page.post("/telemetry/sql", json=body, headers=own).status_code == 200
        token = dict(page.cookies)
        assert page.delete("/session", headers=own).status_code == 200
        assert page.get("/metrics").status_code == 401
        page.cookies.update(token)
        assert page.get("/metrics").status_code == 401, "a session that was ended is over"


def test_dots_lead_nowhere(server: Server) -> None:
    """The login page's folder is open; what lies beside it is not."""
    for path in ("login/../main.js", "login/%2e%2e/main.js", "login/%2e%2e%2fmain.js"):
        with raw_request(server, {}, path=f"/dashboard/{path}", method="GET") as made:
            assert made.recv(100).split(b" ")[1] in (b"401", b"404"), path


# ---- no text leaves a request


def canaries() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests that carry the canary: good ones, and bad ones whose errors might quote it."""
    chat, plain = "/v1/chat/completions", "/v1/completions"
    said = f"my secret is {CANARY}"
    messages = [{"role": "user", "content": said}]
    yield plain, {"prompt": said, "max_tokens": 3, "stop": [CANARY], "user": CANARY}
    yield plain, {"prompt": said, "max_tokens": 3, "echo": True, "stream": True, "logprobs": 1}
    yield chat, {"messages": messages, "max_tokens": 3, "stream": True, "n": 2}
    parts = [{"type": "text", "text": said}]
    yield chat, {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    yield plain, {"prompt": [said, said], "max_tokens": 1, "cache_salt": CANARY}
    yield plain, {"prompt": said * 5000, "max_tokens": 1}
    yield plain, {"prompt": said, "max_tokens": CANARY}
    yield plain, {"prompt": {"text": said}}
    yield plain, {"prompt": [said, 5]}
    yield plain, {"prompt": said, "stop": {CANARY: 1}}
    yield plain, {"prompt": said, "logit_bias": {CANARY: 1}}
    yield plain, {"prompt": said, "suffix": said}
    yield plain, {"prompt": said, CANARY: CANARY}
    yield plain, {"prompt": said, "seed": CANARY, "stream_options": CANARY}
    yield chat, {"messages": said}
    yield chat, {"messages": [{"role": CANARY, "content": said}]}
    yield chat, {"messages": [{"role": "user", "content": {CANARY: said}}]}
    yield chat, {"messages": [{"role": "user", "content": [{"type": "image_url", "text": said}]}]}
    yield chat, {"messages": messages, "tools": [{"type": CANARY}]}
    yield chat, {"messages": messages, "response_format": {"type": "json_object", "x": CANARY}}
    yield "/tokenize", {"prompt": 5, "messages": said}
    yield "/detokenize", {"tokens": [CANARY]}


def test_no_text_of_a_request_is_found_anywhere(server: Server, tmp_path: Path) -> None:
    statuses = set()
    for path, body in canaries():
        answer = post(server, path, body, **bearer(OPERATOR))
        statuses.add(answer.status_code)
        if answer.status_code >= 400:
            assert CANARY not in answer.text, (path, body, answer.text)
            # Nor the text around it: a template or a parser might quote a part.
            assert "my secret" not in answer.text
    assert statuses == {200, 400}
    broken = f'{{"prompt": "{CANARY}", "max_tokens": '.encode()
    for content in (broken, broken + b"\xff}", CANARY.encode()):
        answer = httpx.post(
            server.url + "/v1/completions", content=content, headers=bearer(OPERATOR), timeout=20
        )
        assert (answer.status_code, CANARY in answer.text) == (400, False)
    assert CANARY not in ask(server, "/metrics", OPERATOR).text
    assert CANARY not in ask(server, "/v1/requests", OPERATOR).text
    tables = [name for (name,) in rows(server, "SELECT table_name FROM information_schema.tables")]
    assert "request_start" in tables
    assert rows(server, "SELECT count(*) > 0 FROM request_end") == [[True]]
    assert CANARY not in server.log
    assert server.stop() == 0
    assert CANARY not in server.log
    assert OPERATOR not in server.log
    assert TENANT not in server.log
    kept = [
        path for path in server.log_file.parent.joinpath("history").rglob("*") if path.is_file()
    ]
    assert kept
    for path in kept:
        assert CANARY.encode() not in path.read_bytes(), path
        if path.suffix == ".duckdb":
            with duckdb.connect(str(path), read_only=True) as con:
                for (table,) in con.execute("SELECT table_name FROM duckdb_tables()").fetchall():
                    text = json.dumps(con.execute(f'FROM "{table}"').fetchall(), default=str)
                    assert CANARY not in text, (path, table)
                    assert OPERATOR not in text
