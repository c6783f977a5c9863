"""The lab's statistics on the real engine: a mode against itself, and a planted tenth.

GIVEN three servers of one build, two alike and one whose steps take a tenth longer, WHEN bursts of
the same requests meet them by turns, THEN of 20 comparisons at most 3 tell the two alike apart, and
at least 18 find the slow one. The real model computes every step, which then waits for a beat: on
two cores that others share its speed changes by more than a tenth from one second to the next, and
the question is what the lab tells, not what the machine does. Runs in `make soak`; needs the
machine for itself for six minutes.
"""

import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

from bench.lab.prompts import ids
from bench.lab.serving import Served, serving
from bench.lab.statistics import Compared, compare, verdict
from bench.lab.workload import Ask, Workload, write

COMPARISONS, PAIRS = 20, 8
TOGETHER, PROMPT, ANSWER, SPAN = 6, 16, 18, 10
TURN_S, LEAD_S = 0.5, 2.0
BEAT = ("-m", "tests.slowed_server", "--beat-ms", "15", "--slower")
FLAGS = (
    *("--model", "demo", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"),
    *("--kv-blocks", "600", "--no-enable-prefix-caching"),
)
PROGRAMS = {"one": (*BEAT, "0"), "same": (*BEAT, "0"), "slow": (*BEAT, "0.1")}


@dataclass(frozen=True)
class Seen:
    """One comparison each of two that are alike, and of one that is slow."""

    alike: Compared
    slow: Compared

    def __str__(self) -> str:
        told = [
            f"{name} {one.value:.3f} ({one.low:.3f} to {one.high:.3f}), p {one.p:.4f}"
            for name, one in (("alike", self.alike), ("slow", self.slow))
        ]
        return "; ".join(told)


def workloads(seed: int) -> dict[str, Workload]:
    """Return what each server gets: a burst a pair, the servers in an order that is drawn."""
    order, asks = random.Random(f"order-{seed}"), defaultdict[str, list[Ask]](list)
    for pair in range(PAIRS):
        for turn, name in enumerate(order.sample(sorted(PROGRAMS), len(PROGRAMS))):
            at_s = (pair * len(PROGRAMS) + turn) * TURN_S
            asks[name] += [
                Ask(prompt=ids(PROMPT, f"{seed}-{pair}-{row}"), max_tokens=ANSWER, at_s=at_s)
                for row in range(TOGETHER)
            ]
    return {
        name: Workload(
            name="by turns",
            source="test",
            licence="none",
            arrivals="bursts",
            seed=seed,
            seconds=PAIRS * len(PROGRAMS) * TURN_S,
            asks=some,
        )
        for name, some in asks.items()
    }


def measured(servers: dict[str, Served], seed: int, folder: Path) -> dict[str, list[float | None]]:
    """Return, for each server, the lower quartile of its bursts' times of a few tokens, ms.

    Low percentiles reproduce on a shared machine where means do not: a neighbour's moment of load
    makes steps longer, none makes them shorter. Tokens that were written together have no gap.
    """
    zero_ns, running = time.monotonic_ns() + int(LEAD_S * 1e9), {}
    for name, workload in workloads(seed).items():
        write(workload, folder / f"{name}.json.gz")
        command = [sys.executable, "-m", "bench.lab.generator", str(folder / f"{name}.json.gz")]
        command += ["--url", servers[name].url, "--name", f"{seed}", "--zero-ns", str(zero_ns)]
        running[name] = subprocess.Popen([*command, "--out", str(folder / f"{name}.json")])
    found = {}
    for name, generator in running.items():
        assert generator.wait(120) == 0
        servers[name].wait_idle()
        found[name] = quartiles(json.loads((folder / f"{name}.json").read_bytes()))
    return found


def quartiles(load: dict[str, Any]) -> list[float | None]:
    assert {ask["outcome"] for ask in load["asks"]} == {"finished"}
    spans_ms = defaultdict[int, list[float]](list)
    for ask in load["asks"]:
        tokens_ns = ask["tokens_ns"]
        spans_ms[ask["number"] // TOGETHER] += [
            (after - before) / 1e6
            for before, after in zip(tokens_ns, tokens_ns[SPAN:], strict=False)
        ]
    return [quantiles(spans_ms[pair], n=4)[0] for pair in range(PAIRS)]


def compared(folder: Path, comparisons: int) -> Iterator[Seen]:
    """Yield comparisons."""
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(folder / name, FLAGS, program))
            for name, program in PROGRAMS.items()
        }
        for number in range(1 + comparisons):
            found = measured(servers, number, folder)
            if number:  # the first warms them
                yield Seen(
                    compare(found["same"], found["one"]), compare(found["slow"], found["one"])
                )


@pytest.mark.soak
def test_a_mode_against_itself_and_a_planted_tenth(tmp_path: Path) -> None:
    seen = []
    for one in compared(tmp_path, COMPARISONS):
        print(one, flush=True)
        seen.append(one)
    apart = sum(one.alike.significant for one in seen)
    found = sum(one.slow.significant and verdict(one.slow, "less") == "worse" for one in seen)
    print(f"alike told apart {apart} of {COMPARISONS}, slow found {found} of {COMPARISONS}")
    assert apart <= 3
    assert found >= 18
