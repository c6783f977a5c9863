"""What a long prompt does to its neighbours on a running server, and what it waits itself.

Sends six short prompts that generate on, then two long ones, one after the other, and two more
short ones between them; then asks the server's own record by SQL. Run it against a server with room
for a whole prompt in a step and against one with a cap (--long-prefill-tokens), each alone on its
machine, without prefix caching: what the cap heals and costs stands in README. Knows only HTTP.
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
from typing import Any

import httpx

from bench.machine import StolenTime, describe

SHORT_TOKENS, LONG_TOKENS = 40, 1600
LONG_AT_S = (1.5, 4.0)
MORE_AT_S = 2.5
TIMEOUT_S = 300.0
IDS = range(300, 40_000)
GAPS = """
WITH mine AS (
  SELECT run_id, request, prompt_tokens FROM request_start WHERE external_id LIKE $1
), token AS (
  SELECT m.run_id, m.request, s.end_at_ns FROM slice s JOIN mine m USING (run_id, request)
  WHERE s.start_position + s.token_count >= m.prompt_tokens AND m.prompt_tokens < 1000
), gap AS (
  SELECT (end_at_ns - lag(end_at_ns) OVER (PARTITION BY request ORDER BY end_at_ns)) / 1e6 AS ms
  FROM token
)
SELECT max(ms), quantile_cont(ms, 0.99), quantile_cont(ms, 0.5) FROM gap WHERE ms IS NOT NULL"""
ENDS = """
SELECT median(CASE WHEN e.prompt_tokens >= 1000
              THEN (e.first_token_at_ns - e.received_at_ns) / 1e6 END),
       sum(e.output_tokens) / ((max(e.released_at_ns) - min(e.received_at_ns)) / 1e9),
       count(*)::BIGINT
FROM request_end e WHERE e.external_id LIKE $1"""
FIGURES = {
    "longest gap between two tokens of a short request, ms": 1,
    "99 % of these gaps are below, ms": 1,
    "half of them are below, ms": 1,
    "first token of a long prompt, median, ms": 0,
    "output tokens a second over the whole run": 0,
    "requests": 0,
}


class Load:
    """One round: its threads, and the name that its requests carry on record."""

    def __init__(self, url: str, name: str, *, outputs: int) -> None:
        self.url, self.name, self.outputs = url, name, outputs
        self.model = httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).json()["data"][0]["id"]
        self.pick = random.Random(5)
        self.threads: list[threading.Thread] = []

    def send(self, prompt_tokens: int, max_tokens: int) -> None:
        """Send one request, on a thread of its own."""
        body = {
            "model": self.model,
            "prompt": [self.pick.choice(IDS) for _ in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        headers = {"x-request-id": f"{self.name}-{len(self.threads)}"}
        address = f"{self.url}/v1/completions"

        def ask() -> None:
            httpx.post(address, json=body, headers=headers, timeout=TIMEOUT_S).raise_for_status()

        self.threads.append(threading.Thread(target=ask))
        self.threads[-1].start()

    def run(self) -> None:
        """Send all of it in time and wait for the last answer."""
        began = time.monotonic()
        for _ in range(6):
            self.send(SHORT_TOKENS, self.outputs)
        late = [(LONG_AT_S[0], 1, LONG_TOKENS, 12), (MORE_AT_S, 2, SHORT_TOKENS, self.outputs // 3)]
        for at_s, count, prompt_tokens, max_tokens in [*late, (LONG_AT_S[1], 1, LONG_TOKENS, 12)]:
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            for _ in range(count):
                self.send(prompt_tokens, max_tokens)
        for thread in self.threads:
            thread.join()


def ask(url: str, query: str, name: str) -> list[float]:
    """Return the one row of a query over the requests of a name."""
    body = {"sql": query, "parameters": [name + "-%"]}
    answer = httpx.post(f"{url}/telemetry/sql", json=body, timeout=TIMEOUT_S).raise_for_status()
    row: list[float] = answer.json()["rows"][0]
    return row


def measure(url: str, *, outputs: int) -> list[float]:
    """Run one round and return its figures in the order of FIGURES."""
    load = Load(url, f"long-prompt-{time.time_ns()}", outputs=outputs)
    load.run()
    time.sleep(1.0)  # the record is flushed within a second
    return ask(url, GAPS, load.name) + ask(url, ENDS, load.name)


def run(arguments: list[str]) -> int:
    """Measure and print the medians; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--outputs", type=int, default=400, help="tokens of a short answer")
    parser.add_argument("--json", help="file to write the figures to")
    given = parser.parse_args(arguments)
    measure(given.url, outputs=40)
    with StolenTime() as stolen:
        rounds = [measure(given.url, outputs=given.outputs) for _ in range(given.rounds)]
    medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
    for (words, digits), value in zip(FIGURES.items(), medians, strict=True):
        print(f"{words:<55} {value:10,.{digits}f}")
    if given.json:
        found: dict[str, Any] = {
            "rounds": rounds,
            "medians": dict(zip(FIGURES, medians, strict=True)),
        }
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found | describe(stolen), file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
