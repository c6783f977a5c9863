"""Our Triton kernels compute what PyTorch does, under Triton's interpreter; on no GPU.

Owns the tolerances; the cases are interpreted.py's, run in a child whose environment asks for the
interpreter. What its launches compile to is test_triton_compiled.py's. bfloat16 is not tried: its
products are garbage in the interpreter.
"""

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from kernels.base import AttentionBatch, AttentionShape
from kernels.triton import launch
from kernels.triton.backend import TritonBackend
from kernels.triton.launch import Device, Tiles
from kernels.triton.ops import TritonOps

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE, HALF_TOLERANCE = 1e-6, 6e-4
"""Relative to the whole result: a few roundings of float32, one of float16."""

USUAL = (
    *("mixed", "mixed_fp16", "decode", "decode_in_parts", "mixed_in_parts_fp16", "window"),
    *("window_cap_scale", "pages_of_256", "blocks_of_24", "fused", "fused_normed"),
    *("ops", "ops_fp16", "choose", "choose_filtered", "engine"),
)
SOAKED = (
    *("d16-g1-b16-float32-w0", "d32-g5-b16-float16-w0", "d64-g7-b32-float32-w100"),
    *("d64-g8-b256-float16-w0", "d80-g2-b48-float32-w33", "d96-g3-b64-float16-w1"),
    *("d96-g4-b128-float32-w0", "d128-g4-b16-float16-w64", "d128-g16-b256-float32-w0"),
    *("d128-g32-b16-float16-w0", "d256-g2-b16-float32-w128", "d256-g1-b80-float16-w0"),
)


def interpreted(*arguments: str) -> dict[str, float]:
    """Run cases in a child and return how far each is off."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.interpreted", *arguments]
    told = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert told.returncode == 0, told.stderr[-3000:]
    found: dict[str, float] = json.loads(told.stdout)
    return found


@lru_cache(maxsize=1)
def usual() -> dict[str, float]:
    return interpreted(*USUAL)


ENGINES = tuple(
    f"engine of {name}" for name in ("mistral", "qwen2", "qwen3 with windows", "gemma2", "gemma3")
)


def tolerance(case: str) -> float:
    return HALF_TOLERANCE if "16" in case.replace("b16", "").replace("d16", "") else TOLERANCE


@pytest.mark.parametrize("case", USUAL)
def test_the_device_computes_what_pytorch_does(case: str) -> None:
    assert usual()[case] <= tolerance(case)


@pytest.mark.soak
@pytest.mark.parametrize("case", ENGINES)
def test_engines_of_every_family_say_the_same(case: str) -> None:
    assert interpreted(case)[case] == 0


@pytest.mark.soak
@pytest.mark.parametrize("case", SOAKED)
def test_odd_shapes_are_computed_too(case: str) -> None:
    assert interpreted(case)[case] <= tolerance(case)


def test_a_scale_that_is_wrong_is_found() -> None:
    cases = ("decode_in_parts", "mixed_fp16", "pages_of_256")
    for case, off_by in interpreted("--plant", "scale", *cases).items():
        assert off_by > 5 * tolerance(case), case


# ---- launches

SHAPE = AttentionShape(layers=1, heads=32, kv_heads=8, head_dim=128)
H200 = Device(name="NVIDIA H200", processors=132, shared_bytes=232448)
A100 = Device(name="NVIDIA A100", processors=108, shared_bytes=166912)


def launched(
    lengths: list[int], table_tokens: int, shape: AttentionShape = SHAPE
) -> launch.AttentionLaunch:
    decode = max(lengths) == 1
    tiles = launch.attention_tiles(shape, H200, item_bytes=2, block_tokens=16, decode=decode)
    return launch.attention_launch(
        shape, tiles, H200.processors, query_lengths=lengths, table_tokens=table_tokens
    )


def test_a_device_is_filled_by_parts_where_rows_do_not_fill_it() -> None:
    alone, few, many = (launched([1] * rows, 32768) for rows in (1, 8, 256))
    assert alone.segments == 32
    assert alone.segments * alone.rows * 8 <= 264
    assert few.segments == 8
    assert many.segments <= 8
    assert alone.part_tiles < many.part_tiles
    assert launched([1] * 4, 128).segments == 1, "nothing to share out"


@pytest.mark.parametrize("rows", [1, 7, 64, 256, 1024])
@pytest.mark.parametrize("tokens", [64, 4096, 131072])
def test_what_parts_keep_is_bounded(rows: int, tokens: int) -> None:
    for lengths in ([1] * rows, [1] * (rows - 1) + [500]):
        made = launched(lengths, tokens)
        kept = 4 * made.rows * SHAPE.heads * 128 * made.segments
        assert made.segments == 1 or kept <= launch.PARTS_BYTES_MAX


def test_every_block_of_queries_has_a_program() -> None:
    """Row r's blocks begin at starts[r] // size + r: none is shared, none beyond the grid."""
    for lengths in ([1, 1, 500, 3], [33], [31, 32, 33, 1, 64, 1], [1] * 5 + [2]):
        made = launched(lengths, 1024)
        size = made.tiles.block_m // 4
        start, seen = 0, set()
        for row, length in enumerate(lengths):
            for block in range(-(-length // size)):
                seen.add(start // size + row + block)
            start += length
        assert len(seen) == sum(-(-length // size) for length in lengths)
        assert max(seen) < made.blocks


def test_a_key_holds_every_integer_of_a_launch() -> None:
    base = launched([1] * 8, 4096)
    assert base.key() == launched([1] * 8, 4096).key()
    for other in (launched([1] * 9, 4096), launched([1] * 8, 65536), launched([1] * 7 + [2], 4096)):
        assert other.key() != base.key()


def test_a_captured_step_serves_while_its_contexts_grow() -> None:
    backend = TritonBackend(H200)
    cache = backend.allocate_kv(SHAPE, 3, 16, torch.bfloat16, "cpu")

    def key(contexts: list[int], blocks: int = 64) -> tuple[int, ...]:
        rows = len(contexts)
        ones = torch.ones(rows, dtype=torch.int32)
        batch = AttentionBatch(
            query_starts=torch.arange(rows + 1, dtype=torch.int32),
            context_lengths=ones,
            slot_mapping=ones.long(),
            block_tables=torch.zeros(rows, blocks, dtype=torch.int32),
            query_lengths_host=[1] * rows,
            context_lengths_host=contexts,
        )
        return backend.launch_key(batch, cache)

    assert key([1, 5]) == key([900, 1000])
    assert key([1, 5]) != key([1, 5, 1])
    assert key([1, 5]) != key([1, 5], blocks=65), "the stride of the tables is an integer too"


@pytest.mark.parametrize("device", [H200, A100])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_tiles_fit_into_shared_memory(device: Device, head_dim: int, item_bytes: int) -> None:
    shape = AttentionShape(layers=1, heads=8, kv_heads=2, head_dim=head_dim)
    for decode in (True, False):
        tiles = launch.attention_tiles(
            shape, device, item_bytes=item_bytes, block_tokens=16, decode=decode
        )
        width = launch.power_of_two(head_dim)
        kept = launch.shared_bytes(tiles.block_m, tiles.tile, tiles.stages, width, item_bytes)
        assert kept <= device.shared_bytes
        assert tiles.block_m >= (16 if decode else 32)


def test_what_a_sweep_found_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "TUNING", tmp_path / "tuning")
    found = Tiles(block_m=16, tile=128, warps=2, stages=5)
    name = launch.entry_name(SHAPE, item_bytes=2, block_tokens=16, decode=True)
    path = launch.write_tuned(H200.name, {name: found})
    assert path.name == "nvidia-h200.json"
    assert launched([1], 4096).tiles == found
    assert launched([5], 4096).tiles != found
    launch._tuned.cache_clear()
    launch.attention_tiles.cache_clear()


def test_what_the_kernels_cannot_do_they_say() -> None:
    backend, ops = TritonBackend(), TritonOps()
    assert backend.supports(SHAPE, "cpu", torch.bfloat16, 16) == "runs on CUDA, not on cpu"
    assert ops.supports("cpu", torch.bfloat16) == "runs on CUDA, not on cpu"
    assert "int8" in str(backend.supports(SHAPE, "cuda", torch.int8, 16))
    assert "int8" in str(ops.supports("cuda", torch.int8))
    odd = AttentionShape(layers=1, heads=4, kv_heads=2, head_dim=100)
    assert "head dimension 100" in str(backend.supports(odd, "cuda", torch.bfloat16, 16))
    crowded = AttentionShape(layers=1, heads=128, kv_heads=1, head_dim=64)
    assert "128 query heads" in str(backend.supports(crowded, "cuda", torch.bfloat16, 16))
