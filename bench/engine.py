"""How fast the engine is by itself, in process: one stream, batches, a prompt, a mix of requests.

The real core, scheduler and runner on the demo model, without server or HTTP: what remains of a
token after that is the server's. The mix is 64 requests, prompts of 16 to 512 tokens and answers of
8 to 256, lengths log-uniform, ids random, greedy, no prefix cache: the workload that other engines
are measured with. Prints tokens a second, medians of --rounds; --json FILE writes them.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.counterfactual import Recorder
from bench.floor import decode_s, measure, prefill_s
from bench.machine import StolenTime, describe
from bench.workload import DEMO_MODEL, FIRST_ID, LAST_ID, mix_lengths
from engine.build import build
from engine.config import EngineConfig
from engine.core import Core, Emit
from engine.device import keep_to
from engine.messages import SamplingParams, Submit
from engine.spec import read_spec

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
CONTEXT = 256
PROMPT = 512
ANSWER = 64


class MonotonicClock:
    """Nanoseconds of CLOCK_MONOTONIC."""

    def now_ns(self) -> int:
        """Return the present instant."""
        return time.monotonic_ns()


class Bench:
    """A warm engine, and the numbers of the requests that it was given."""

    def __init__(
        self, dtype: str, backend: str, threads: int | None, emit: Emit | None = None
    ) -> None:
        dtype, _, kv_dtype = dtype.partition(":")
        config = EngineConfig(
            model=str(DEMO_MODEL),
            dtype=dtype,
            kv_cache_dtype=kv_dtype or "auto",
            attention_backend=backend,
            engine_threads=threads,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
        )
        self.recorder = Recorder()
        self.core, self.run = build(
            config,
            emit=emit or self.recorder,
            clock=MonotonicClock(),
            progress=lambda *_: None,
        )
        self._number = 0
        self._random = random.Random(7)

    def add(self, prompt: int, answer: int) -> None:
        """Submit a request of so many random tokens."""
        self._number += 1
        ids = [self._random.randrange(FIRST_ID, LAST_ID) for _ in range(prompt)]
        self.core.add(
            Submit(
                request=self._number,
                request_id=str(self._number),
                prompt=ids,
                max_tokens=answer,
                sampling=GREEDY,
                received_at_ns=time.monotonic_ns(),
            )
        )

    def decoding(self, rows: int) -> float:
        """Return tokens a second of so many streams, while all of them decode."""
        for _ in range(rows):
            self.add(CONTEXT, ANSWER)
        return self._rate(lambda step: step.decode_tokens == rows, lambda step: step.decode_tokens)

    def prefill(self, tokens: int) -> float:
        """Return prompt tokens a second of one prompt that a step holds."""
        self.add(tokens, 1)
        return self._rate(lambda step: step.prefill_tokens > 0, lambda step: step.prefill_tokens)

    def mix(self) -> float:
        """Return answers' tokens a second of the whole mix, from the first step to the last."""
        answers = 0
        for prompt, answer in mix_lengths():
            self.add(prompt, answer)
            answers += answer
        began = time.perf_counter()
        self._drain(self.core)
        return answers / (time.perf_counter() - began)

    def _rate(self, counts: Callable[[Any], bool], tokens: Callable[[Any], int]) -> float:
        """Drain; return the tokens over the time of those steps that count."""
        self.recorder.clear()
        self._drain(self.core)
        steps = [step for step in self.recorder.iterations if counts(step)]
        spent_ns = sum(step.end_at_ns - step.begin_at_ns for step in steps)
        return sum(tokens(step) for step in steps) / (spent_ns / 1e9)

    @staticmethod
    def _drain(core: Core) -> None:
        core.wake()
        while core.has_work:
            core.step()


def floor_ratios(dtype: str, medians: dict[str, float]) -> dict[str, float]:
    """Return what share of the machine's floor each figure comes to; 1 is the floor itself."""
    spec, machine = read_spec(str(DEMO_MODEL)), measure(dtype)
    floors = {
        f"{name}_tok_s": rows / decode_s(spec, dtype, machine, rows=rows, context=CONTEXT)
        for name, rows in (("single", 1), ("batch8", 8), ("batch32", 32), ("batch64", 64))
    }
    floors["prefill_tok_s"] = PROMPT / prefill_s(spec, machine, PROMPT)
    return {
        name.replace("_tok_s", "_floor_ratio"): medians[name] / floor
        for name, floor in floors.items()
    }


def main() -> int:
    """Measure, round after round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="int8:bf16: keys and values in bf16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cpu", help="avx512, avx2, portable: C++ as for such a CPU")
    flags = parser.parse_args()
    if flags.cpu:
        keep_to(flags.cpu)
    bench = Bench(flags.dtype, flags.backend, flags.threads)
    measures: dict[str, Callable[[], float]] = {
        "single_tok_s": lambda: bench.decoding(1),
        "batch8_tok_s": lambda: bench.decoding(8),
        "batch32_tok_s": lambda: bench.decoding(32),
        "batch64_tok_s": lambda: bench.decoding(64),
        "prefill_tok_s": lambda: bench.prefill(PROMPT),
        "offline_tok_s": bench.mix,
    }
    found: dict[str, list[float]] = {name: [] for name in measures}
    with StolenTime() as stolen:
        for _ in range(flags.rounds):
            for name, measure in measures.items():
                found[name].append(measure())
    told = {"dtype": bench.run.dtype, "backend": bench.run.backend}
    print(f"{told['dtype']} on {told['backend']}, medians of {flags.rounds}")
    for name, rates in found.items():
        print(f"{name:16}{statistics.median(rates):9.0f}   {min(rates):.0f} to {max(rates):.0f}")
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    ratios = floor_ratios(bench.run.dtype, medians)
    for name, ratio in ratios.items():
        print(f"{name:28}{ratio:6.2f}")
    if flags.json:
        report = told | medians | ratios | {"rounds": found} | describe(stolen)
        flags.json.write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
