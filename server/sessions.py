"""Who is signed in at the page: cookies that stand for a key, since a browser's stream sends none.

Owns the table of sessions and the cookie's text; server/session_api.py opens and closes them,
server/gate.py looks them up. A token is random and kept as its SHA-256. Must never hold a key, nor
more sessions than its bound: the oldest makes room.
"""

import secrets
from collections.abc import Callable

from server.keys import Caller, digest

SESSION_S = 12 * 3600
SESSIONS_MAX = 1024
TOKEN_BYTES = 32


class Sessions:
    """Open sessions by the digest of their token; bounded in number and in time."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._open: dict[bytes, tuple[Caller, float]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, caller: Caller) -> str:
        """Return the token of a new session."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        while len(self._open) >= SESSIONS_MAX:
            del self._open[next(iter(self._open))]
        self._open[digest(token.encode())] = (caller, self._now_s() + SESSION_S)
        return token

    def find(self, token: bytes) -> Caller | None:
        """Return whose session a token opens, None when it is over or never was."""
        caller, ends_s = self._open.get(digest(token), (None, 0.0))
        if caller is not None and ends_s <= self._now_s():
            self.close(token)
            return None
        return caller

    def close(self, token: bytes) -> None:
        """End a session; harmless for one that is over."""
        self._open.pop(digest(token), None)


def cookie_name(port: int | None) -> bytes:
    """Return the cookie's name: browsers share cookies among all ports of a host."""
    return b"iterscope-%d" % (port or 0)


def token_in(cookies: bytes, port: int | None) -> bytes | None:
    """Return the token that a Cookie header carries for this port."""
    name = cookie_name(port)
    for part in cookies.split(b";"):
        key, _, value = part.strip().partition(b"=")
        if key == name:
            return value
    return None


def set_cookie(token: str, port: int | None, *, secure: bool) -> str:
    """Return the Set-Cookie that opens a session; an empty token ends it in the browser."""
    age_s = SESSION_S if token else 0
    flags = "; Path=/; HttpOnly; SameSite=Strict" + ("; Secure" if secure else "")
    return f"{cookie_name(port).decode()}={token}; Max-Age={age_s}{flags}"
