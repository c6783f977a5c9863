"""What the KV cache gets: what is free beside the model after the worst of steps, never more.

GIVEN a real model on this machine's own memory, in an allowance of known size, WHEN an engine
measures before it serves, THEN its cache fits what is left, and answers are those of any other.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.build import measured
from engine.config import ConfigError, DeviceFacts, EngineConfig, kv_bytes_per_token, resolve
from engine.memory import SPARE_BYTES, HostMemory, Measured, measure
from engine.rehearsal import worst_plans
from engine.spec import read_spec
from tests import tiny
from tests.steps import Hand, load
from tests.test_scheduler import SPEC

MIB = 2**20


def test_the_cache_gets_what_a_worst_step_the_graphs_and_the_share_leave() -> None:
    found = Measured(total=1000 * MIB, free=700 * MIB, transient=150 * MIB, graphs=30 * MIB)
    assert found.pool_bytes(0.75) == (700 - 150 - 30 - 250) * MIB
    assert found.pool_bytes(1.0) == (700 - 150 - 30) * MIB
    assert found.pool_bytes(0.3) == SPARE_BYTES


def see_a_peak() -> None:
    """Hold the measurement to a peak, in a process whose memory nothing else moves."""
    memory, kept = HostMemory(), []

    def work() -> None:
        if not kept:
            kept.append(torch.ones(64 * MIB // 4))
        torch.ones(96 * MIB // 4).sum()

    found = measure(memory, work, lambda _: 7)
    assert 90 * MIB < found.transient < 150 * MIB
    assert found.graphs == 7
    assert 0 < found.free < found.total


def test_a_peak_that_comes_and_goes_is_seen_and_one_that_stays_is_none() -> None:
    code = "from tests.test_memory import see_a_peak; see_a_peak()"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.returncode == 0, child.stderr


class Allowance(HostMemory):
    """This machine's memory, of which so much may be used."""

    def free_bytes(self) -> int:
        return 80 * MIB

    def total_bytes(self) -> int:
        return 100 * MIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"))


def settings(model: Path, **more: object) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        engine_threads=1,
        dtype="f32",
        attention_backend="reference",
        **more,  # type: ignore[arg-type]
    )


def test_an_engine_that_measured_has_all_that_was_left_and_answers_like_another(
    model: Path,
) -> None:
    spec, stages = read_spec(str(model)), []
    runner, config = measured(
        settings(model), spec, Allowance(), lambda stage, part: stages.append(stage)
    )
    assert "measuring memory" in stages
    assert config.kv_cache_memory is not None
    assert config.kv_blocks == config.kv_cache_memory // (kv_bytes_per_token(spec, "f32") * 16)
    assert 20 * MIB < config.kv_cache_memory < 71 * MIB
    assert config.max_model_len == spec.model_len
    other = load(model, attention_backend="reference")
    outputs = []
    for hand in (Hand(runner), Hand(other)):
        row = hand.add([5, 6, 7] * 15, 9)
        hand.finish(row, outputs=9)
        outputs.append(row.output)
    assert outputs[0] == outputs[1]


def test_a_model_that_leaves_nothing_is_refused_in_one_line(model: Path) -> None:
    class Full(Allowance):
        def free_bytes(self) -> int:
            return 10 * MIB

    config = settings(model, block_size=2048)
    with pytest.raises(ConfigError, match="holds 0 KV blocks"):
        measured(config, read_spec(str(model)), Full(), lambda stage, part: None)


def test_the_worst_steps_hold_all_tokens_and_all_rows_at_the_longest_context(model: Path) -> None:
    spec = read_spec(str(model))
    facts = DeviceFacts(device="cpu", auto_dtype="f32", threads=1)
    config = resolve(settings(model), spec, facts)
    prompt, spread, decodes = worst_plans(config)
    assert prompt.token_counts == [64]
    assert spread.token_counts == [16] * 4
    assert decodes.token_counts == [1] * 4
    for plan in (prompt, spread, decodes):
        for start, count, table in zip(
            plan.start_positions, plan.token_counts, plan.block_tables, strict=True
        ):
            assert start + count == spec.model_len
            assert len(table) * config.block_size >= spec.model_len
            assert not any(table), "block 0 is nobody's"


def test_a_gpu_is_asked_before_any_other_default() -> None:
    facts = DeviceFacts(device="cuda", auto_dtype="bf16", threads=1, pool_bytes=64 * MIB)
    config = resolve(EngineConfig(max_num_seqs=20), SPEC, facts)
    assert (config.kv_cache_memory, config.loop_depth, config.graphs) == (64 * MIB, 2, "on")
    assert config.buckets == (1, 2, 4, 8, 16, 24)
    asked = EngineConfig(kv_cache_memory=MIB, loop_depth=1, graphs="off", decode_buckets="3")
    kept = resolve(asked, SPEC, facts)
    assert (kept.kv_cache_memory, kept.loop_depth, kept.graphs) == (MIB, 1, "off")
    assert kept.buckets == (3,)
    host = resolve(EngineConfig(), SPEC, DeviceFacts(device="cpu", auto_dtype="f32", threads=1))
    assert (host.kv_cache_memory, host.loop_depth, host.graphs) == (2**30, 1, "off")
    assert host.buckets == ()
