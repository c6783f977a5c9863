"""A seeded fuzz of a real server: many bodies at once, healthy streams beside them, leaks counted.

`python -m tests.fuzz --bodies 100000 --json FILE` starts a server with the tiny model, sends, and
prints what came back; tests/test_fuzz.py runs a few hundred. A finding is a server error, a stream
without its end, a healthy stream that changed, or something that did not come back at the end.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests import tiny
from tests.fuzz_bodies import Bodies, Body
from tests.servers import Server, serving

HEALTHY = {"prompt": "The scheduler", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
FLAGS = ("--max-num-seqs", "32", "--kv-blocks", "400", "--max-model-len", "256")
MIB = 2**20


@dataclass
class Found:
    """What came back; `wrong` are the findings, as text, at most a few of each kind."""

    statuses: Counter[int] = field(default_factory=Counter)
    valid: int = 0
    valid_answered: int = 0
    left: int = 0
    healthy: int = 0
    wrong: list[str] = field(default_factory=list)

    def report(self, what: str) -> None:
        if len(self.wrong) < 50:
            self.wrong.append(what[:2000])


class Client:
    """One connection of HTTP/1.1, kept alive; bytes in, status and body out."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, data: bytes, *, leaves: bool = False) -> tuple[int, bytes]:
        """Return status and body; (0, b"") for a client that leaves before its answer."""
        if self._writer is None or self._writer.is_closing():
            made = await asyncio.open_connection("127.0.0.1", self._port)
            self._reader, self._writer = made
        assert self._reader is not None
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        if leaves:
            await self.close()
            return 0, b""
        head_lines = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head_lines[9:12])
        body = await self._body(head_lines, self._reader)
        if b"connection: close" in head_lines:
            await self.close()
        return status, body

    async def _body(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        if b"content-length: " in head:
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            return await reader.readexactly(int(length))
        parts = []
        while size := int(await reader.readline(), 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        await reader.readline()
        return b"".join(parts)

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def judge(body: Body, status: int, answer: bytes, found: Found) -> None:
    """Count an answer, and report one that should not be."""
    found.statuses[status] += 1
    found.valid += body.valid
    found.valid_answered += body.valid and status == 200
    place = f"{status} {body.path} {body.data[:1500]!r}: {answer[:300]!r}"
    if status >= 500 or status in (408, 413, 429):
        found.report(place)
    elif status == 200 and answer.startswith(b"data: "):
        if not answer.endswith(b"data: [DONE]\n\n") or b'data: {"error"' in answer:
            found.report(f"a stream without its end: {place}")
    else:
        shown = json.loads(answer, parse_constant=lambda name: found.report(f"{name}: {place}"))
        if status != 200 and set(shown["error"]) != {"message", "type", "param", "code"}:
            found.report(f"no error object: {place}")


async def send(url: str, bodies: list[Body], found: Found) -> None:
    """Take bodies off the list until it is empty."""
    client = Client(url)
    while bodies:
        body = bodies.pop()
        try:
            async with asyncio.timeout(60):
                status, answer = await client.post(body.path, body.data, leaves=body.leaves)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            found.report(f"{type(error).__name__} {body.path} {body.data[:1500]!r}")
            await client.close()
            continue
        if body.leaves:
            found.left += 1
        else:
            judge(body, status, answer, found)
    await client.close()


async def stay_healthy(url: str, alone: str, done: asyncio.Event, found: Found) -> None:
    """Stream the same prompt again and again; its text must stay what it was alone."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while not done.is_set():
            text = await healthy_text(client)
            found.healthy += 1
            if text != alone:
                found.report(f"a healthy stream said {text!r}, not {alone!r}")


async def healthy_text(client: httpx.AsyncClient) -> str:
    text = ""
    async with client.stream("POST", "/v1/completions", json=HEALTHY | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


async def run(server: Server, count: int, *, seed: int, connections: int) -> Found:
    """Send so many bodies over so many connections."""
    found, drawn, done = Found(), Bodies(seed), asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        alone = await healthy_text(client)
    healthy = [asyncio.create_task(stay_healthy(server.url, alone, done, found)) for _ in "ab"]
    for _ in range(0, count, 1000):
        bodies = [drawn.next() for _ in range(min(1000, count))]
        await asyncio.gather(*(send(server.url, bodies, found) for _ in range(connections)))
    done.set()
    await asyncio.gather(*healthy)
    return found


def held(server: Server) -> dict[str, int]:
    """Return what the server holds when idle: handles, memory, live requests."""
    server.wait_idle(30)
    pid = server.process.pid
    status = Path(f"/proc/{pid}/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "handles": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "rss_mib": int(rss.split()[1]) // 1024,
        "requests": len(server.get("/v1/requests").json()["data"]),
    }


def fuzz(server: Server, count: int, *, seed: int = 1, connections: int = 16) -> dict[str, Any]:
    """Warm up with a tenth, send the rest, and return everything that was seen."""
    warm = asyncio.run(run(server, max(100, count // 10), seed=seed + 1, connections=connections))
    before = held(server)
    began = time.monotonic()
    found = asyncio.run(run(server, count, seed=seed, connections=connections))
    seconds = time.monotonic() - began
    after = server.wait(lambda: settled(server, before), 30)
    return {
        "bodies": count,
        "seconds": round(seconds, 1),
        "statuses": dict(sorted(found.statuses.items())),
        "valid_share_answered": round(found.valid_answered / count, 3),
        "valid_refused": found.valid - found.valid_answered,
        "left": found.left,
        "healthy_streams": found.healthy,
        "before": before,
        "after": after,
        "wrong": warm.wrong + found.wrong,
    }


def settled(server: Server, before: dict[str, int]) -> dict[str, int]:
    """Return what is held once handles and requests are back; nothing until then."""
    now = held(server)
    back = now["handles"] <= before["handles"] + 3 and now["requests"] == 0
    return now if back else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(folder, tiny.write(folder / "tiny"), *FLAGS) as server:
            found = fuzz(server, flags.bodies, seed=flags.seed)
    print(json.dumps(found, indent=1))
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1))
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
