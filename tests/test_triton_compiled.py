"""What our Triton kernels compile to, for GPUs that are not here: dry_device.py takes the launches.

Owns what is asked of the compiler's work: no registers spilled, shared memory within a block's, the
products' own instructions, keys and values fetched ahead. Whether it is right is test_triton.py's.
"""

from pathlib import Path

import pytest
import torch

from kernels.base import AttentionBatch, AttentionShape, HeadNorms
from kernels.choose import Drawn
from kernels.triton.backend import TritonBackend
from kernels.triton.launch import Device
from kernels.triton.ops import TritonOps
from tests.dry_device import SHARED_BYTES_MAX, Compiled, dry_device

BF16 = torch.bfloat16
DECODE, MIXED = [1] * 8, [1, 1, 500]
PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""The instruction for products of 64 rows and more; smaller ones are mma.sync everywhere."""

ONE_VALUE_BYTES = 8
"""What ptxas puts aside in a few shapes out of many: one value, with registers to spare or not."""


pytestmark = pytest.mark.usefixtures("one_thread")


def batch_of(lengths: list[int], block_tokens: int) -> AttentionBatch:
    rows = len(lengths)
    return AttentionBatch(
        query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
        context_lengths=torch.full((rows,), 4000, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
        block_tables=torch.zeros(rows, 8192 // block_tokens, dtype=torch.int32),
        query_lengths_host=lengths,
        context_lengths_host=[4000] * rows,
    )


def compiled(
    capability: int,
    shape: AttentionShape,
    lengths: list[int],
    folder: Path,
    *,
    block_tokens: int = 16,
) -> list[Compiled]:
    """Launch a layer's attention, as it is and fused, on a dry device; return what was compiled."""
    facts = Device(name="dry", processors=132, shared_bytes=SHARED_BYTES_MAX[capability])
    backend, heads = TritonBackend(facts), shape.heads + 2 * shape.kv_heads
    tokens, dim = sum(lengths), shape.head_dim
    with dry_device(capability, folder) as device:
        cache = backend.allocate_kv(shape, 2, block_tokens, BF16, "cpu")
        prepared = backend.prepare(batch_of(lengths, block_tokens), cache)
        qkv = torch.zeros(tokens, heads, dim, dtype=BF16)
        q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        backend.attend(0, q, k, v, cache, prepared)
        norm = torch.zeros(dim, dtype=BF16)
        norms = HeadNorms(query=norm, key=norm, eps=1e-6)
        backend.attend_qkv(0, qkv, torch.zeros(tokens, dim // 2, 2), norms, cache, prepared)
    return device.compiled


def check(
    kernels: list[Compiled], capability: int, stack_bytes_max: int = 0
) -> dict[str, Compiled]:
    for kernel in kernels:
        assert kernel.stack_bytes <= stack_bytes_max, f"{kernel.name} spills {kernel.stack_bytes}"
        assert kernel.shared_bytes <= SHARED_BYTES_MAX[capability], kernel.name
    return {kernel.name: kernel for kernel in kernels}


def check_attention(found: dict[str, Compiled], capability: int, lengths: list[int]) -> None:
    assert set(found) >= {"paged_attention", "combine_parts", "store_kv", "turn_and_store"}
    attention = found["paged_attention"]
    product = "mma.sync" if lengths == DECODE else PRODUCTS[capability]
    assert attention.count(product) >= 8
    assert attention.count("cp.async.") >= 16, "keys and values are not fetched ahead"


LLAMA = AttentionShape(layers=1, heads=32, kv_heads=8, head_dim=128)


@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_attention_of_a_llama_on_a_hopper(lengths: list[int], tmp_path: Path) -> None:
    check_attention(check(compiled(90, LLAMA, lengths, tmp_path), 90), 90, lengths)


def test_the_ops_compile_without_spills(tmp_path: Path) -> None:
    found = check(launched_ops(90, tmp_path), 90)
    assert set(found) >= {"rms_norm", "turn_pairs", "gate", "find_largest", "join_largest", "draw"}
    assert found["draw"].count("ld.global.v4") + found["draw"].count(".v4.b32") > 0


def launched_ops(capability: int, folder: Path) -> list[Compiled]:
    ops, rows = TritonOps(), 4
    with dry_device(capability, folder) as device:
        x = torch.zeros(rows, 4096, dtype=BF16)
        ops.add_rms_norm(x, x.clone(), x[0].clone(), 1e-5)
        ops.rms_norm(torch.zeros(rows, 16, 128, dtype=BF16), torch.zeros(128, dtype=BF16), 1e-5)
        ops.rope(torch.zeros(rows, 40, 128, dtype=BF16), torch.zeros(rows, 64, 2))
        ops.silu_multiply(torch.zeros(rows, 28672, dtype=BF16))
        logits = torch.zeros(rows, 151936)
        best, _ = ops.best(logits)
        each = torch.arange(rows)
        drawn = Drawn(
            rows=each,
            temperature=torch.ones(rows),
            top_k=each,
            top_p=torch.ones(rows, dtype=torch.float64),
            uniforms=torch.ones(rows, dtype=torch.float64),
            min_p=torch.zeros(rows, 1),
        )
        ops.draw(logits, best, drawn)
    return device.compiled


@pytest.mark.soak
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_tokens", "values"),
    [
        (32, 8, 16, {}),
        (28, 4, 256, {}),
        (8, 8, 32, {"windows": (512,)}),
        (16, 8, 16, {"windows": (4096,), "cap": 50.0}),
        (16, 1, 128, {"cap": 30.0}),
    ],
)
def test_attention_of_every_shape_on_every_gpu(
    capability: int,
    lengths: list[int],
    head_dim: int,
    heads: int,
    kv_heads: int,
    block_tokens: int,
    values: dict[str, object],
    tmp_path: Path,
) -> None:
    shape = AttentionShape(layers=1, heads=heads, kv_heads=kv_heads, head_dim=head_dim, **values)
    found = compiled(capability, shape, lengths, tmp_path, block_tokens=block_tokens)
    check_attention(check(found, capability, ONE_VALUE_BYTES), capability, lengths)


@pytest.mark.soak
@pytest.mark.parametrize("capability", [80, 100])
def test_the_ops_compile_for_every_gpu(capability: int, tmp_path: Path) -> None:
    check(launched_ops(capability, tmp_path), capability)
