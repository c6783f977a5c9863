"""One server under comparison, in a process of its own: told a phase by a line, it answers by one.

Owns the loop around a driver, which submits jobs and is polled for their tokens, and the score of
texts; bench/peers.py starts one process a peer and has them take turns, bench/peer_quality.py asks
for scores. Standard library alone but for the driver, which is the module named on the command
line: `python -m bench.drive bench.drive_iterscope '{...}'`.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from bench.workload import Job, Life, figures, jobs_of

SCORE = "score"
"""Begins the line that asks for a score: score:FILE."""


class Driver(Protocol):
    """An engine, or a client of a server."""

    def submit(self, number: int, job: Job) -> None:
        """Take a request in."""
        ...

    def poll(self) -> list[tuple[int, int]]:
        """Go on for a moment; return the number and new tokens of each request that gained."""
        ...

    def loss(self, ids: list[int]) -> float:
        """Return minus the log-probability of the tokens after the first, in nats.

        Raises ValueError where the engine does not tell it.
        """
        ...


def run(driver: Driver, jobs: list[Job]) -> list[Life]:
    """Submit each job at its time and stamp its tokens until all have theirs."""
    begin, submitted, live = time.perf_counter() + 0.01, 0, 0
    lives: list[Life] = []
    while submitted < len(jobs) or live:
        now = time.perf_counter()
        while submitted < len(jobs) and begin + jobs[submitted].at_s <= now:
            job = jobs[submitted]
            lives.append(Life(begin + job.at_s, job.answer))
            driver.submit(submitted, job)
            submitted, live = submitted + 1, live + 1
        if not live:
            time.sleep(max(0.0, min(0.005, begin + jobs[submitted].at_s - now)))
            continue
        for number, tokens in driver.poll():
            life = lives[number]
            life.tokens_s += [time.perf_counter()] * tokens
            live -= len(life.tokens_s) >= life.wanted
    return lives


def score(driver: Driver, texts: Path) -> dict[str, Any]:
    """Return the loss of a file's texts, a JSON list of lists of token ids, and of how many."""
    windows: list[list[int]] = json.loads(texts.read_text())
    loss = sum(driver.loss(ids) for ids in windows)
    return {"loss_nats": loss, "tokens": sum(len(ids) - 1 for ids in windows)}


def answer(driver: Driver, phase: str, salt: str) -> dict[str, Any]:
    """Return what a phase's line asks for; raises ValueError."""
    kind, _, rest = phase.partition(":")
    if kind == SCORE:
        return score(driver, Path(rest))
    return dict(figures(phase, run(driver, jobs_of(phase, salt))))


def main() -> int:
    """Answer phases until the input ends."""
    driver: Driver = importlib.import_module(sys.argv[1]).driver(**json.loads(sys.argv[2]))
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries print
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for count, line in enumerate(sys.stdin):
        try:
            found = answer(driver, line.strip(), f"{count}-{time.time()}")
        except ValueError as error:
            found = {"error": str(error)}
        print(json.dumps(found), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
