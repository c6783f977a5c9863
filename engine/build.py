"""From settings to a warm engine: read the model, resolve the limits, load, warm up, assemble.

Owns the order of an engine's start and the Run record of its effective limits. engine/process.py
calls it once. The only module that joins the torch side (runner) to the torch-free side (core).
"""

from collections.abc import Callable
from dataclasses import asdict, replace

import msgspec

from engine.config import ConfigError, EngineConfig, resolve
from engine.core import Core, Emit
from engine.device import device_facts
from engine.kv import KVPool
from engine.memory import Memory, device_memory, measure
from engine.plan import Clock
from engine.policies import POLICIES
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.spec import ModelSpec, read_spec
from engine.step_model import StepTimes
from kernels import native
from telemetry.records import SCHEMA_VERSION, Run

UNLIMITED_BYTES = 2**60
"""More than any cache has: while it is measured what it may have, it limits nothing."""


def build(
    config: EngineConfig,
    *,
    emit: Emit,
    clock: Clock,
    progress: Callable[[str, float], None],
    beat: Callable[[], None] = lambda: None,
) -> tuple[Core, Run]:
    """Load the model and return a warm core with the record of its effective limits.

    beat is called while something moves, in steps as in the load.

    Raises SpecError for a model that cannot be used and ConfigError for settings that cannot be.
    """
    progress("reading the model's header", 0.0)
    spec = read_spec(config.model)
    runner, resolved = _settled(config, spec, progress, beat)
    runner.warm_up(progress)
    without_graphs = runner.capture(progress)
    if without_graphs and config.graphs == "on":
        raise ConfigError(f"--graphs on: {without_graphs}")
    if without_graphs and resolved.graphs == "on":
        resolved = replace(resolved, graphs="off")
        runner.refusals["graphs"] = without_graphs
    assert resolved.kv_blocks is not None
    pool = KVPool(blocks=resolved.kv_blocks, block_tokens=resolved.block_size)
    times = StepTimes()
    policy = POLICIES[resolved.scheduling_policy](resolved, times)
    scheduler = Scheduler(config=resolved, pool=pool, policy=policy, eos_ids=spec.eos_ids)
    depth = resolved.loop_depth
    assert depth is not None
    core = Core(
        scheduler=scheduler, runner=runner, clock=clock, emit=emit, times=times, depth=depth
    )
    return core, _run_record(resolved, spec, runner)


def _settled(
    config: EngineConfig,
    spec: ModelSpec,
    progress: Callable[[str, float], None],
    beat: Callable[[], None],
) -> tuple[ModelRunner, EngineConfig]:
    """Return a runner and its limits: on a GPU the KV cache is what a worst step leaves free."""
    facts = device_facts(config, spec)
    if facts.device == "cpu" or config.kv_blocks or config.kv_cache_memory:
        resolved = resolve(config, spec, facts)
        return ModelRunner.build(resolved, spec, progress, beat), resolved
    return measured(config, spec, device_memory(facts.device), progress, beat)


def measured(
    config: EngineConfig,
    spec: ModelSpec,
    memory: Memory,
    progress: Callable[[str, float], None],
    beat: Callable[[], None] = lambda: None,
) -> tuple[ModelRunner, EngineConfig]:
    """Load the model, run its worst steps without a cache, and give the cache what they leave.

    Raises ConfigError when that holds less than two blocks.
    """
    facts = device_facts(config, spec)
    provisional = resolve(config, spec, replace(facts, pool_bytes=UNLIMITED_BYTES))
    runner = ModelRunner.build(replace(provisional, kv_blocks=1), spec, progress, beat)
    progress("measuring memory", 0.0)
    found = measure(memory, runner.run_worst, runner.graphs_bytes)
    pool_bytes = found.pool_bytes(config.gpu_memory_utilization)
    resolved = resolve(config, spec, replace(facts, pool_bytes=pool_bytes))
    runner.settle(resolved)
    return runner, resolved


def _run_record(config: EngineConfig, spec: ModelSpec, runner: ModelRunner) -> Run:
    """Return the engine's part of Run; the server adds replica, names, revision and wall clock."""
    assert config.kv_blocks is not None
    assert config.max_model_len is not None
    settings = replace(config, attention_backend=runner.backend)
    missing = native.refusal()
    refusals = runner.refusals | ({"native": missing} if missing else {})
    return Run(
        replica="",
        schema_version=SCHEMA_VERSION,
        started_unix_us=0,
        model=config.model,
        parameters=spec.parameters,
        dtype=config.dtype,
        device=config.device,
        backend=runner.backend,
        backend_refusals=msgspec.json.encode(refusals).decode(),
        policy=config.scheduling_policy,
        batching=config.batching,
        kv_blocks_total=config.kv_blocks,
        block_tokens=config.block_size,
        batch_tokens_max=config.max_num_batched_tokens,
        seqs_max=config.max_num_seqs,
        model_len_max=config.max_model_len,
        buckets=list(config.buckets),
        config=msgspec.json.encode(asdict(settings)).decode(),
        revision="",
    )
