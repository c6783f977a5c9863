"""The stream's client in Python: cut networks, lost records, restarts, silence.

Owns the proofs of server/event_stream.py over a real server of the telemetry routes, behind a relay
whose connections a test can cut: nothing is seen twice, and what is missed is said.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from server.event_stream import Away, Event, Followed, Here, follow
from server.source import NoAnswer
from tests.telemetry_server import Running, running, wait_for

KINDS = ("iteration",)
WAIT_S = 15.0


class Relay:
    """Passes bytes between a port of its own and a server, until it is cut."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upward, up = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers += [writer, up]
        await asyncio.gather(self.copy(reader, up), self.copy(upward, writer))

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    def cut(self) -> None:
        """Break every connection at once, as a network does."""
        for writer in self.writers:
            writer.transport.abort()
        self.writers = []


@asynccontextmanager
async def relayed(server: Running) -> AsyncIterator[tuple[Relay, str]]:
    relay = Relay(server.port)
    listening = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield relay, f"http://127.0.0.1:{port}"
    finally:
        relay.cut()
        listening.close()


class Seen:
    """What a follower was told, in order."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.others: list[str] = []

    async def until(self, stream: AsyncIterator[Here | Away | Event], step: int) -> None:
        """Read on until an iteration of this number came."""
        async with asyncio.timeout(WAIT_S):
            while not self.steps or self.steps[-1] < step:
                found = await anext(stream)
                if isinstance(found, Event) and found.name == "iteration":
                    self.steps.append(json.loads(found.body)["step"])
                else:
                    name = found.name if isinstance(found, Event) else type(found).__name__
                    self.others.append(name)


def test_a_cut_network_shows_nothing_twice_and_loses_nothing() -> None:
    async def cuts() -> Seen:
        seen = Seen()
        async with relayed(server) as (relay, url):
            what = Followed(url=url, api_key=None, kinds=KINDS)
            async with aclosing(follow(what)) as stream:
                assert isinstance(await anext(stream), Here)
                for last in (30, 60, 90, 120):
                    server.iterations(last - 29, last)
                    await seen.until(stream, last)
                    relay.cut()
        return seen

    with running() as server:
        seen = asyncio.run(cuts())
    assert seen.steps == list(range(1, 121))
    assert seen.others == ["hello", *["Away", "Here"] * 3]


def test_what_a_cut_cost_is_said_exactly() -> None:
    """GIVEN more records during a cut than the ring holds, THEN a loss, and a hello after it."""

    async def cut() -> Seen:
        seen = Seen()
        async with relayed(server) as (relay, url):
            what = Followed(url=url, api_key=None, kinds=KINDS)
            async with aclosing(follow(what)) as stream:
                assert isinstance(await anext(stream), Here)
                server.iterations(1, 10)
                await seen.until(stream, 10)
                relay.cut()
                server.iterations(11, 500)
                await seen.until(stream, 500)
        return seen

    with running(ring=50) as server:
        seen = asyncio.run(cut())
    assert seen.steps == [*range(1, 11), *range(451, 501)]
    assert seen.others == ["hello", "Away", "Here", "lost", "hello"]


def test_the_past_comes_first_where_it_is_asked_for() -> None:
    async def past() -> Seen:
        seen = Seen()
        what = Followed(url=server.url, api_key=None, kinds=KINDS, past=20)
        async with aclosing(follow(what)) as stream:
            await seen.until(stream, 100)
        return seen

    with running() as server:
        server.iterations(1, 100)
        assert asyncio.run(past()).steps == list(range(81, 101))


def test_who_was_never_there_is_an_error_at_once() -> None:
    async def first(url: str) -> None:
        async with aclosing(follow(Followed(url=url, api_key=None, kinds=KINDS))) as stream:
            await anext(stream)

    with pytest.raises(NoAnswer, match="does not answer"):
        asyncio.run(first("http://127.0.0.1:9"))
    with running(readers_max=0) as server, pytest.raises(NoAnswer, match="streams are open"):
        asyncio.run(first(server.url))
    with running() as server, pytest.raises(NoAnswer, match="kinds must be"):
        asyncio.run(invented(server.url))


async def invented(url: str) -> None:
    async with aclosing(follow(Followed(url=url, api_key=None, kinds=("x",)))) as stream:
        await anext(stream)


def test_a_follower_that_stops_gives_its_place_back() -> None:
    async def once() -> None:
        async with aclosing(follow(Followed(url=server.url, api_key=None, kinds=KINDS))) as stream:
            assert isinstance(await anext(stream), Here)

    with running() as server:
        for _ in range(5):
            asyncio.run(once())
        wait_for(lambda: not server.readers())
