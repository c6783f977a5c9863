"""A real `iterscope serve` whose engine computes nothing: a fake runner that parrots, on a beat.

Owns the fake (the Runner seam) and the program; bench/streams.py and tests start it as a process,
`python -m tests.paced_server --step-ms 100 serve ...`. Every answer is its prompt's tokens, again
and again, so a test chooses what is generated. A step ends on a whole multiple of the beat on
CLOCK_MONOTONIC, so that a client that reads the same clock knows when each token was made.
"""

import argparse
import functools
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict

import msgspec

import server.engine_process
from engine.config import DeviceFacts, EngineConfig, resolve
from engine.core import Core, Emit
from engine.kv import KVPool
from engine.plan import Clock, Plan, StepOutput
from engine.policies import POLICIES
from engine.process import EngineStart, engine_process
from engine.scheduler import Scheduler
from engine.spec import read_spec
from engine.step_model import StepTimes
from server.cli import main
from telemetry.records import SCHEMA_VERSION, Run


class PacedStep:
    """A step that is done at the next beat; a beat of 0 is at once."""

    def __init__(self, tokens: list[int], step_ns: int) -> None:
        self._tokens = tokens
        self._step_ns = step_ns

    def wait(self) -> StepOutput:
        if self._step_ns:
            time.sleep((self._step_ns - time.monotonic_ns() % self._step_ns) / 1e9)
        return StepOutput(tokens=self._tokens, device_ns=self._step_ns)


class PacedRunner:
    """Samples for each row the next token of its own prompt, the first after the last."""

    def __init__(self, step_ns: int, beat: Callable[[], None]) -> None:
        self._step_ns = step_ns
        self._beat = beat

    def run(self, plan: Plan) -> PacedStep:
        self._beat()  # as a model does at each layer: an engine without a pulse is ended as hung
        tokens = []
        for row, request in enumerate(plan.rows):
            if plan.samples[row]:
                prompt = request.submit.prompt
                tokens.append(prompt[plan.output_indices[row] % len(prompt)])
        return PacedStep(tokens, self._step_ns)

    def forget(self, request: int) -> None:
        pass


def build(
    step_ns: int,
    config: EngineConfig,
    *,
    emit: Emit,
    clock: Clock,
    progress: Callable[[str, float], None],
    beat: Callable[[], None] = lambda: None,
) -> tuple[Core, Run]:
    """Stand in for engine.build.build: the real scheduler and core over the fake runner."""
    spec = read_spec(config.model)
    config = resolve(config, spec, DeviceFacts(device="cpu", auto_dtype="f32", threads=1))
    assert config.kv_blocks is not None
    assert config.max_model_len is not None
    times = StepTimes()
    scheduler = Scheduler(
        config=config,
        pool=KVPool(blocks=config.kv_blocks, block_tokens=config.block_size),
        policy=POLICIES[config.scheduling_policy](config, times),
        eos_ids=spec.eos_ids,
    )
    core = Core(
        scheduler=scheduler, runner=PacedRunner(step_ns, beat), clock=clock, emit=emit, times=times
    )
    return core, Run(
        replica="",
        schema_version=SCHEMA_VERSION,
        started_unix_us=0,
        model=config.model,
        parameters=spec.parameters,
        dtype=config.dtype,
        device=config.device,
        backend="paced",
        backend_refusals="{}",
        policy=config.scheduling_policy,
        batching=config.batching,
        kv_blocks_total=config.kv_blocks,
        block_tokens=config.block_size,
        batch_tokens_max=config.max_num_batched_tokens,
        seqs_max=config.max_num_seqs,
        model_len_max=config.max_model_len,
        buckets=[],
        config=msgspec.json.encode(asdict(config)).decode(),
        revision="",
    )


def paced_process(step_ns: int, start: EngineStart) -> None:
    """Be the engine process, with the fake where the module that loads torch would be."""
    stand_in = types.ModuleType("engine.build")
    stand_in.build = functools.partial(build, step_ns)  # type: ignore[attr-defined]
    sys.modules["engine.build"] = stand_in
    engine_process(start)


def run() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=int, default=100)
    flags, rest = parser.parse_known_args()
    process = functools.partial(paced_process, flags.step_ms * 1_000_000)
    server.engine_process.engine_process = process  # type: ignore[assignment]
    return main(rest)


if __name__ == "__main__":
    sys.exit(run())
