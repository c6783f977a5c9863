"""Decode steps of known shapes: replays equal to eager steps, and how far from memory's floor.

Owns the device's copy rate, the floor that follows for a step, and the comparison of a captured
step with the same work done eagerly. Engines of random weights: bench/device/shapes.py.
"""

import torch

from bench.device.shapes import LLAMA_8B, QWEN3_06B, TINY, runner_of, settled
from bench.device.table import Bench, Row, Verdict
from bench.floor import parameters
from engine.runner import ModelRunner
from engine.spec import ModelSpec

COPY_BYTES = 2**31
TINY_COPY_BYTES = 2**24
FLOOR_RATIO_MAX = 1.5
"""What a decode step of 64 rows may take over the floor."""

CONTEXT = 1024
POOL_TOKENS = 300 * CONTEXT


def graphs(bench: Bench) -> list[Row]:
    """Compare each captured bucket with the same step done eagerly, bit by bit."""
    spec = TINY if bench.tiny else QWEN3_06B
    runner = _captured(bench, spec)
    if isinstance(runner, str):
        return [Row(part="graphs", case=spec.path, figure=runner, verdict=_unless_cpu(bench))]
    made, memory = runner._graphs, runner._decode_memory
    assert made is not None
    assert memory is not None
    rows, unequal = 0, []
    with torch.inference_mode():
        for key, replay in made._replays.items():
            _fill(bench, runner, key.bucket)
            replay()
            replayed = memory.logits[: key.bucket].clone()
            memory.logits[: key.bucket] = torch.nan
            step = memory.step(key.bucket, key.width * memory.block_tokens)
            _fill(bench, runner, key.bucket)
            eager = runner._decoder.forward(step, runner._cache)
            rows += key.bucket
            if not torch.equal(replayed, eager):
                unequal.append(key.bucket)
    figure = f"{len(made)} graphs, {rows} rows" + (f"; unequal: {unequal}" if unequal else "")
    return [
        Row(
            part="graphs",
            case=f"{spec.path} on {runner.backend}, replay = eager",
            figure=figure,
            aim="to the bit",
            verdict="bad" if unequal else "ok",
        )
    ]


def _unless_cpu(bench: Bench) -> Verdict:
    return "skipped" if bench.device == "cpu" else "bad"


def _captured(bench: Bench, spec: ModelSpec) -> ModelRunner | str:
    """Return a runner whose graphs are captured, or why there is none."""
    config = settled(
        bench,
        spec,
        graphs="on",
        max_num_seqs=4 if bench.tiny else 256,
        max_num_batched_tokens=64 if bench.tiny else 512,
        kv_blocks=64 if bench.tiny else POOL_TOKENS // 16,
        attention_backend=_backend(bench),
    )
    runner = runner_of(bench, spec, config)
    if why := runner.capture(lambda *_: None):
        return why
    return runner


def _backend(bench: Bench) -> str:
    """Return what is captured: on a CPU whichever of two can be replayed."""
    if bench.device == "cuda":
        return "auto"
    try:
        import triton  # noqa: PLC0415  no dependency of ours
    except ImportError:
        return "auto"
    return "triton" if triton.knobs.runtime.interpret else "auto"


def _fill(bench: Bench, runner: ModelRunner, bucket: int) -> None:
    """Let each row decode at another place, over whatever lies in its blocks; the last is padding.

    Rows write their own block alone, so that a step can be repeated.
    """
    memory = runner._decode_memory
    assert memory is not None
    size = runner._config.block_size
    blocks = memory.tables.shape[1]
    longest = min(blocks * size, CONTEXT)
    live = max(1, bucket - 1)
    contexts = [1 + (row * 37 + longest // 2) % longest for row in range(live)]
    padding = slice(live, bucket)
    memory.ids[padding] = memory.positions[padding] = memory.slots[padding] = 0
    memory.contexts[padding], memory.tables[padding] = 1, 0
    memory.ids[:live] = bench.whole([5 + row for row in range(live)])
    memory.positions[:live] = bench.whole([context - 1 for context in contexts])
    memory.contexts[:live] = bench.whole(contexts, torch.int32)
    tables = torch.arange(1, 1 + live, dtype=torch.int32, device=bench.device)
    assert runner._config.kv_blocks is not None
    memory.tables[:live] = (tables % runner._config.kv_blocks)[:, None]
    offsets = [(context - 1) % size for context in contexts]
    memory.slots[:live] = (tables % runner._config.kv_blocks) * size + bench.whole(offsets)


def model(bench: Bench) -> list[Row]:
    """Time captured decode steps of both shapes against what memory allows."""
    bytes_s = _bytes_s(bench)
    rows = [Row(part="model step", case="copy", figure=f"{bytes_s / 1e12:.3f} TB/s")]
    for spec in (TINY,) if bench.tiny else (QWEN3_06B, LLAMA_8B):
        rows += _step_rows(bench, spec, bytes_s)
    return rows


def _bytes_s(bench: Bench) -> float:
    """Return the bytes a second that a copy reads and writes."""
    size = TINY_COPY_BYTES if bench.tiny else COPY_BYTES
    source = torch.ones(size // 4, device=bench.device)
    target = torch.empty_like(source)
    copied_ms = bench.milliseconds(lambda: target.copy_(source), 3 if bench.tiny else 20)
    return 2 * size / (copied_ms / 1e3)


def _step_rows(bench: Bench, spec: ModelSpec, bytes_s: float) -> list[Row]:
    runner = _captured(bench, spec)
    if isinstance(runner, str):
        return [Row(part="model step", case=spec.path, figure=runner, verdict=_unless_cpu(bench))]
    buckets = (2,) if bench.tiny else (1, 64, 256)
    return [_step_row(bench, spec, runner, bucket, bytes_s) for bucket in buckets]


def _step_row(
    bench: Bench, spec: ModelSpec, runner: ModelRunner, bucket: int, bytes_s: float
) -> Row:
    made, memory = runner._graphs, runner._decode_memory
    assert made is not None
    assert memory is not None
    context = min(CONTEXT, spec.model_len)
    replay = next(work for key, work in made._replays.items() if key.bucket == bucket)
    with torch.inference_mode():
        _fill(bench, runner, bucket)
        memory.contexts[:bucket] = context
        memory.positions[:bucket] = context - 1
        ms = bench.milliseconds(replay, 1 if bench.tiny else 30)
    item = 4 if bench.device == "cpu" else 2
    kept = 2 * spec.layers * spec.kv_heads * spec.head_dim * context * item
    floor_ms = (parameters(spec) * item + bucket * kept) / bytes_s * 1e3
    ratio = ms / floor_ms
    held = bucket == 64 and not bench.tiny
    return Row(
        part="model step",
        case=f"{spec.path}, {bucket} rows, context {context}",
        figure=f"{ms:.3f} ms, {ratio:.2f} x the floor of {floor_ms:.3f} ms",
        aim=f"<= {FLOOR_RATIO_MAX} x" if held else "",
        verdict=("ok" if ratio <= FLOOR_RATIO_MAX else "over") if held else "told",
    )
