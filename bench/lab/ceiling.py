"""How much the load generator can send before it is itself the limit.

Owns the climb over multiples of an experiment's top rate against a server that computes nothing;
experiment.py calls it once an experiment, so that every result says how far its generator was from
its own end. Must run alone, as every measurement here.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.lab.make import Recipe, make
from bench.lab.measure import Send, sent
from bench.lab.workload import Slo

MULTIPLES = (5, 10, 20)
SECONDS, CUT_OFF_S = 1.5, 1.0


@contextmanager
def null_server() -> Iterator[str]:
    """Start the server that computes nothing; yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.lab.null_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()  # its end is the server's
        process.stdout.close()
        process.wait(10)


def ceiling(
    recipe: Recipe, top_rate: float, scratch: Path, multiples: Sequence[int] = MULTIPLES
) -> dict[str, Any]:
    """Return the highest rate sent in time, as requests and tokens a second, None if none was.

    `climbed_all` says that the highest multiple was held too: the ceiling lies above.
    """
    found: dict[str, Any] = {"requests_s": None, "tok_s": None, "seconds": SECONDS}
    steps = []
    send = Send(name="ceiling", cut_off_s=CUT_OFF_S, slo=Slo(1000.0, 100.0), scratch=scratch)
    with null_server() as url:
        for multiple in multiples:
            workload = make(recipe, rate=multiple * top_rate, seconds=SECONDS, seed=multiple)
            load = sent(url, workload, send)
            tokens = sum(len(ask["tokens_ns"]) for ask in load["asks"])
            told = load["generator"]
            steps.append({"requests_s": workload.rate} | told)
            whole = all(len(ask["tokens_ns"]) == ask["wanted"] for ask in load["asks"])
            if told["bottleneck"] or not whole:
                break
            found |= {"requests_s": workload.rate, "tok_s": tokens / SECONDS}
    top = steps[-1]["requests_s"]
    return found | {"steps": steps, "climbed_all": found["requests_s"] == top, "of": top_rate}
