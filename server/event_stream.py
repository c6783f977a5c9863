"""The live record of a running server, followed: its events, and when there is no stream.

Owns the client's side of GET /telemetry/stream: frames taken apart, the place to go on from, pauses
between tries. `iterscope top` reads it. A server that never answered, or refuses the key, is an
error at once; one that went away is waited for. Must never hold more than one frame.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx
import msgspec

from server.source import NoAnswer

CONNECT_S = 5.0
SILENCE_S = 15.0
"""The server says something every 5 s; after so long without a word the connection is dead."""

PAUSE_FIRST_S, PAUSE_MAX_S = 0.25, 5.0
FRAME_BYTES_MAX = 64 * 2**20
"""A hello names every request in flight: some 300 bytes each."""

END = b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What to follow. `past`: how many records before now the first connection begins with."""

    url: str
    api_key: str | None
    kinds: tuple[str, ...]
    past: int = 0
    hz: float = 8.0


@dataclass(frozen=True, slots=True)
class Here:
    """The stream is open; `server_unix_s` is the server's own clock, to the second, if it says."""

    server_unix_s: float | None


@dataclass(frozen=True, slots=True)
class Away:
    """There is no stream: why, and how long until the next try."""

    why: str
    retry_s: float


@dataclass(frozen=True, slots=True)
class Event:
    """One named frame of the stream."""

    name: str
    body: bytes


class _Broken(Exception):
    """This connection is of no more use; a later one may be."""


async def follow(what: Followed) -> AsyncGenerator[Here | Away | Event]:
    """Yield events for ever, across reconnects; raises NoAnswer when there is nothing to follow.

    A stream that breaks is resumed at its place, so that nothing is seen twice; what the server no
    longer has comes as its `lost` event, and a restarted server says `hello` anew.
    """
    place: str | None = None
    met, pause_s = False, PAUSE_FIRST_S
    while True:
        try:
            async with aclosing(_connection(what, place)) as stream:
                async for found in stream:
                    if isinstance(found, str):
                        place = found
                        continue
                    met, pause_s = True, PAUSE_FIRST_S
                    yield found
        except (httpx.HTTPError, httpx.InvalidURL, _Broken) as error:
            if not met:
                raise NoAnswer(f"{what.url} does not answer: {_reason(error)}") from error
            yield Away(_reason(error), pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(PAUSE_MAX_S, 2 * pause_s)


async def _connection(what: Followed, place: str | None) -> AsyncGenerator[Here | Event | str]:
    """Yield what one connection brings, the text of a place before each event."""
    headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
    if what.api_key:
        headers["Authorization"] = f"Bearer {what.api_key}"
    if place is not None:
        headers["Last-Event-ID"] = place
    query = {"kinds": ",".join(what.kinds), "hz": f"{what.hz:g}", "past": str(what.past)}
    limits = httpx.Timeout(CONNECT_S, read=SILENCE_S)
    address = f"{what.url.rstrip('/')}/telemetry/stream"
    async with (
        httpx.AsyncClient(timeout=limits, trust_env=False) as client,
        client.stream("GET", address, params=query, headers=headers) as response,
    ):
        await _check(what.url, response)
        yield Here(_date(response.headers.get("date")))
        async for frame in _frames(response.aiter_bytes()):
            fields = dict(line.split(": ", 1) for line in frame.split("\n") if ": " in line)
            if "id" in fields:
                yield fields["id"]
            if "event" in fields:
                yield Event(fields["event"], fields.get("data", "null").encode())
    raise _Broken("the server ended the stream")


async def _check(url: str, response: httpx.Response) -> None:
    kind = response.headers.get("content-type", "")
    if response.is_success and kind.startswith("text/event-stream"):
        return
    if response.is_success:
        raise NoAnswer(f"{url} has no telemetry stream")
    message = f"it answered {response.status_code}"
    try:
        body = msgspec.json.decode(await response.aread())
        message = str(body["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        pass
    if response.is_server_error:
        raise _Broken(message)
    raise NoAnswer(f"{url}: {message}")


async def _frames(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    held = bytearray()
    async for chunk in chunks:
        seen = max(0, len(held) - 1)
        held += chunk
        while (end := held.find(END, seen)) >= 0:
            yield held[:end].decode(errors="replace")
            del held[: end + len(END)]
            seen = 0
        if len(held) > FRAME_BYTES_MAX:
            raise _Broken(f"a frame is over {FRAME_BYTES_MAX} bytes")


def _date(text: str | None) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except ValueError:
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.ReadTimeout):
        return f"silent for {SILENCE_S:g} s"
    return str(error) or type(error).__name__
