"""The gate by itself: which keys, host names, origins and cookies pass, and what the others hear.

No server runs here; tests/test_security.py tries one.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from engine.config import ConfigError
from server.config import ServerConfig, check
from server.gate import Gate, checks_of
from server.keys import Caller, KeyRing, digest, read_keys
from server.log import JsonLines, Lines
from server.queue import Queue, limits_of
from server.sessions import SESSION_S, SESSIONS_MAX, Sessions, set_cookie, token_in


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
    login = "/dashboard/login/?from=page"
    for path, led in (
        ("/dashboard/", login),
        ("/dashboard", login),
        ("/dashboard/score/lanes.js", login),
        ("/", login),
        ("/metrics", None),
        ("/v1/models", None),
    ):
        answer = gated(key="s" * 20, path=path).answer(accept="text/html,*/*")
        assert answer.status_code == (303 if led else 401)
        for prefix in ("", "/behind/a/proxy"):
            location = answer.headers.get("location")
            assert not led or urljoin(prefix + path, location) == prefix + led


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


# ---- what a log may say


@pytest.mark.parametrize("lines", [Lines, JsonLines])
def test_a_trace_says_where_and_not_in_the_errors_own_words(lines: type[Lines]) -> None:
    prompt = "secret".upper()  # as a trace shows the source's lines

    def logged(*, words: bool) -> str:
        try:
            try:
                raise KeyError(prompt)
            except KeyError as error:
                raise ValueError(prompt) from error
        except ValueError as error:
            at = (type(error), error, error.__traceback__)
            record = logging.LogRecord("iterscope", logging.ERROR, "", 0, "it broke", (), at)
            return lines(words=words).format(record)

    told = logged(words=False)
    assert "it broke" in told
    assert told.index("KeyError") < told.index("ValueError")
    assert "in logged" in told
    assert prompt not in told
    assert prompt in logged(words=True)
