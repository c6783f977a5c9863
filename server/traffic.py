"""Traffic for the page's generator: completions that the server asks of itself, read by nobody.

Owns Traffic, what is in flight of it and its end; server/traffic_api.py calls it. A browser opens
six connections to a host, so a page alone cannot send at a rate. What is asked goes through the
gate and the routes like anybody's, with the rights of who asked for it. Must never run more than
its bound.
"""

import asyncio
from collections import Counter
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

PLACE = "/v1/completions"
IN_FLIGHT_MAX = 1024
KEPT_HEADERS = frozenset({b"host", b"origin", b"cookie", b"authorization", b"sec-fetch-site"})


class Traffic:
    """What the generator has in flight, and how many answers had which status."""

    def __init__(self) -> None:
        self._asked: dict[asyncio.Task[None], asyncio.Event] = {}
        self._statuses: Counter[int] = Counter()
        self._beyond = 0

    def ask(self, app: ASGIApp, scope: Scope, bodies: list[dict[str, Any]]) -> None:
        """Ask for these completions, each on its own; those beyond the bound are counted."""
        for body in bodies:
            if len(self._asked) >= IN_FLIGHT_MAX:
                self._beyond += 1
                continue
            content = msgspec.json.encode({**body, "stream": True})
            stop = asyncio.Event()
            task = asyncio.create_task(self._one(app, _scope_of(scope, content), content, stop))
            self._asked[task] = stop
            task.add_done_callback(self._asked.pop)

    async def _one(self, app: ASGIApp, scope: Scope, content: bytes, stop: asyncio.Event) -> None:
        parts = [content]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await stop.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._statuses[message["status"]] += 1

        await app(scope, receive, send)

    def stop(self) -> None:
        """End what is in flight, as a client does that leaves."""
        for stop in self._asked.values():
            stop.set()

    def state(self) -> dict[str, Any]:
        """Return what is in flight and what was answered since the server's start."""
        answered = {str(status): count for status, count in sorted(self._statuses.items())}
        return {
            "in_flight": len(self._asked),
            "in_flight_max": IN_FLIGHT_MAX,
            "answered": answered,
            "beyond": self._beyond,
        }


def _scope_of(scope: Scope, content: bytes) -> Scope:
    """Return the scope of a completion asked by the same caller."""
    headers = [(name, value) for name, value in scope["headers"] if name in KEPT_HEADERS]
    headers += [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    shared = ("type", "asgi", "http_version", "scheme", "root_path", "server", "client")
    return {
        **{name: scope[name] for name in shared if name in scope},
        "method": "POST",
        "path": PLACE,
        "raw_path": PLACE.encode(),
        "query_string": b"",
        "headers": headers,
        "state": {},
    }
