"""Is the blame right? The same request with and without a long neighbour, predicted and measured.

For each seed a request runs beside two others, once more with a neighbour whose long prompt arrives
in its middle, and once again without. What explaining blames that neighbour for must be the time
that is gone without it. Time is this process's CPU time on one thread, clock and device alike: the
one clock that other programs on a shared machine leave nearly alone. The step model is fitted
before, on other traffic, and frozen. `--json FILE` writes what was printed.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time_ns
from typing import Any

from bench.machine import StolenTime, describe
from bench.workload import DEMO_MODEL
from engine.config import EngineConfig, resolve
from engine.core import Core
from engine.device import device_facts
from engine.kv import KVPool
from engine.messages import Abort, Gains, SamplingParams, Submit
from engine.plan import PendingStep, Plan, Runner, StepOutput
from engine.policies import POLICIES
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.spec import read_spec
from engine.step_model import StepTimes
from telemetry.explain_tiles import model_of, tile_of
from telemetry.explain_walk import Walk, walk
from telemetry.records import Fault, Iteration, RequestEnd, RequestStart, StepModel

NEIGHBOUR_TOKENS = 4000
SEEDS = 10
VICTIM, NEIGHBOUR = 1, 2
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class CpuClock:
    """CPU nanoseconds of this process."""

    def now_ns(self) -> int:
        """Return the present instant."""
        return process_time_ns()


class CpuTimedRunner:
    """A runner whose device time is CPU time: on a CPU a step's work is done by `wait`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, plan: Plan) -> PendingStep:
        """Launch a step."""
        return CpuTimedStep(self._runner.run(plan))

    def forget(self, request: int) -> None:
        """Drop whatever is kept for a sequence that ended."""
        self._runner.forget(request)


@dataclass(frozen=True)
class CpuTimedStep:
    """A launched step."""

    pending: PendingStep

    def wait(self) -> StepOutput:
        """Return the step's output and the CPU time it took."""
        began = process_time_ns()
        output = self.pending.wait()
        return dataclasses.replace(output, device_ns=process_time_ns() - began)


@dataclass
class Recorder:
    """Keeps what the core emits of one run."""

    lost: int = 0
    starts: dict[int, RequestStart] = field(default_factory=dict)
    iterations: list[Iteration] = field(default_factory=list)
    ends: dict[int, RequestEnd] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget the run before."""
        self.starts, self.iterations, self.ends, self.tokens = {}, [], {}, {}

    def start(self, record: RequestStart) -> None:
        """Take note of an arrival."""
        self.starts[record.request] = record

    def step(self, gains: Gains, iteration: Iteration, ends: list[RequestEnd]) -> None:
        """Take a step's news."""
        for delta in gains.each():
            self.tokens[delta.request] = self.tokens.get(delta.request, 0) + len(delta.tokens)
        self.iterations.append(iteration)
        self.ends.update({end.request: end for end in ends})

    def step_model(self, record: StepModel) -> None:
        """Ignore a fit: the one in force is frozen before the runs."""

    def fault(self, record: Fault) -> None:
        """Stop: a measurement with a fault is none."""
        raise SystemExit(record.traceback)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A warm engine on one thread, and what it tells."""

    core: Core
    times: StepTimes
    recorder: Recorder
    vocab_size: int
    long: int

    def add(self, request: int, pick: random.Random, prompt: int, output: int) -> None:
        """Submit a request with a random prompt."""
        ids = [pick.randrange(self.vocab_size // 2, self.vocab_size) for _ in range(prompt)]
        self.core.add(
            Submit(
                request=request,
                request_id=f"request-{request}",
                prompt=ids,
                max_tokens=output,
                sampling=GREEDY,
                received_at_ns=process_time_ns(),
            )
        )

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.core.has_work:
            self.core.step()
        self.core.wake()


def load(model: Path, long: int, budget: int) -> Engine:
    """Return a warm engine; `long` is the neighbour's prompt, `budget` the tokens of a step."""
    spec = read_spec(str(model))
    asked = EngineConfig(
        model=str(model),
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        max_model_len=min(spec.model_len, 2 * long),
        kv_blocks=long // 8 + 200,
        engine_threads=1,
        enable_prefix_caching=False,
    )
    config = resolve(asked, spec, device_facts(asked, spec))
    runner = ModelRunner.build(config, spec, lambda *_: None)
    runner.warm_up(lambda *_: None)
    assert config.kv_blocks is not None
    times, recorder = StepTimes(), Recorder()
    scheduler = Scheduler(
        config=config,
        pool=KVPool(blocks=config.kv_blocks, block_tokens=config.block_size),
        policy=POLICIES[config.scheduling_policy](config, times),
        eos_ids=spec.eos_ids,
    )
    core = Core(
        scheduler=scheduler,
        runner=CpuTimedRunner(runner),
        clock=CpuClock(),
        emit=recorder,
        times=times,
    )
    return Engine(core=core, times=times, recorder=recorder, vocab_size=spec.vocab_size, long=long)


def train(engine: Engine) -> StepModel:
    """Let the step model see traffic of many shapes; return the fit."""
    pick = random.Random(0)
    request = 1000
    while engine.times.fitted is None or engine.core.steps < 400:
        for _ in range(pick.choice((1, 1, 2, 3))):
            request += 1
            prompt = pick.choice((16, 60, 200, engine.long // 4, engine.long // 2))
            engine.add(request, pick, prompt, pick.randrange(8, 40))
        engine.drain()
    return engine.times.fitted


def life(engine: Engine, seed: int, *, neighbour: bool) -> RequestEnd:
    """Run one request beside two others; the neighbour comes once it has had eight tokens."""
    pick = random.Random(seed)
    engine.recorder.clear()
    engine.core.wake()
    for number, prompt in ((101, 50), (102, 90)):
        engine.add(number, pick, prompt + pick.randrange(40), 96)
    while engine.recorder.tokens.get(102, 0) < 2:
        engine.core.step()
    engine.add(VICTIM, pick, 40 + pick.randrange(80), 48)
    while engine.recorder.tokens.get(VICTIM, 0) < 8:
        engine.core.step()
    if neighbour:
        engine.add(NEIGHBOUR, pick, engine.long, 16)
    while VICTIM not in engine.recorder.ends:
        engine.core.step()
    end = engine.recorder.ends[VICTIM]
    for number in engine.recorder.starts:
        engine.core.abort(Abort(request=number, finish="cancelled"))
    engine.drain()
    return end


def explained(engine: Engine, fit: StepModel) -> Walk:
    """Divide the life of the last run by the frozen fit."""
    recorder = engine.recorder
    tiles = [(tile_of(record), model_of(fit)) for record in recorder.iterations]
    prompts = {one.request: one.prompt_tokens for one in recorder.starts.values()}
    start, end = recorder.starts[VICTIM], recorder.ends[VICTIM]
    prior_step = recorder.iterations[0].step - 1
    return walk(start, end, None, tiles, prompts=prompts, prior_step=prior_step)


def length_ns(end: RequestEnd) -> int:
    """Return how long a life was, in the engine."""
    return end.decided_at_ns - end.arrived_at_ns


def compare(engine: Engine, fit: StepModel, seed: int) -> dict[str, float]:
    """Return what the neighbour is blamed for, and what is gone without it, in CPU ms."""
    before = length_ns(life(engine, seed, neighbour=False))
    disturbed = length_ns(life(engine, seed, neighbour=True))
    named = explained(engine, fit).named
    after = length_ns(life(engine, seed, neighbour=False))
    blamed = sum(
        named[cause][NEIGHBOUR].ns
        for cause in ("neighbour_prefill", "neighbour_decode")
        if NEIGHBOUR in named.get(cause, {})
    )
    measured = disturbed - (before + after) / 2
    return {
        "seed": seed,
        "alone_ms": (before + after) / 2e6,
        "measured_ms": measured / 1e6,
        "predicted_ms": blamed / 1e6,
        "error": blamed / measured - 1,
    }


def measure(engine: Engine, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the comparison for each seed, the median error and the worst."""
    fit = train(engine)
    rows = [compare(engine, fit, seed) for seed in seeds]
    errors = [abs(row["error"]) for row in rows]
    return {
        "neighbour_tokens": engine.long,
        "model_error": fit.error,
        "rows": rows,
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
    }


def main() -> int:
    """Measure and print; 1 when the median is off by more than 15 %."""
    parser = argparse.ArgumentParser(description="Compare predicted and measured stalls.")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--tokens", type=int, default=NEIGHBOUR_TOKENS)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with StolenTime() as stolen:
        found = measure(load(args.model, args.tokens, args.budget), range(1, args.seeds + 1))
    print(f"a neighbour of {found['neighbour_tokens']} tokens, CPU time on one thread")
    print(f"step model's mean error on its own traffic: {100 * found['model_error']:.1f} %")
    print(f"{'seed':>5}{'alone ms':>12}{'measured ms':>13}{'predicted ms':>14}{'error %':>9}")
    for row in found["rows"]:
        print(
            f"{row['seed']:>5}{row['alone_ms']:>12.0f}{row['measured_ms']:>13.0f}"
            f"{row['predicted_ms']:>14.0f}{100 * row['error']:>9.1f}"
        )
    print(
        f"median {100 * found['median_error']:.1f} %, worst {100 * found['worst_error']:.1f} % "
        f"({100 * stolen.share:.0f} % of the CPU was stolen by the host)"
    )
    if args.json:
        args.json.write_text(json.dumps(found | describe(stolen), indent=1), encoding="utf-8")
    return int(found["median_error"] > 0.15)


if __name__ == "__main__":
    sys.exit(main())
