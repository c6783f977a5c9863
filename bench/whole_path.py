"""The whole path under a mixed load: who was in each batch, what it cost, and whether laws hold.

Starts a real server with a small KV cache, asks eight greedy prompts one by one, then again inside
32 requests at once of which a third leave midway, and compares. Prints the listing of steps, the
comparison and every conservation law; writes all of it with --json. An HTTP client of the server.
"""

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.laws import laws

PROBE_LENGTHS = (8, 40, 120, 300, 500, 700, 900, 1200)
OTHERS = 24
LISTING = """
    SELECT step, running, waiting, prefill_tokens AS prefill, decode_tokens AS decode,
           kv_blocks_used AS kv_used, kv_blocks_peak AS kv_peak, admission_stop,
           admission_blocker AS blocker, preempted, finished,
           round(wait_ns / 1e6, 1) AS wait_ms,
           list_transform(list_zip(requests, token_counts),
                          lambda pair: pair[1] || ':' || pair[2]) AS batch
    FROM iteration WHERE begin_at_ns >= ? ORDER BY generation, step"""
COMPANY = """
    WITH mine AS (
        SELECT e.external_id AS probe, s.run_id, s.generation, s.step, s.request, s.token_count
        FROM slice s JOIN request_end e USING (run_id, request)
        WHERE e.external_id LIKE 'load-%'
    )
    SELECT m.probe, count(*) AS steps, max(len(i.requests)) - 1 AS most_others,
           count(*) FILTER (token_count > 1) AS chunks, any_value(e.preemptions) AS preemptions,
           any_value(e.output_tokens) AS output
    FROM mine m JOIN iteration i USING (run_id, generation, step)
    JOIN request_end e USING (run_id, request)
    GROUP BY m.probe ORDER BY m.probe"""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request: prompt ids, how many tokens, and after how many it leaves (0: stays)."""

    name: str
    prompt: list[int]
    max_tokens: int
    leaves_after: int = 0


def ids(length: int, salt: str) -> list[int]:
    """Return seeded token ids that no prefix shares."""
    generator = random.Random(salt)
    return [generator.randrange(300, 49_000) for _ in range(length)]


def probes(prefix: str) -> list[Work]:
    """Return the prompts that run alone and inside the load."""
    return [
        Work(name=f"{prefix}-{length}", prompt=ids(length, f"p{length}"), max_tokens=64)
        for length in PROBE_LENGTHS
    ]


def crowd() -> list[Work]:
    """Return the others: log-uniform lengths, every second one leaves midway."""
    generator = random.Random(7)
    works = []
    for number in range(OTHERS):
        length = round(math.exp(generator.uniform(math.log(8), math.log(1500))))
        output = generator.randrange(60, 200)
        leaves = output // 3 if number % 24 < 21 and number % 2 == 0 else 0
        works.append(
            Work(
                name=f"crowd-{number}",
                prompt=ids(length, f"c{number}"),
                max_tokens=output,
                leaves_after=leaves,
            )
        )
    return works


async def ask(client: httpx.AsyncClient, work: Work) -> str:
    """Stream one completion; return its text, or what had come when it left."""
    body = {
        "prompt": work.prompt,
        "max_tokens": work.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text: str = ""
    chunks = 0
    headers = {"X-Request-Id": work.name}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            text += str(json.loads(line[6:])["choices"][0]["text"])
            chunks += 1
            if work.leaves_after and chunks >= work.leaves_after:
                break
    return text


async def run_load(url: str) -> dict[str, Any]:
    """Ask the probes alone, then everything at once; return texts and the load's beginning."""
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        alone = [await ask(client, work) for work in probes("alone")]
        marker = await sql(client, "SELECT max(end_at_ns) FROM iteration")
        mixed = crowd()
        # Long probes stand at the head of the line, short ones in its middle: those run beside
        # many others and are young enough to be preempted by older ones that grow.
        order = probes("load")[4:] + mixed[:10] + probes("load")[:4] + mixed[10:]
        began = time.monotonic()
        texts = dict(
            zip(
                (work.name for work in order),
                await asyncio.gather(*(ask(client, work) for work in order)),
                strict=True,
            )
        )
        seconds = time.monotonic() - began
        return {
            "alone": alone,
            "load": [texts[work.name] for work in probes("load")],
            "seconds": seconds,
            "began_at_ns": marker["rows"][0][0],
        }


async def sql(client: httpx.AsyncClient, query: str, *parameters: object) -> dict[str, Any]:
    """Ask the server's SQL endpoint; fails with its message."""
    body = {"sql": query, "parameters": list(parameters)}
    answer = await client.post("/telemetry/sql", json=body)
    if answer.is_error:
        raise SystemExit(f"{answer.status_code}: {answer.text}\n{query}")
    found: dict[str, Any] = answer.json()
    return found


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Start `iterscope serve` on a free port and yield its address."""
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0"]
    command += ["--history", str(folder / "history"), *flags]
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
    try:
        yield wait_ready(folder / "server.log", process), process
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def wait_ready(log: Path, process: "subprocess.Popen[str]") -> str:
    """Return the server's address once it serves; fails with its log."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if "listening on " in line:
                url = line.split("listening on ")[1].strip()
                try:
                    if httpx.get(f"{url}/ready").status_code == 200:
                        return url
                except httpx.TransportError:
                    pass
        time.sleep(0.1)
    raise SystemExit(log.read_text())


async def examine(url: str, load: dict[str, Any]) -> dict[str, Any]:
    """Read the record back: the listing, the company each probe had, and the laws."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await settle(client)
        listing = await sql(client, LISTING, load["began_at_ns"])
        company = await sql(client, COMPANY)
        breaches = {
            name: (await sql(client, law.sql, *law.parameters))["rows"]
            for name, law in laws().items()
        }
        used = (
            await sql(
                client,
                "SELECT kv_blocks_used, running, waiting FROM iteration "
                "ORDER BY generation DESC, step DESC LIMIT 1",
            )
        )["rows"][0]
        ends = await sql(client, "SELECT finish, count(*) FROM request_end GROUP BY 1 ORDER BY 1")
    return {
        "listing": listing,
        "company": company,
        "breaches": breaches,
        "last_used_running_waiting": used,
        "ends": ends["rows"],
    }


async def settle(client: httpx.AsyncClient) -> None:
    """Wait until the engine is idle, so that every end is on record."""
    query = "SELECT (SELECT count(*) FROM request_start) - (SELECT count(*) FROM request_end)"
    for _ in range(200):
        if (await sql(client, query))["rows"][0][0] == 0:
            return
        await asyncio.sleep(0.1)
    raise SystemExit("requests are still open after 20 s")


def table(result: dict[str, Any]) -> str:
    """Return rows as aligned text."""
    head = [column["name"] for column in result["columns"]]
    rows = [[_cell(value) for value in row] for row in result["rows"]]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 70 else text[:67] + "..."


def main() -> int:
    """Run everything; 0 when texts agree and no law is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv-blocks", default="330")
    parser.add_argument("--json", type=Path)
    flags, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        settings = ("--kv-blocks", flags.kv_blocks, "--max-num-batched-tokens", "256", *more)
        settings += ("--no-enable-prefix-caching",)
        with server(Path(name), *settings) as (url, _):
            load = asyncio.run(run_load(url))
            found = asyncio.run(examine(url, load))
    same = [alone == loaded for alone, loaded in zip(load["alone"], load["load"], strict=True)]
    print(table(found["listing"]))
    print()
    print(table(found["company"]))
    print(f"\nthe load took {load['seconds']:.1f} s; ends: {found['ends']}")
    print(f"blocks used, running, waiting at the end: {found['last_used_running_waiting']}")
    print(f"same text alone and in the load: {sum(same)} of {len(same)}")
    for law, rows in found["breaches"].items():
        print(f"{'BROKEN' if rows else 'holds '} {law}" + (f": {rows[:3]}" if rows else ""))
    if flags.json:
        flags.json.write_text(json.dumps({"load": load, "found": found}, indent=1))
    broken = any(found["breaches"].values()) or not all(same)
    return int(broken or found["last_used_running_waiting"] != [0, 0, 0])


if __name__ == "__main__":
    sys.exit(main())
