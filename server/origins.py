"""Which names this server answers to, and which other sites' pages may use it.

Owns the check of Host against DNS rebinding, of Origin and Sec-Fetch-Site against pages that ride
on a browser's reach or its cookies, and CORS for the origins that the operator named. Pure: made
once from the configuration; server/gate.py asks for each request.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from server.config import ServerConfig, listed
from server.errors import ApiError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
FOREIGN = frozenset({b"cross-site", b"same-site"})
CORS_HEADERS = (
    (b"access-control-expose-headers", b"x-request-id, x-iterscope-request-id, retry-after"),
    (b"vary", b"origin"),
)
PREFLIGHT_HEADERS = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-max-age", b"600"),
)

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """`hosts` None answers to any name; `origins` holds those allowed, * for any."""

    hosts: frozenset[str] | None
    origins: frozenset[bytes]

    def refusal(self, method: str, headers: Headers, *, by_cookie: bool) -> ApiError | None:
        """Return why a request is not heard: wrong host, or sent by another site's page."""
        host = headers.get(b"host")
        if host is not None and self.hosts is not None and _name(host) not in self.hosts:
            message = "this server does not answer to that host name (see --allowed-hosts)"
            return ApiError(403, message, code="host_not_allowed")
        origin = headers.get(b"origin")
        if origin is not None:
            if _is_own(origin, host) or (self.allows(origin) and not by_cookie):
                return None
            message = "pages of that origin may not use this server (see --allowed-origins)"
            return ApiError(403, message, code="origin_not_allowed")
        foreign = headers.get(b"sec-fetch-site") in FOREIGN
        visited = method == "GET" and headers.get(b"sec-fetch-dest") == b"document"
        if (foreign and not visited) or (by_cookie and method not in SAFE):
            message = "a page of another site may not do that"
            return ApiError(403, message, code="origin_not_allowed")
        return None

    def allows(self, origin: bytes) -> bool:
        """Tell whether the operator named this origin."""
        return origin in self.origins or b"*" in self.origins

    def cors(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers that let an allowed origin read an answer; none for others."""
        origin = headers.get(b"origin")
        if origin is None or not self.allows(origin):
            return []
        return [(b"access-control-allow-origin", origin), *CORS_HEADERS]

    def preflight(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers of an answer to a browser that asks before it sends."""
        asked = headers.get(b"access-control-request-headers", b"")
        wanted = [(b"access-control-allow-headers", asked)] if asked.isascii() and asked else []
        return [*self.cors(headers), *PREFLIGHT_HEADERS, *wanted]


def origins_of(config: ServerConfig) -> Origins:
    """Return the rule that the configuration asks for.

    Hosts are checked on a loopback address, where every page of the operator's browser can reach
    the server, and wherever the operator names some.
    """
    named = frozenset(name.lower() for name in listed(config.allowed_hosts))
    own = f"[{config.host}]" if ":" in config.host else config.host.lower()
    checked = (is_loopback(config.host) or named) and "*" not in named
    return Origins(
        hosts=LOOPBACK | named | {own} if checked else None,
        origins=frozenset(origin.encode() for origin in listed(config.allowed_origins)),
    )


def is_loopback(host: str) -> bool:
    """Tell whether an address to listen on can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(host: bytes) -> str:
    """Return a Host header without its port."""
    text = host.decode("latin-1").lower()
    name, colon, port = text.rpartition(":")
    return name if colon and port.isdigit() else text


def _is_own(origin: bytes, host: bytes | None) -> bool:
    """Tell whether a page came from this server; a proxy in front may have added TLS."""
    scheme, _, place = origin.partition(b"://")
    return host is not None and scheme in (b"http", b"https") and place == host
