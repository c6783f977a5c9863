"""Everything that goes wrong at once on a real server: who breaks what, and what each client saw.

Owns the clients (honest, leaving, slow, half-open), the saboteur and the table of faults with the
seconds to recovery. tests/test_chaos.py runs it for seconds or for half an hour. All draws are
seeded; every client of a request that did not leave must have got an answer or an error.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx

from tests.api import ids
from tests.servers import Server, engine_pid

CLIENTS = 8
CODES = (200, 408, 429, 500, 503)
ENDS = ("whole answer", "error event", "left", "refused")


@dataclass
class Disaster:
    """One fault: how it was made, what clients that were under way saw, how long it hurt."""

    name: str
    seen: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)


@dataclass
class Story:
    """What happened: requests by what their clients saw, and the disasters."""

    seen: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)
    disasters: dict[str, Disaster] = field(default_factory=dict)
    under_way: Disaster | None = None
    resident_mb: list[float] = field(default_factory=list)
    """The server's memory after each disaster."""

    def note(self, outcome: str, detail: str = "") -> None:
        self.seen[outcome] += 1
        if self.under_way is not None:
            self.under_way.seen[outcome] += 1
        if outcome not in ENDS and len(self.odd) < 50:
            self.odd.append(f"{outcome}: {detail}")

    def table(self) -> str:
        """Return a line for each fault: how often, what clients saw, seconds to recovery."""
        lines = [f"clients saw {dict(self.seen)}"]
        for one in self.disasters.values():
            times = sorted(one.recovery_s)
            told = f"{times[len(times) // 2]:.1f} s, at most {times[-1]:.1f} s" if times else "-"
            lines.append(f"{one.name} x{len(times)}: clients {dict(one.seen)}; recovery {told}")
        shown = [f"{size:.0f}" for size in self.resident_mb[:: max(1, len(self.resident_mb) // 10)]]
        lines.append(f"memory in MB, over the run: {' '.join(shown)}")
        return "\n".join(lines)

    def grown_mb(self) -> float:
        """Return by how much the last third of the run held more than the second, in the median.

        In the first one the ring of records, and what the allocator keeps, grow to their bounds.
        """
        third = len(self.resident_mb) // 3
        if third < 5:
            return 0.0
        return median(self.resident_mb[-third:]) - median(self.resident_mb[third:-third])


def resident_mb(server: Server) -> float:
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


class Chaos:
    """Clients and a saboteur against one server, until the time is up."""

    def __init__(
        self, server: Server, *, seconds: float, seed: int, breaks: dict[str, Callable[[], None]]
    ) -> None:
        self.story = Story()
        self._server = server
        self._seed = seed
        self._until = time.monotonic() + seconds
        self._breaks = breaks
        self._client = httpx.AsyncClient(
            base_url=server.url,
            timeout=httpx.Timeout(120, connect=30),
            limits=httpx.Limits(max_connections=200, max_keepalive_connections=0),
        )

    @property
    def on(self) -> bool:
        return time.monotonic() < self._until

    async def run(self) -> None:
        """Run everybody to the end; the saboteur stops a moment earlier."""
        async with self._client:
            await asyncio.gather(
                self._sabotage(),
                self._half_open(random.Random(f"{self._seed} half")),
                *(self._visit(random.Random(f"{self._seed} {n}")) for n in range(CLIENTS)),
            )

    # ---- clients

    async def _visit(self, draw: random.Random) -> None:
        kinds = (self._whole, self._whole, self._stream, self._stream, self._leave, self._slow)
        while self.on:
            body: dict[str, object] = {
                "prompt": ids(draw.choice((3, 20, 90, 400))),
                "max_tokens": draw.choice((1, 5, 40, 150)),
                "n": draw.choice((1, 1, 1, 2)),
                "ignore_eos": True,
                "seed": draw.randrange(1000),
            }
            try:
                await draw.choice(kinds)(body, draw)
            except httpx.TransportError as error:
                self.story.note("cut", type(error).__name__)
            await asyncio.sleep(draw.random() * 0.2)

    async def _whole(self, body: dict[str, object], draw: random.Random) -> None:
        answer = await self._client.post("/v1/completions", json=body)
        if answer.status_code == 200:
            finishes = {choice["finish_reason"] for choice in answer.json()["choices"]}
            self.story.note("whole answer" if finishes == {"length"} else f"finish {finishes}")
        else:
            await self._refused(answer)

    async def _refused(self, answer: httpx.Response) -> None:
        """Note an error that came before the first byte; its client may wait a moment."""
        await answer.aread()
        well_formed = "message" in answer.json().get("error", {})
        fine = answer.status_code in CODES and well_formed
        self.story.note("refused" if fine else f"status {answer.status_code}", answer.text[:200])
        await asyncio.sleep(0.2)

    @contextlib.asynccontextmanager
    async def _events(self, body: dict[str, object]) -> AsyncIterator[AsyncIterator[str] | None]:
        async with self._client.stream(
            "POST", "/v1/completions", json=body | {"stream": True}
        ) as answer:
            if answer.status_code != 200:
                await self._refused(answer)
                yield None
            else:
                lines = answer.aiter_lines()
                yield (line[6:] async for line in lines if line.startswith("data: "))

    async def _stream(
        self, body: dict[str, object], draw: random.Random, wait_s: float = 0
    ) -> None:
        last = ""
        async with self._events(body) as events:
            if events is None:
                return
            async for event in events:
                last = event
                if wait_s:
                    await asyncio.sleep(wait_s)
        if last == "[DONE]":
            self.story.note("whole answer")
        elif last and "error" in json.loads(last):
            self.story.note("error event")
        else:
            self.story.note("stream without an end", last[:200])

    async def _slow(self, body: dict[str, object], draw: random.Random) -> None:
        await self._stream(body | {"max_tokens": 40}, draw, wait_s=draw.choice((0.01, 0.05)))

    async def _leave(self, body: dict[str, object], draw: random.Random) -> None:
        count = draw.choice((0, 1, 3, 10))
        async with self._events(body | {"max_tokens": 300}) as events:
            if events is None:
                return
            async for event in events:
                if event == "[DONE]" or "error" in json.loads(event):
                    self.story.note("whole answer" if event == "[DONE]" else "error event")
                    return
                count -= 1
                if count <= 0:
                    break
        self.story.note("left")

    async def _half_open(self, draw: random.Random) -> None:
        """Open connections, send a part of a request, and leave them, or reset them."""
        port = httpx.URL(self._server.url).port or 0
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n\r\n"
        held: list[socket.socket] = []
        while self.on:
            with contextlib.suppress(OSError):
                made = socket.create_connection(("127.0.0.1", port), timeout=5)
                made.sendall(draw.choice((b"", b"POST /v1", head, head + b'{"prompt": [1,')))
                held.append(made)
            if len(held) > 40 or not self.on:
                for one in held:
                    if draw.random() < 0.5:  # a reset instead of a close
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    one.close()
                held.clear()
            await asyncio.sleep(0.1)
        for one in held:
            one.close()

    # ---- the saboteur

    async def _sabotage(self) -> None:
        draw = random.Random(f"{self._seed} saboteur")
        names = list(self._breaks)
        while self.on:
            await self._served(1.0)
            if not names:
                names = list(self._breaks)
                draw.shuffle(names)
            name = names.pop()
            one = self.story.disasters.setdefault(name, Disaster(name))
            self.story.under_way = one
            began = time.monotonic()
            await asyncio.to_thread(self._breaks[name])
            recovered = await self._served(0)
            one.recovery_s.append(time.monotonic() - began)
            self.story.resident_mb.append(resident_mb(self._server))
            assert recovered, f"no answer two minutes after: {name}\n{self._server.log[-3000:]}"
            await asyncio.sleep(1.0)
            self.story.under_way = None

    async def _served(self, calm_s: float, patience_s: float = 120) -> bool:
        """Wait until a request is answered whole and /health is fine; then calm_s more."""
        deadline = time.monotonic() + patience_s
        body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                answer = await self._client.post("/v1/completions", json=body)
                health = await self._client.get("/health")
                if answer.status_code == health.status_code == 200:
                    await asyncio.sleep(calm_s)
                    return True
            await asyncio.sleep(0.05)
        return False


def kill_engine(server: Server, number: int) -> None:
    """Send the engine a signal that ends it."""
    with contextlib.suppress(AssertionError, ProcessLookupError):
        os.kill(engine_pid(server), number)


def pause_engine(server: Server, seconds: float) -> None:
    """Stop the engine for a while."""
    with contextlib.suppress(AssertionError, ProcessLookupError):
        pid = engine_pid(server)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def fill_disk(folder: Path, seconds: float) -> None:
    """Leave no byte free where the history is, for a while."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(2**20)):
            pass
    time.sleep(seconds)
    filler.unlink()
