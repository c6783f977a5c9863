"""The lab's statistics on the real engine: a mode against itself, and a planted tenth.

GIVEN three servers of one build, two alike and one whose steps take a tenth longer, WHEN short runs
of the same requests are interleaved in random order, THEN of 20 comparisons at most 3 tell the two
alike apart, and at least 18 find the slow one. Runs in `make soak`; needs the machine for itself
for a quarter of an hour.
"""

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.lab.figures import client_figures
from bench.lab.make import Recipe, make
from bench.lab.measure import Send, sent
from bench.lab.serving import PROGRAM, Served, serving
from bench.lab.statistics import compare, verdict
from bench.lab.workload import Slo

COMPARISONS, PAIRS = 20, 5
SECONDS, IN_FLIGHT = 2.0, 6
SLOWER = ("-m", "tests.slowed_server", "--slower", "0.1")
FLAGS = (
    *("--model", "demo", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"),
    *("--kv-blocks", "600", "--no-enable-prefix-caching"),
)
PROGRAMS = {"one": PROGRAM, "same": PROGRAM, "slow": SLOWER}


def tokens_s(served: Served, seed: int, name: str, folder: Path) -> float:
    """Return output tokens a second of a short closed loop."""
    workload = make(
        Recipe(context_tokens=128),
        rate=100,
        seconds=SECONDS,
        seed=seed,
        concurrency=IN_FLIGHT,
    )
    slo = Slo(1000.0, 100.0)
    load = sent(served.url, workload, Send(name=name, cut_off_s=0.0, slo=slo, scratch=folder))
    served.wait_idle()
    found = client_figures(load, ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms)["output_tok_s"]
    assert found
    return found


@pytest.mark.soak
def test_a_mode_against_itself_and_a_planted_tenth(tmp_path: Path) -> None:
    order = random.Random(20_261_130)
    apart = found = 0
    seen: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(tmp_path / name, FLAGS, program))
            for name, program in PROGRAMS.items()
        }
        for name, served in servers.items():
            tokens_s(served, 0, f"warm-{name}", tmp_path)
        for number in range(COMPARISONS):
            values: dict[str, list[float | None]] = {name: [] for name in servers}
            for pair in range(PAIRS):
                seed = 1 + number * PAIRS + pair
                for name in order.sample(sorted(servers), len(servers)):
                    tokens = tokens_s(servers[name], seed, f"{number}-{pair}-{name}", tmp_path)
                    values[name].append(tokens)
            alike = compare(values["same"], values["one"])
            slow = compare(values["slow"], values["one"])
            apart += alike.significant
            found += slow.significant and verdict(slow, "more") == "worse"
            seen.append({"alike": alike, "slow": slow})
            print(f"{number}: alike {alike.value:.3f} p {alike.p:.3f}; slow {slow.value:.3f} "
                  f"({slow.low:.3f} to {slow.high:.3f}) p {slow.p:.4f}", flush=True)  # fmt: skip
    print(f"alike told apart {apart} of {COMPARISONS}, slow found {found} of {COMPARISONS}")
    assert apart <= 3, seen
    assert found >= 18, seen
