"""A real uvicorn with the telemetry routes, for tests, and a client that reads as browsers do.

Owns the server in a thread of its own (real bus, real history, a free port; records are published
on its event loop, as the server does) and the stream's client. Every wait has a deadline.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from server.config import ServerConfig
from server.errors import ApiError
from server.queries_api import queries_routes
from server.telemetry_api import telemetry_routes
from server.telemetry_stream import LABEL
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History
from telemetry.records import KINDS, Record
from tests import samples

WAIT_S = 15.0


@dataclass(frozen=True)
class Parts:
    """What the telemetry handlers use of the server's context."""

    bus: Bus
    history: History
    config: ServerConfig


class Running:
    """A real uvicorn with the telemetry routes, in a thread."""

    def __init__(self, parts: Parts) -> None:
        async def refuse(request: Request, error: Exception) -> Response:
            assert isinstance(error, ApiError)
            return Response(error.body(), error.status, headers=dict(error.headers))

        app = Starlette(
            routes=[*telemetry_routes, *queries_routes], exception_handlers={ApiError: refuse}
        )
        app.state.context = parts
        self.parts = parts
        self.bus = parts.bus
        config = uvicorn.Config(app, port=0, ws="none", lifespan="off", log_level="critical")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.loop: asyncio.AbstractEventLoop

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve()

    @property
    def port(self) -> int:
        port: int = self.server.servers[0].sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def publish(self, *records: Record) -> None:
        """Publish all at once on the event loop: no reader gets a turn in between."""

        async def all_at_once() -> None:
            for record in records:
                self.bus.publish(record)

        asyncio.run_coroutine_threadsafe(all_at_once(), self.loop).result(WAIT_S)

    def iterations(self, first: int, last: int) -> None:
        self.publish(*(samples.iteration(step) for step in range(first, last + 1)))

    def readers(self) -> int:
        return self.bus.readers().get(LABEL, 0)


@contextmanager
def running(
    *,
    ring: int = 1000,
    folder: Path | None = None,
    readers_max: int = 64,
    stall_s: float = 10.0,
    deadline_s: float = 2.0,
) -> Iterator[Running]:
    telemetry = TelemetryConfig(
        history=str(folder) if folder else None,
        stream_readers_max=readers_max,
        sql_deadline_s=deadline_s,
    )
    bus = Bus(run_id="run-1", capacity=ring)
    history = History(bus=bus, config=telemetry)
    history.start()
    server = Running(Parts(bus, history, ServerConfig(telemetry=telemetry, client_stall_s=stall_s)))
    server.thread.start()
    try:
        wait_for(lambda: server.server.started)
        yield server
    finally:
        server.server.should_exit = True
        server.server.force_exit = True
        server.thread.join(WAIT_S)
        assert history.close(WAIT_S)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.005)


@dataclass
class Event:
    """A frame as a browser would take it: the place it leaves the client at, name, body."""

    id: str
    name: str | None
    body: Any = None

    @property
    def seq(self) -> int:
        return int(self.id.rpartition(".")[2])


@dataclass
class Client:
    """One open stream, read frame by frame."""

    response: httpx.Response
    last_id: str = ""
    rest: str = ""
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chunks = self.response.iter_text()

    def next(self) -> Event:
        while "\n\n" not in self.rest:
            self.rest += next(self.chunks)
        frame, _, self.rest = self.rest.partition("\n\n")
        lines = dict(line.split(": ", 1) for line in frame.split("\n"))
        assert lines.keys() <= {"id", "event", "data"}, "no comment, nothing unknown"
        body = json.loads(lines["data"]) if "data" in lines else None
        event = Event(lines["id"], lines.get("event"), body)
        self.last_id = event.id
        if event.name is not None:
            self.events.append(event)
        return event

    def until(self, seq: int) -> list[Event]:
        """Read on to a place and return every event up to it."""
        while not self.last_id or int(self.last_id.rpartition(".")[2]) < seq:
            self.next()
        return self.events


@contextmanager
def stream(server: Running, query: str = "", last_event_id: str | None = None) -> Iterator[Client]:
    headers = {"Last-Event-ID": last_event_id} if last_event_id is not None else {}
    with (
        httpx.Client(timeout=WAIT_S, trust_env=False) as client,
        client.stream("GET", f"{server.url}/telemetry/stream{query}", headers=headers) as response,
    ):
        assert response.status_code == 200, response.read()
        yield Client(response)


def seqs(events: list[Event]) -> list[int]:
    return [event.seq for event in events if event.name in KINDS]
