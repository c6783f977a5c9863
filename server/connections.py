"""The connections of the web server: how many, how large a head, how slow an upload, how stuck.

Owns the limits that hold before a request exists, and those on sockets that never make one whole.
server/life.py hands `Connections` to uvicorn, whose protocol `Connection` extends, and sweeps it.
Must never look at what a request asks, nor cost a whole request that comes in one piece anything.
"""

import asyncio
import logging
import math
import resource
from collections import Counter
from typing import Any, Literal, NoReturn

import httptools
from uvicorn._types import ASGI3Application as Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from server.config import ServerConfig
from server.errors import ApiError

HEADERS_MAX = 128
PIPELINE_MAX = 8
PIPELINED_BYTES_MAX = 256 * 1024
REFUSED_BYTES_MAX = 16 * 2**20
"""What a client may still send of a body after its answer: it may read that only afterwards."""
CHUNK_FRAME_BYTES = 16
"""What one byte of a chunked body may bring along: its chunk's own head and end."""
LINGER_S, LINGER_BYTES = 2.0, 2**20
"""How long a refused client may go on sending before it is cut; it reads the refusal meanwhile."""
LINGERING_MAX = 64
OTHER_FILES = 256
"""Files that are no connections: the history's, the engine's channels, libraries."""
SWEEP_S = 0.25

Part = Literal["idle", "head", "body", "refused"]


class Refused(Exception):
    """The parser is to read no further: the connection was refused."""


def enough_descriptors(connections_max: int) -> int | None:
    """Let this process open a file for each connection; return how many it may, if too few."""
    wanted = connections_max + LINGERING_MAX + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return None if soft >= wanted else soft


class Connections:
    """All open connections of a server; bounded in total and for each client address."""

    def __init__(self, config: ServerConfig) -> None:
        self.limits = config
        self._open: set[Connection] = set()
        self._by_address: Counter[str] = Counter()
        self._cut: Counter[str] = Counter()
        self._log = logging.getLogger("iterscope.web")

    def __len__(self) -> int:
        return len(self._open)

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> "Connection":
        """Return the protocol of one new connection; uvicorn calls it with these names."""
        return Connection(self, config, server_state, app_state, _loop)

    def joined(self, connection: "Connection", address: str) -> str | None:
        """Take a connection in; returns why it is one too many, or None."""
        self._open.add(connection)
        self._by_address[address] += 1
        if len(self._open) > self.limits.max_connections:
            return "too many connections are open"
        if self._by_address[address] > self.limits.max_connections_per_address:
            return "too many connections of this address are open"
        return None

    def lost(self, connection: "Connection", address: str) -> None:
        """Forget a connection that is closed."""
        if connection in self._open:
            self._open.remove(connection)
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    @property
    def crowded(self) -> bool:
        """Whether there is no room even for those who are being refused."""
        return len(self._open) > self.limits.max_connections + LINGERING_MAX

    def note(self, reason: str) -> None:
        """Count a connection that was cut; the next sweep tells of it."""
        self._cut[reason] += 1

    async def watch(self) -> None:
        """Cut what is overdue, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(loop.time())

    def sweep(self, now_s: float) -> None:
        """Cut what is overdue, and say in one line how many were cut and why."""
        for connection in list(self._open):
            connection.check(now_s)
        if self._cut:
            told = ", ".join(f"{count} x {reason}" for reason, count in self._cut.items())
            self._log.info("connections cut: %s", told)
            self._cut.clear()

    def cut_unfinished(self) -> None:
        """Refuse every request that is not here yet: the server is about to end."""
        for connection in list(self._open):
            connection.cut_unfinished()

    def abort(self) -> None:
        """Close every connection at once, whatever is on its way."""
        for connection in list(self._open):
            connection.transport.abort()


class Connection(HttpToolsProtocol):
    """One connection, with an eye on how it comes in.

    `_part` says what is being received: nothing (idle, though an answer may be under way), a head,
    a body; or that the client was refused, and what it still sends is thrown away.
    """

    def __init__(
        self,
        all_of_them: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self._all = all_of_them
        self._limits = all_of_them.limits
        self._address = ""
        self._part: Part = "idle"
        self._due_s = math.inf
        self._since_s = 0.0
        self._messages = 0
        self._around_bytes = 0
        self._body_bytes = 0
        self._read_bytes = 0
        self._blocked_since_s = math.inf
        self._active: RequestResponseCycle | None = None

    # ---- what the transport calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in, or refuse it when there are too many."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._due_s = self.loop.time() + self._limits.header_deadline_s
        why = self._all.joined(self, self._address)
        if why is None:
            return
        self._all.note(why)
        if self._all.crowded:
            transport.abort()
            return
        headers = {"Retry-After": "1"}
        self._refuse(ApiError(503, why, code="too_many_connections", headers=headers))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; the request in flight learns that its client left."""
        self._all.lost(self, self._address)
        self._tell_active()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then see how far the request has come and when the rest is due."""
        if self._part == "refused":
            self._throw_away(len(data))
            return
        messages = self._messages
        fresh = self._part == "idle"
        before: Part = "head" if fresh else self._part
        self._part = before
        self._read_bytes = len(data)
        self._feed(data)
        part: Part = self._part
        if part == "idle":
            self._due_s = math.inf
        if part in ("idle", "refused"):
            return
        now_s = self.loop.time()
        if fresh or messages != self._messages or part != before:
            self._since_s = now_s
            self._around_bytes = 0
        if part == "head":
            self._due_s = self._since_s + self._limits.header_deadline_s
            if before == "head":
                self._around_bytes += len(data)
            if self._around_bytes > self._limits.header_bytes_max:
                self._refuse_head()
        else:
            self._expect_body(len(data), now_s)

    def _throw_away(self, read_bytes: int) -> None:
        """Let a refused client go on for a while, so that it comes to read why."""
        self._body_bytes += read_bytes
        if self._body_bytes > LINGER_BYTES:
            self.flow.pause_reading()

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # the request is answered as if it had asked for no other protocol
        except httptools.HttpParserError:
            if self._part != "refused":
                self._all.note("not HTTP")
                self._refuse(ApiError(400, "this is not HTTP", code="invalid_http"))

    def pause_writing(self) -> None:
        """Note since when the client has not read."""
        self._blocked_since_s = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        self._blocked_since_s = math.inf
        super().resume_writing()

    # ---- what the parser calls

    def on_message_begin(self) -> None:
        """Begin the head of a request."""
        self._part = "head"
        self._messages += 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start the request, unless its head is too large or too many wait for their turn."""
        self._part = "body"
        self._body_bytes = 0
        self._around_bytes = 0
        if self._read_bytes > self._limits.header_bytes_max or len(self.headers) > HEADERS_MAX:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._limits.header_bytes_max or len(self.headers) > HEADERS_MAX:
                self._refuse_head()
                raise Refused
        super().on_headers_complete()
        if len(self.pipeline) > PIPELINE_MAX:
            self._cut("too many requests in a row")

    def on_body(self, body: bytes) -> None:
        """Take in a part of a body; one that nobody reads, yet or any more, may not be long."""
        self._body_bytes += len(body)
        unread_max = PIPELINED_BYTES_MAX if self.pipeline else REFUSED_BYTES_MAX
        unread = self.pipeline or self.cycle.response_complete
        if unread and self._body_bytes > unread_max:
            self._cut("a body that nobody reads")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is whole: nothing more is due."""
        self._part = "idle"
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    # ---- what the sweep calls

    def check(self, now_s: float) -> None:
        """Cut the connection if it is overdue or stuck."""
        if now_s - self._blocked_since_s > 2 * self._limits.client_stall_s:
            self._all.note("reads nothing")
            self.transport.abort()
        elif now_s < self._due_s:
            return
        elif self._part == "refused" or self.transport.is_closing():
            self.transport.abort()
        elif self._part == "body" and self.flow.read_paused:
            # It is we who do not read: the client can do nothing about it.
            self._since_s = now_s
            self._due_s = now_s + self._limits.body_deadline_s
        else:
            self._all.note(f"slow {'body' if self._part == 'body' else 'head'}")
            self._refuse(ApiError(408, "the request came in too slowly", code="request_timeout"))

    def cut_unfinished(self) -> None:
        """Refuse a request of which a part is still missing."""
        if self._part in ("head", "body"):
            headers = {"Retry-After": "5"}
            message = "the server is shutting down"
            self._refuse(ApiError(503, message, code="engine_unavailable", headers=headers))

    # ---- the ends

    def _expect_body(self, read_bytes: int, now_s: float) -> None:
        """Set when more of the body is due: never later than body_s from now, nor below the rate.

        What surrounds a body (chunk heads, trailers) is bounded as a head is.
        """
        limits = self._limits
        earned_s = self._body_bytes / limits.body_bytes_per_s_min
        self._due_s = min(
            self._since_s + limits.body_deadline_s + earned_s, now_s + limits.body_deadline_s
        )
        self._around_bytes += read_bytes
        if (
            self._around_bytes
            > limits.header_bytes_max + (1 + CHUNK_FRAME_BYTES) * self._body_bytes
        ):
            self._refuse_head()

    def _refuse_head(self) -> None:
        most = self._limits.header_bytes_max
        message = f"the request's head is larger than {most} bytes or {HEADERS_MAX} fields"
        self._all.note("head too large")
        self._refuse(ApiError(431, message, code="header_too_large"))

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error if an answer is still possible, and close once it is read."""
        cycle: RequestResponseCycle | None = self.cycle
        answered = cycle is not None and (
            self._part == "body" if cycle.response_complete else cycle.response_started
        )
        if self.pipeline or answered:
            self._close()
            return
        body = error.body()
        lines = {
            **error.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        head = "".join(f"{name.lower()}: {value}\r\n" for name, value in lines.items())
        self._tell_active()
        self._part = "refused"
        self._due_s = self.loop.time() + LINGER_S
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
        # Closing with unread bytes would reset the connection, and the client lose the answer.
        self.transport.write_eof()
        self.flow.resume_reading()

    def _cut(self, reason: str) -> NoReturn:
        """Close the connection from within the parser, which reads no further."""
        self._all.note(reason)
        self._close()
        raise Refused

    def _tell_active(self) -> None:
        """Tell the request that is being answered that nobody listens: it must write no more.

        uvicorn tells the one that came last, which may still wait for its turn.
        """
        if self._active is not None:
            self._active.disconnected = True
            self._active.message_event.set()

    def _close(self) -> None:
        self._tell_active()
        self._part = "refused"
        self._due_s = self.loop.time() + LINGER_S
        self.transport.close()
