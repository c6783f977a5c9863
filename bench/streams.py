"""What a streamed token costs the server: many streams at a fixed pace over an engine that is fake.

Starts a server whose engine gains one token a stream at each beat of CLOCK_MONOTONIC, opens the
streams on bare sockets, and stamps what arrives: the delay is from the beat (when the device would
be done) to the client's read, commit and both processes included. Prints delays and CPU per token.
An HTTP client of the server.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import uvloop

from bench.machine import StolenTime, describe
from bench.whole_path import wait_ready

TEXT = re.compile(rb'"text":"(a+)"')
SETTLE_S = 2.0
PROMPT = "a"


class Stream(asyncio.Protocol):
    """One streamed completion; keeps every read with its instant."""

    def __init__(self, tokens: int) -> None:
        self.reads: list[tuple[int, bytes]] = []
        self._tokens = tokens

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        made = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        settings = {"max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        body = json.dumps({"prompt": PROMPT} | settings).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
        made.write(head % len(body) + body)

    def data_received(self, data: bytes) -> None:
        """Stamp what came."""
        self.reads.append((time.monotonic_ns(), data))


@contextmanager
def paced(folder: Path, step_ms: int, *flags: str) -> Iterator[tuple[str, int]]:
    """Start a server on a fake engine; yield its address and process id."""
    command = [sys.executable, "-m", "tests.paced_server", "--step-ms", str(step_ms), "serve"]
    log_file = folder / "server.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", "0", "--history", str(folder / "history"), *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield wait_ready(log_file, process), process.pid
        finally:
            process.terminate()
            process.wait(60)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of one process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_of(pid: int) -> int:
    """Return the server's child that is its engine."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in map(int, children):
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise SystemExit("the server has no engine")


def tokens_of(seconds: float, step_ms: int) -> int:
    """Return the length of a stream that outlives the measurement and what comes before it."""
    return int((seconds + 4 * SETTLE_S) * 1000 / step_ms)


async def run(url: str, pid: int, *, streams: int, seconds: float, step_ms: int) -> dict[str, Any]:
    """Open the streams, let them settle, and measure for so many seconds."""
    port = int(url.rpartition(":")[2])
    tokens = tokens_of(seconds, step_ms)
    loop = asyncio.get_running_loop()
    made = []
    for _ in range(streams):
        _, stream = await loop.create_connection(lambda: Stream(tokens), "127.0.0.1", port)
        made.append(stream)
        await asyncio.sleep(SETTLE_S / streams)
    await asyncio.sleep(SETTLE_S)
    processes = {"server": pid, "engine": engine_of(pid)}
    before = {name: cpu_seconds(number) for name, number in processes.items()}
    began = time.monotonic_ns()
    await asyncio.sleep(seconds)
    ended = time.monotonic_ns()
    cpu = {name: cpu_seconds(number) - before[name] for name, number in processes.items()}
    return measured(made, began, ended, step_ms * 1_000_000) | {
        f"{name}_cpu_share": used / seconds for name, used in cpu.items()
    }


def measured(streams: list[Stream], began: int, ended: int, beat_ns: int) -> dict[str, Any]:
    """Return delays in ms and counts of what was read between two instants.

    The delay is known up to a beat; tokens that came with another in one read were later than one.
    """
    delays: list[int] = []
    tokens = late = 0
    for stream in streams:
        for at, data in stream.reads:
            if began <= at < ended:
                count = sum(map(len, TEXT.findall(data)))
                tokens += count
                late += max(0, count - 1)
                delays += [at % beat_ns] * min(1, count)
    delays.sort()
    expected = len(streams) * (ended - began) / beat_ns
    return {
        "streams": len(streams),
        "tokens": tokens,
        "tokens_expected": round(expected),
        "tokens_late_a_beat": late,
        "delay_ms_p50": delays[len(delays) // 2] / 1e6,
        "delay_ms_p99": delays[len(delays) * 99 // 100] / 1e6,
        "delay_ms_max": delays[-1] / 1e6,
    }


def main() -> int:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a model folder, for its tokenizer")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--step-ms", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    blocks = flags.streams * (tokens_of(flags.seconds, flags.step_ms) // 16 + 2)
    settings = (
        *("--model", flags.model, "--max-num-seqs", str(flags.streams)),
        *("--kv-blocks", str(blocks), "--max-num-batched-tokens", "8192"),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        paced(Path(folder), flags.step_ms, *settings) as (url, pid),
        StolenTime() as stolen,
    ):
        found = uvloop.run(
            run(url, pid, streams=flags.streams, seconds=flags.seconds, step_ms=flags.step_ms)
        )
    share = found["server_cpu_share"] * flags.seconds / max(1, found["tokens"])
    found["server_cpu_us_per_token"] = share * 1e6
    print(json.dumps(found, indent=1))
    if flags.json:
        flags.json.write_text(json.dumps(found | describe(stolen), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
