"""Who may ask: keys, tenants, host names, origins, cookies; and that no text leaves the request.

The gate is tried as a function of one request, then a real server with keys. A canary goes in by
every field that a client may fill, and must not be found in logs, metrics, history or errors.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from engine.config import ConfigError
from server.config import ServerConfig, check
from server.gate import Gate, checks_of
from server.keys import Caller, KeyRing, digest, read_keys
from server.queue import Queue, limits_of
from server.sessions import SESSION_S, SESSIONS_MAX, Sessions, set_cookie, token_in
from tests import tiny
from tests.api import LONG, post, raw_request
from tests.servers import Server, answers, serving

OPERATOR, TENANT, OTHER = "operator-" + "k" * 24, "tenant-" + "k" * 24, "other-" + "k" * 24
CANARY = "zq7Canary"


def gated(
    *, key: str | None = None, path: str = "/v1/models", method: str = "GET", **settings: Any
) -> "Ask":
    """Return a way to ask a gate with this key and these settings; the answer is (status, code)."""
    config = ServerConfig(api_key=(key,) if key else (), **settings)
    checks = checks_of(config, read_keys(config), Queue(limits_of(config), lambda: 0))
    return Ask(Gate(_app, checks), path, method)


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    start: Message = {"type": "http.response.start", "status": 200, "headers": []}
    await send(start)
    await send({"type": "http.response.body", "body": b""})


class Ask:
    def __init__(self, gate: Gate, path: str, method: str) -> None:
        self.gate, self.path, self.method = gate, path, method

    def answer(self, **headers: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.gate)
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made:
                return await made.request(self.method, self.path, headers=sent)

        return asyncio.run(ask())

    def __call__(self, **headers: str) -> int:
        return self.answer(**headers).status_code


# ---- keys


def test_the_key_guards_everything_but_health_and_the_login_page() -> None:
    secret = "s" * 20
    assert gated()() == 200
    ask = gated(key=secret)
    assert ask() == 401
    assert ask.answer().headers["www-authenticate"] == "Bearer"
    assert ask(authorization="Bearer wrong") == 401
    assert ask(authorization=f"Basic {secret}") == 401
    assert ask(authorization=f"Bearer {secret}") == 200
    assert ask(authorization=f"bearer  {secret} ") == 200
    for path in ("/health", "/ready", "/session", "/dashboard/login/", "/dashboard/login/login.js"):
        assert gated(key=secret, path=path)() == 200, path
    for path in (
        *("/metrics", "/dashboard/", "/dashboard/main.js", "/telemetry/stream", "/", "/version"),
        *("/v1/requests", "/healthz", "/dashboard/loginx", "/nowhere", "/openapi.json"),
        *("/dashboard/login/../main.js", "/dashboard/login/%2e%2e/main.js"),
    ):
        status = gated(key=secret, path=path)()
        # What a client makes of the dots itself never reaches the server; what it leaves, does not
        # open a file: see test_dots_lead_nowhere.
        assert status == 401 or ".." in path or "%2e" in path, path


def test_a_browser_without_a_key_is_led_to_the_login_page() -> None:
    for path, status in (("/dashboard/", 303), ("/", 303), ("/metrics", 401), ("/v1/models", 401)):
        answer = gated(key="s" * 20, path=path).answer(accept="text/html,*/*")
        assert answer.status_code == status
        assert (answer.headers.get("location") or "").startswith("/dashboard/login/") == (
            status == 303
        )


def test_a_ring_compares_every_key() -> None:
    ring = KeyRing(tuple((digest(bytes([n])), Caller(name=str(n))) for n in range(5)))
    assert [(ring.caller_of(bytes([n])) or Caller(name="nobody")).name for n in range(6)] == [
        *"01234",
        "nobody",
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", r"\[\[key\]\]"),
        ("nonsense = [", "TOML"),
        ('[[key]]\nname = "a"\nkey = "s3cret\n', "TOML"),
        ('[[key]]\nkey = "s3cret"', "name"),
        ('[[key]]\nname = "a"', "key_sha256"),
        ('[[key]]\nname = "a"\nkey = "s3cret"\nkey_sha256 = "00"', "key_sha256"),
        ('[[key]]\nname = "a"\nkey_sha256 = "00"', "64 hex"),
        ('[[key]]\nname = "a"\nkey = "s3cret\u00e9"', "visible"),
        ('[[key]]\nname = "a b"\nkey = "s3cret"', "name"),
        ('[[key]]\nname = "a"\nkey = "s3cret"\ntenant = ""', "tenant"),
        ('[[key]]\nname = "a"\nkey = 5', "string"),
        ('[[key]]\nname = "a"\nkey = "s3cret"\nadmin = "yes"', "admin"),
        ('[[key]]\nname = "a"\nkey = "x"\n[[key]]\nname = "a"\nkey = "y"', "same name"),
        ('[[key]]\nname = "a"\nkey = "s3cret"\n[[key]]\nname = "b"\nkey = "s3cret"', "twice"),
    ],
)
def test_a_bad_file_of_keys_is_told_without_its_keys(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=named) as caught:
        read_keys(ServerConfig(api_keys_file=str(path)))
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError, match="nowhere"):
        read_keys(ServerConfig(api_keys_file=str(tmp_path / "nowhere")))


def test_keys_and_origins_out_of_shape_are_refused_at_start() -> None:
    for settings in (
        {"api_key": ("",)},
        {"api_key": ("a b",)},
        {"api_key": ("schl\u00fcssel",)},
        {"allowed_origins": "example.org"},
        {"allowed_origins": "https://example.org/"},
    ):
        with pytest.raises(ConfigError, match="--a"):
            check(ServerConfig(**settings))  # type: ignore[arg-type]
    check(ServerConfig(allowed_origins="*, https://example.org:8443,http://[::1]:3000"))


# ---- hosts and origins


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000")),
        *((host, 200) for host in ("LOCALHOST", "gpu.lan", "gpu.lan:80", "[::1]")),
        *((host, 403) for host in ("evil.example", "evil.example:8000", "localhost.evil.example")),
        *((host, 403) for host in ("127.0.0.1.evil.example", "", "169.254.169.254", "x@localhost")),
    ],
)
def test_only_known_host_names_are_answered_on_loopback(host: str, status: int) -> None:
    """DNS rebinding: a page's own name suddenly means 127.0.0.1."""
    assert gated(allowed_hosts="gpu.lan")(host=host) == status


def test_other_addresses_check_hosts_when_some_are_named() -> None:
    assert gated(host="0.0.0.0")(host="anything.example") == 200
    assert gated(host="0.0.0.0", allowed_hosts="gpu.lan")(host="anything.example") == 403
    assert gated(host="0.0.0.0", allowed_hosts="gpu.lan")(host="gpu.lan:8000") == 200
    assert gated(allowed_hosts="*")(host="anything.example") == 200


def test_pages_of_other_origins_are_turned_away() -> None:
    post_ = gated(method="POST", path="/v1/completions")
    own, other = "http://localhost", "http://localhost:3000"
    assert post_() == 200
    assert post_(origin=own) == 200
    assert post_(origin="https://localhost") == 200  # a proxy in front added TLS
    for origin in (other, "http://evil.example", "null", "", "http://localhost.evil.example"):
        assert post_(origin=origin) == 403, origin
        assert gated()(origin=origin) == 403
    assert gated(allowed_origins=other)(origin=other) == 200
    assert gated(allowed_origins="*")(origin="http://evil.example") == 200


def test_what_browsers_send_without_an_origin() -> None:
    """An image, a script, a frame of another site; but a link may be followed."""
    for site in ("cross-site", "same-site"):
        assert gated()(sec_fetch_site=site, sec_fetch_dest="image") == 403
        assert gated()(sec_fetch_site=site, sec_fetch_dest="iframe") == 403
        assert gated()(sec_fetch_site=site, sec_fetch_dest="document") == 200
        assert gated(method="POST")(sec_fetch_site=site, sec_fetch_dest="document") == 403
    for site in ("none", "same-origin"):
        assert gated()(sec_fetch_site=site, sec_fetch_dest="empty") == 200


def test_cors_is_off_until_an_origin_is_named() -> None:
    asks = {"access_control_request_method": "POST", "access_control_request_headers": "x-tenant"}
    origin = "https://chat.example"
    assert "access-control-allow-origin" not in gated().answer().headers
    refused = gated(method="OPTIONS").answer(origin=origin, **asks)
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (403, False)
    for allowed in (origin, "*"):
        ask = gated(method="OPTIONS", allowed_origins=allowed, key="s" * 20)
        granted = ask.answer(origin=origin, **asks)
        assert granted.status_code == 204
        assert granted.headers["access-control-allow-origin"] == origin
        assert granted.headers["access-control-allow-headers"] == "x-tenant"
        assert "access-control-allow-credentials" not in granted.headers
        answer = gated(allowed_origins=allowed).answer(origin=origin)
        assert answer.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


# ---- sessions


def test_a_session_ends_by_itself_and_by_its_owner_and_makes_room() -> None:
    now_s = 0.0
    sessions = Sessions(lambda: now_s)
    caller = Caller(name="ops")
    first = sessions.open(caller).encode()
    assert sessions.find(first) == caller
    assert sessions.find(b"") is None
    now_s = SESSION_S - 1.0
    assert sessions.find(first) == caller
    now_s = SESSION_S + 0.0
    assert sessions.find(first) is None
    assert len(sessions) == 0
    tokens = [sessions.open(caller).encode() for _ in range(SESSIONS_MAX + 1)]
    assert (len(sessions), sessions.find(tokens[0])) == (SESSIONS_MAX, None)
    sessions.close(tokens[-1])
    sessions.close(tokens[-1])
    assert sessions.find(tokens[-1]) is None
    assert len(set(tokens)) == SESSIONS_MAX + 1


def test_the_cookie_is_for_one_port_and_no_script() -> None:
    cookie = set_cookie("abc", 8000, secure=False)
    assert cookie.startswith("iterscope-8000=abc; Max-Age=43200; Path=/")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Secure" in set_cookie("abc", 8000, secure=True)
    sent = b"other=1; iterscope-8001=x; iterscope-8000=abc; iterscope-8000=second"
    assert token_in(sent, 8000) == b"abc"
    assert token_in(sent, 80) is None


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
