"""The live record as server-sent events: hello, records, losses, each with its place.

Owns the frames, the meaning of Last-Event-ID and the response that pulls from the bus at the
client's rate. server/telemetry_api.py returns it. Must never buffer for a slow client (the ring is
the buffer), never send a comment, and never leave a loss unsaid: received + lost = published.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from server.errors import ApiError
from telemetry.bus import Batch, Bus, Entry, Reader, Snapshot
from telemetry.records import SCHEMA_VERSION

LABEL = "stream"
RECORDS_A_SEND = 512
PING_S = 5.0
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """What a client asks for. `place` is the id it saw last; `kinds` None means every kind.

    `past`: without a place it begins so many records ago, as far as the ring goes, not with now.
    """

    place: str | None
    past: int
    kinds: frozenset[str] | None
    hz: float


class TelemetryStream:
    """The response to one client; it counts against `readers_max` from first byte to last."""

    def __init__(
        self, bus: Bus, request: StreamRequest, *, readers_max: int, client_stall_s: float
    ) -> None:
        self._bus = bus
        self._request = request
        self._readers_max = readers_max
        self._client_stall_s = client_stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the client leaves or reads nothing for too long, or the server stops."""
        bus = self._bus
        if bus.readers().get(LABEL, 0) >= self._readers_max:
            message = f"{self._readers_max} telemetry streams are open already"
            raise ApiError(503, message, code="too_many_streams", headers={"Retry-After": "5"})
        seq, greeting = self._start()
        # Opened here, not in the generator: a client that leaves before the body would never
        # start it, and it would never give its place back.
        with bus.reader(seq, label=LABEL) as reader:
            response = EventSourceResponse(
                self._frames(reader, greeting),
                headers=HEADERS,
                # Pings are ours: only the generator knows up to where the client has been told.
                ping=0,
                send_timeout=self._client_stall_s,
            )
            with suppress(SendTimeoutError):
                await response(scope, receive, send)

    def _start(self) -> tuple[int, bytes]:
        """Return the place to read on from, and the frame that says so."""
        bus, place = self._bus, self._request.place
        seq = seen(place, bus) if place is not None else None
        if seq is not None:
            return seq, position(bus.run_id, seq)
        past = self._request.past
        snapshot = bus.past_snapshot(past) if past else bus.snapshot()
        return snapshot.seq, hello(bus.run_id, snapshot, known=place is None)

    async def _frames(self, reader: Reader, greeting: bytes) -> AsyncIterator[bytes]:
        yield greeting
        sent_at = time.monotonic()
        while True:
            batch = reader.take(RECORDS_A_SEND)
            data = self._joined(batch)
            if not data and time.monotonic() - sent_at >= PING_S:
                data = position(self._bus.run_id, reader.seq)
            if data:
                yield data
                sent_at = time.monotonic()
            behind = len(batch.entries) == RECORDS_A_SEND
            await asyncio.sleep(0.0 if behind else 1.0 / self._request.hz)

    def _joined(self, batch: Batch) -> bytes:
        """Return a batch as frames: its loss, if any, with a new hello, then its records."""
        run_id, kinds = self._bus.run_id, self._request.kinds
        frames = []
        if batch.lost:
            # On the publisher's own thread, so this is the state at the last lost record.
            snapshot = self._bus.tail_snapshot()
            assert snapshot.seq == batch.lost_to
            frames += [lost(run_id, batch), hello(run_id, snapshot, known=True)]
        frames += [
            record(run_id, entry) for entry in batch.entries if kinds is None or entry.kind in kinds
        ]
        return b"".join(frames)


def seen(place: str, bus: Bus) -> int | None:
    """Return the seq that an id of this run names, or None for any other text."""
    run_id, _, digits = place.rpartition(".")
    if run_id != bus.run_id or not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        return None
    seq = int(digits)
    return seq if seq <= bus.head else None


def hello(run_id: str, snapshot: Snapshot, *, known: bool) -> bytes:
    """Return the frame that starts a reader at a snapshot; `known`: nothing before it is unsaid."""
    body = {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "generation": snapshot.generation,
        "run": snapshot.run,
        "live": snapshot.live,
        "lost": 0 if known else "unknown",
    }
    return _frame(run_id, snapshot.seq, "hello", msgspec.json.encode(body))


def lost(run_id: str, batch: Batch) -> bytes:
    """Return the frame that says what a reader missed, exactly."""
    body = {
        "from": batch.lost_from,
        "to": batch.lost_to,
        "count": batch.lost,
        "by_kind": batch.lost_by_kind,
    }
    return _frame(run_id, batch.lost_to, "lost", msgspec.json.encode(body))


def record(run_id: str, entry: Entry) -> bytes:
    """Return the frame of one record."""
    return _frame(run_id, entry.seq, entry.kind, entry.payload)


def position(run_id: str, seq: int) -> bytes:
    """Return the frame that moves a client's place on and shows it nothing."""
    return b"id: %s.%d\n\n" % (run_id.encode(), seq)


def _frame(run_id: str, seq: int, event: str, body: bytes) -> bytes:
    return b"id: %s.%d\nevent: %s\ndata: %s\n\n" % (run_id.encode(), seq, event.encode(), body)
