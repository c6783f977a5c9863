"""The lab's statistics on the real engine: a mode against itself, and a planted tenth.

GIVEN three servers of one build, two alike and one whose steps take a tenth longer, WHEN short runs
of the same requests are interleaved in random order, THEN of 20 comparisons at most 3 tell the two
alike apart, and at least 18 find the slow one. Runs in `make soak`; needs the machine for itself
for ten minutes.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import pytest

from bench.lab.measure import Send, sent
from bench.lab.prompts import ids
from bench.lab.serving import PROGRAM, Served, serving
from bench.lab.statistics import Compared, compare, verdict
from bench.lab.workload import Ask, Slo, Workload

COMPARISONS, PAIRS = 20, 5
TOGETHER, PROMPT, ANSWER, SPAN = 6, 16, 150, 10
SLOWER = ("-m", "tests.slowed_server", "--slower", "0.1")
FLAGS = (
    *("--model", "demo", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"),
    *("--kv-blocks", "600", "--no-enable-prefix-caching"),
)
PROGRAMS = {"one": PROGRAM, "same": PROGRAM, "slow": SLOWER}


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


def measured(served: Served, seed: int, name: str, folder: Path) -> float:
    """Return the lower quartile of the time of a few tokens of requests side by side, ms.

    Low percentiles reproduce on a shared machine where means do not: a neighbour's moment of load
    makes steps longer, none makes them shorter. Tokens that were written together have no gap.
    """
    asks = [
        Ask(prompt=ids(PROMPT, f"{seed}-{row}"), max_tokens=ANSWER, at_s=0.0)
        for row in range(TOGETHER)
    ]
    told = {"name": "side by side", "source": "test", "licence": "none", "arrivals": "at once"}
    workload = Workload(**told, seed=seed, seconds=0.1, asks=asks)
    slo = Slo(1000.0, 100.0)
    load = sent(served.url, workload, Send(name=name, cut_off_s=60.0, slo=slo, scratch=folder))
    served.wait_idle()
    assert {ask["outcome"] for ask in load["asks"]} == {"finished"}
    spans_ms = [
        (after - before) / 1e6
        for ask in load["asks"]
        for before, after in zip(ask["tokens_ns"], ask["tokens_ns"][SPAN:], strict=False)
    ]
    return quantiles(spans_ms, n=4)[0]


def compared(folder: Path, numbers: range) -> Iterator[Seen]:
    """Yield comparisons of interleaved runs; the order of each pair is drawn."""
    order = random.Random(f"order-{numbers}")
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(folder / name, FLAGS, program))
            for name, program in PROGRAMS.items()
        }
        for name, served in servers.items():
            measured(served, 0, f"warm-{name}", folder)
        for number in numbers:
            values: dict[str, list[float | None]] = {name: [] for name in servers}
            for pair in range(PAIRS):
                seed = 1 + number * PAIRS + pair
                for name in order.sample(sorted(servers), len(servers)):
                    told = f"{number}-{pair}-{name}"
                    values[name].append(measured(servers[name], seed, told, folder))
            yield Seen(
                compare(values["same"], values["one"]), compare(values["slow"], values["one"])
            )


@pytest.mark.soak
def test_a_mode_against_itself_and_a_planted_tenth(tmp_path: Path) -> None:
    seen = []
    for one in compared(tmp_path, range(COMPARISONS)):
        print(one, flush=True)
        seen.append(one)
    apart = sum(one.alike.significant for one in seen)
    found = sum(one.slow.significant and verdict(one.slow, "less") == "worse" for one in seen)
    print(f"alike told apart {apart} of {COMPARISONS}, slow found {found} of {COMPARISONS}")
    assert apart <= 3
    assert found >= 18
