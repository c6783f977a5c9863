"""Whole engines on the device: ahead and not, with graphs and without, with the record and without.

Owns the runs of the real core over random weights, and what must be the same among them; the size
of a measured cache; and what memory that runs out in a step costs. A last part of the device check.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import zmq

from bench.counterfactual import Recorder
from bench.device.shapes import QWEN3_06B, TINY, runner_of, settled
from bench.device.table import Bench, Row
from bench.engine import GREEDY, MonotonicClock
from engine.config import EngineConfig, kv_bytes_per_token
from engine.core import Core, Emit
from engine.kv import KVPool
from engine.loop import Outbox
from engine.memory import device_memory, measure
from engine.messages import Gains, Submit
from engine.policies import POLICIES
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.spec import ModelSpec
from engine.step_model import StepTimes
from telemetry.records import Fault, Iteration, RequestEnd

CROWDED_BYTES = 64 * 2**20
"""What is left free while memory is taken away."""

OVERHEAD_MAX = 0.02
"""What the record may cost of throughput."""


class Kept(Recorder):
    """Keeps tokens too, and takes faults as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, list[int]] = {}
        self.faults: list[Fault] = []

    def step(self, gains: Gains, iteration: Iteration, ends: list[RequestEnd]) -> None:
        """Take a step's news."""
        super().step(gains, iteration, ends)
        for delta in gains.each():
            self.texts.setdefault(delta.request, []).extend(delta.tokens)

    def fault(self, record: Fault) -> None:
        """Keep it."""
        self.faults.append(record)


def _spec(bench: Bench) -> ModelSpec:
    return TINY if bench.tiny else QWEN3_06B


def _settings(bench: Bench) -> dict[str, object]:
    if bench.tiny:
        return {"max_num_seqs": 8, "max_num_batched_tokens": 48, "kv_blocks": 128}
    return {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_blocks": 16384}


def core_of(config: EngineConfig, runner: ModelRunner, emit: Emit) -> Core:
    """Return the real core over a runner."""
    assert config.kv_blocks is not None
    assert config.loop_depth is not None
    times = StepTimes()
    scheduler = Scheduler(
        config=config,
        pool=KVPool(blocks=config.kv_blocks, block_tokens=config.block_size),
        policy=POLICIES[config.scheduling_policy](config, times),
        eos_ids=(),
    )
    return Core(
        scheduler=scheduler,
        runner=runner,
        clock=MonotonicClock(),
        emit=emit,
        times=times,
        depth=config.loop_depth,
    )


def _play(core: Core, bench: Bench) -> float:
    """Run the same requests to their ends; return the seconds it took."""
    count, longest, answer = (6, 40, 8) if bench.tiny else (64, 1024, 128)
    for number in range(1, count + 1):
        length = 1 + (number * 7919) % longest
        core.add(
            Submit(
                request=number,
                request_id=str(number),
                prompt=[3 + (number * 31 + at * 7) % 500 for at in range(length)],
                max_tokens=1 + answer * (1 + number % 4) // 4,
                sampling=GREEDY,
                received_at_ns=time.monotonic_ns(),
            )
        )
    core.wake()
    began = time.perf_counter()
    while core.has_work:
        core.step()
    return time.perf_counter() - began


def whole(bench: Bench) -> list[Row]:
    """Run one engine with two steps in flight and graphs, and one with neither."""
    spec, settings = _spec(bench), _settings(bench)
    rows, texts = [], []
    for depth, graphs in ((1, "off"), (2, "on")):
        config = settled(bench, spec, loop_depth=depth, graphs=graphs, **settings)
        row, answers = _one(bench, spec, config)
        rows.append(row)
        texts.append(answers)
    same = sum(texts[0][number] == texts[1][number] for number in texts[0])
    exact = bench.device == "cpu"
    wrong = exact and same < len(texts[0])
    rows.append(
        Row(
            part="engine",
            case="the same answers",
            figure=f"{same} of {len(texts[0])}",
            aim="all, in f32" if exact else "",
            verdict="bad" if wrong else "ok" if exact else "told",
        )
    )
    return rows


def _one(bench: Bench, spec: ModelSpec, config: EngineConfig) -> tuple[Row, dict[int, list[int]]]:
    """Run the requests twice through one engine; tell of the second time."""
    runner = runner_of(bench, spec, config)
    runner.warm_up(lambda *_: None)
    why = runner.capture(lambda *_: None)
    _play(core_of(config, runner, Kept()), bench)
    kept = Kept()
    seconds = _play(core_of(config, runner, kept), bench)
    assert config.loop_depth is not None
    return _engine_row(kept.iterations, seconds, config.loop_depth, why), kept.texts


def _engine_row(
    iterations: list[Iteration], seconds: float, depth: int, without_graphs: str | None
) -> Row:
    tokens = sum(step.decode_tokens + step.prefill_tokens for step in iterations)
    device_s = sum(step.device_ns for step in iterations) / 1e9
    replayed = sum(step.graph for step in iterations)
    figure = f"{tokens / seconds:.0f} tokens/s, device busy {device_s / seconds:.0%}"
    figure += f", {replayed} of {len(iterations)} steps replayed"
    return Row(
        part="engine",
        case=f"depth {depth}, graphs {'off' if without_graphs else 'on'}",
        figure=figure,
    )


def record(bench: Bench) -> list[Row]:
    """Run an engine that sends every record, and one that keeps none, in turns."""
    spec = _spec(bench)
    config = settled(bench, spec, **_settings(bench))
    runner = runner_of(bench, spec, config)
    runner.warm_up(lambda *_: None)
    runner.capture(lambda *_: None)
    silent: list[float] = []
    told: list[float] = []
    for _ in range(2 if bench.tiny else 5):
        silent.append(_play(core_of(config, runner, Silent()), bench))
        told.append(_told_s(bench, lambda emit: core_of(config, runner, emit)))
    overhead = min(told) / min(silent) - 1
    held = bench.device == "cuda"
    return [
        Row(
            part="telemetry",
            case="on over off",
            figure=f"{overhead:+.1%}",
            aim=f"<= {OVERHEAD_MAX:.0%}" if held else "",
            verdict=("ok" if overhead <= OVERHEAD_MAX else "over") if held else "told",
        )
    ]


class Silent(Kept):
    """Takes nothing in: an engine without a record."""

    def step(self, gains: Gains, iteration: Iteration, ends: list[RequestEnd]) -> None:
        """Forget a step's news."""


def _told_s(bench: Bench, core: Callable[[Emit], Core]) -> float:
    """Return the seconds of a run whose records cross a socket to a thread that drops them."""
    context = zmq.Context()
    sockets = []
    stopping = threading.Event()
    for name in ("control", "records"):
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        pull.bind(f"inproc://{name}")
        push.connect(f"inproc://{name}")
        sockets.append((push, pull))

    def drain() -> None:
        poller = zmq.Poller()
        for _, pull in sockets:
            poller.register(pull, zmq.POLLIN)
        while not stopping.is_set():
            for pull, _ in poller.poll(20):
                pull.recv()

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        return _play(core(Outbox(sockets[0][0], sockets[1][0])), bench)
    finally:
        stopping.set()
        thread.join()
        context.destroy(linger=0)


def memory(bench: Bench) -> list[Row]:
    """Measure what a cache may have, as an engine does at its start, and let a step run out."""
    spec = _spec(bench)
    config = settled(bench, spec, **(_settings(bench) | {"loop_depth": 1}))
    runner = runner_of(bench, spec, replace(config, kv_blocks=1))
    found = measure(device_memory(bench.device), runner.run_worst, runner.graphs_bytes)
    pool = found.pool_bytes(config.gpu_memory_utilization)
    tokens = pool // kv_bytes_per_token(spec, config.kv_cache_dtype)
    figure = (
        f"{pool / 2**30:.2f} GiB, {tokens} tokens; worst step {found.transient / 2**20:.0f} MiB"
    )
    figure += f", graphs {found.graphs / 2**20:.0f} MiB"
    rows = [Row(part="memory", case="cache beside the model", figure=figure)]
    runner.settle(config)
    return [*rows, _out_of_memory(bench, config, runner), _crowded(bench, config, runner)]


def _crowded(bench: Bench, config: EngineConfig, runner: ModelRunner) -> Row:
    """Take nearly all memory away for real: some may end, the engine may not."""
    case = "memory is truly gone"
    if bench.device == "cpu":
        return Row(part="memory", case=case, figure="a GPU's alone", verdict="skipped")
    torch.cuda.empty_cache()
    left = torch.cuda.mem_get_info()[0] - CROWDED_BYTES
    ballast = torch.empty(max(0, left), dtype=torch.uint8, device=bench.device)
    crowded, free = Kept(), Kept()
    _play(core_of(config, runner, crowded), bench)
    del ballast
    torch.cuda.empty_cache()
    _play(core_of(config, runner, free), bench)
    ended = {end.finish for end in free.ends.values()}
    lost = sum(end.finish == "error" for end in crowded.ends.values())
    return Row(
        part="memory",
        case=case,
        figure=f"{len(crowded.faults)} faults, {lost} ended; then {', '.join(sorted(ended))}",
        aim="then length",
        verdict="ok" if ended == {"length"} and not free.faults else "bad",
    )


def _out_of_memory(bench: Bench, config: EngineConfig, runner: ModelRunner) -> Row:
    """Plant torch's own error into the third step: nobody may end by it."""
    forward, calls = runner._decoder.forward, [0]

    def failing(*given: object) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Planted by the device check")
        return forward(*given)  # type: ignore[arg-type]

    runner._decoder.forward = failing  # type: ignore[method-assign, assignment]
    kept = Kept()
    _play(core_of(config, runner, kept), bench)
    runner._decoder.forward = forward  # type: ignore[method-assign]
    ended = {end.finish for end in kept.ends.values()}
    fine = ended == {"length"} and len(kept.faults) == 1
    return Row(
        part="memory",
        case="a step runs out of it",
        figure=f"{len(kept.faults)} fault, ends: {', '.join(sorted(ended))}",
        aim="1 fault, ends: length",
        verdict="ok" if fine else "bad",
    )
