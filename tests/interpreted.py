"""The GPU's kernels under Triton's interpreter, case by case, against PyTorch's: a program.

Owns the cases of tests/test_triton.py, which runs it as a child with TRITON_INTERPRET=1: that must
stand in the environment before Triton is loaded. Prints one JSON object, from each case's name to
how far it is off. `--plant NAME` puts a known error in, which the cases must show.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from engine.sampler import uniforms
from kernels import select
from kernels.base import AttentionBackend, AttentionBatch, AttentionShape, HeadNorms
from kernels.choose import Drawn
from kernels.ops import TorchOps
from kernels.reference import ReferenceBackend, ReferenceCache
from kernels.triton import backend as triton_backend
from kernels.triton.backend import TritonBackend, TritonCache
from kernels.triton.launch import Device
from kernels.triton.ops import TritonOps
from tests import families, tiny
from tests.steps import Hand, load
from tests.test_kernels import MIXED, Scene, batch_of, packed, scene

F32, F16 = torch.float32, torch.float16
SMALL = Device(name="small", processors=2, shared_bytes=2**16)
LARGE = Device(name="large", processors=132, shared_bytes=227 * 1024)


@dataclass(frozen=True)
class Attention:
    """Rows of (context, query) over heads that share key heads; a scene among stale NaN."""

    rows: list[tuple[int, int]]
    heads: tuple[int, int, int] = (6, 2, 64)  # query heads, key heads, head dimension
    block_tokens: int = 16
    dtype: torch.dtype = F32
    window: int = 0
    cap: float | None = None
    scale: float | None = None
    device: Device = SMALL

    @property
    def shape(self) -> AttentionShape:
        heads, kv_heads, head_dim = self.heads
        return AttentionShape(
            layers=2,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            windows=(0, self.window) if self.window else (),
            cap=self.cap,
            scale=self.scale,
        )


DECODES = [(1, 1), (16, 1), (70, 1), (17, 1), (300, 1)]
LONG = [(700, 1), (40, 9), (1030, 1)]
ATTENTION: dict[str, Attention] = {
    "mixed": Attention(MIXED),
    "mixed_fp16": Attention(MIXED, heads=(9, 3, 64), dtype=F16, device=LARGE),
    "decode": Attention(DECODES, heads=(8, 2, 128)),
    "decode_in_parts": Attention([(700, 1), (3, 1)], heads=(4, 2, 32), device=LARGE),
    "mixed_in_parts_fp16": Attention(LONG, heads=(4, 2, 64), dtype=F16, device=LARGE),
    "window": Attention(LONG, heads=(4, 2, 96), window=37, device=LARGE),
    "window_cap_scale": Attention(
        [(70, 50), (90, 1)], heads=(4, 4, 64), window=20, cap=3.0, scale=0.3
    ),
    "pages_of_256": Attention([(300, 1), (257, 5)], block_tokens=256, heads=(4, 1, 64)),
    "blocks_of_24": Attention(MIXED, block_tokens=24, heads=(4, 1, 32)),
}
SOAK: dict[str, Attention] = {
    f"d{dim}-g{group}-b{block}-{str(dtype)[6:]}-w{window}": Attention(
        [(1, 1), (block, 1), (block + 1, 2), (600, 1), (150, 90), (65, 65), (1, 1)],
        heads=(2 * group, 2, dim),
        block_tokens=block,
        dtype=dtype,
        window=window,
        cap=cap,
        device=device,
    )
    for dim, group, block, dtype, window, cap, device in [
        (16, 1, 16, F32, 0, None, SMALL),
        (32, 5, 16, F16, 0, None, LARGE),
        (64, 7, 32, F32, 100, None, LARGE),
        (64, 8, 256, F16, 0, 2.0, LARGE),
        (80, 2, 48, F32, 33, 1.0, SMALL),
        (96, 3, 64, F16, 1, None, LARGE),
        (96, 4, 128, F32, 0, None, SMALL),
        (128, 4, 16, F16, 64, None, LARGE),
        (128, 16, 256, F32, 0, None, SMALL),
        (128, 32, 16, F16, 0, None, SMALL),
        (256, 2, 16, F32, 128, 4.0, LARGE),
        (256, 1, 80, F16, 0, None, SMALL),
    ]
}


def off_by(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative distance of two results; infinite where one is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    distance = (found.double() - expected.double()).norm() / expected.double().norm()
    return distance.item()


# ---- attention


def attention_off_by(case: Attention, padding: int = 2) -> float:
    """Return how far the case is off; rows of padding are NaN, in block 0, and one has no token."""
    drawn = scene(case.rows, case.shape, block_tokens=case.block_tokens, dtype=case.dtype)
    found = attend(TritonBackend(case.device), drawn, case.shape, padding)
    expected = attend(ReferenceBackend(), drawn, case.shape, 0)
    return off_by(found, expected)


def attend(
    backend: AttentionBackend, drawn: Scene, shape: AttentionShape, padding: int
) -> torch.Tensor:
    """Run a scene's last step, after its pasts, with some rows of padding."""
    cache = backend.allocate_kv(shape, drawn.blocks, drawn.block_tokens, drawn.q.dtype, "cpu")
    assert isinstance(cache, TritonCache | ReferenceCache)
    for values in (cache.keys, cache.values):
        values.fill_(torch.nan)
    spans = [(context - count, context) for context, count in drawn.rows]
    write_pasts(cache, drawn, [(0, first) for first, _ in spans])
    return step(backend, cache, drawn, spans, padding)


def write_pasts(
    cache: TritonCache | ReferenceCache, drawn: Scene, pasts: list[tuple[int, int]]
) -> None:
    """Put what earlier steps have computed into the last layer, past the backend: it is faster."""
    slots, size = batch_of(drawn, pasts).slot_mapping, drawn.block_tokens
    for target, parts in ((cache.keys[1], drawn.keys), (cache.values[1], drawn.values)):
        if isinstance(cache, TritonCache):
            target.transpose(1, 2)[slots // size, slots % size] = packed(parts, pasts)
        else:
            target[slots] = packed(parts, pasts)


def step(
    backend: AttentionBackend,
    cache: object,
    drawn: Scene,
    spans: list[tuple[int, int]],
    padding: int,
) -> torch.Tensor:
    """Run one step in the last layer; return what rows that are not padding attend to."""
    batch = batch_of(drawn, spans)
    k, v, q = packed(drawn.keys, spans), packed(drawn.values, spans), drawn.q
    tokens = len(q)
    if padding:
        batch = padded(batch, padding)
        k, v, q = (
            torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)]) for x in (k, v, q)
        )
    out = backend.attend(1, q, k, v, cache, backend.prepare(batch, cache))
    if padding:  # the last row has no context: nothing to attend to is zero, not 0 / 0
        assert out[-1].count_nonzero() == 0, "a row without a context"
    return out[:tokens]


def padded(batch: AttentionBatch, rows: int) -> AttentionBatch:
    """Return a batch with rows of padding in block 0, the last of them without any token."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    contexts = torch.ones(rows, dtype=torch.int32)
    contexts[-1] = 0
    slots = zeros.clone()
    slots[-1] = -1
    starts = batch.query_starts[-1] + torch.arange(1, rows + 1, dtype=torch.int32)
    width = batch.block_tables.shape[1]
    return AttentionBatch(
        query_starts=torch.cat([batch.query_starts, starts]),
        context_lengths=torch.cat([batch.context_lengths, contexts]),
        slot_mapping=torch.cat([batch.slot_mapping, slots]),
        block_tables=torch.cat([batch.block_tables, torch.zeros(rows, width, dtype=torch.int32)]),
        query_lengths_host=batch.query_lengths_host + [1] * rows,
        context_lengths_host=batch.context_lengths_host + contexts.tolist(),
    )


def fused_off_by(normed: bool) -> float:
    """Return how far heads that are normed, turned and stored in one pass are off."""
    shape = AttentionShape(layers=2, heads=6, kv_heads=2, head_dim=96)
    drawn, draw = scene([(9, 9), (5, 5)], shape), torch.Generator().manual_seed(1)
    spans = [(0, 9), (0, 5)]
    batch, ops, backend, oracle = (
        batch_of(drawn, spans),
        TorchOps(),
        TritonBackend(),
        ReferenceBackend(),
    )
    qkv = torch.randn(14, 10, 96, generator=draw)
    turns = torch.randn(14, 48, 2, generator=draw)
    query, key = torch.randn(2, 96, generator=draw)
    norms = HeadNorms(query=query, key=key, eps=1e-5) if normed else None
    cache = backend.allocate_kv(shape, drawn.blocks, 16, F32, "cpu")
    found = backend.attend_qkv(1, qkv, turns, norms, cache, backend.prepare(batch, cache))
    q, k = qkv[:, :6], qkv[:, 6:8]
    if norms:
        q, k = ops.rms_norm(q, query, norms.eps), ops.rms_norm(k, key, norms.eps)
    cache = oracle.allocate_kv(shape, drawn.blocks, 16, F32, "cpu")
    q, k = ops.rope(q, turns), ops.rope(k, turns)
    return off_by(found, oracle.attend(1, q, k, qkv[:, 8:], cache, oracle.prepare(batch, cache)))


# ---- ops


def ops_off_by(dtype: torch.dtype) -> float:
    """Return how far the worst op is off, on sizes that are no power of two."""
    draw = torch.Generator().manual_seed(2)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw).to(dtype)

    ours, theirs = TritonOps(), TorchOps()
    x, residual, weight = normal(5, 96), normal(5, 96), normal(96)
    turns, heads, wide = torch.randn(5, 24, 2, generator=draw), normal(5, 9, 48), normal(3, 2600)
    pairs = [
        (ours.rms_norm(x, weight, 1e-5), theirs.rms_norm(x, weight, 1e-5)),
        (ours.rms_norm(x, weight.float(), 1e-5), theirs.rms_norm(x, weight.float(), 1e-5)),
        (
            ours.rms_norm(heads[:, 2:7], weight[:48], 1e-5),
            theirs.rms_norm(heads[:, 2:7], weight[:48], 1e-5),
        ),
        (ours.rope(heads[:, :7], turns), theirs.rope(heads[:, :7], turns)),
        (ours.silu_multiply(wide), theirs.silu_multiply(wide)),
        (ours.gelu_multiply(wide), theirs.gelu_multiply(wide)),
    ]
    mine = ours.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    pairs += zip(mine, theirs.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), strict=True)
    return max(off_by(found, expected) for found, expected in pairs)


def chosen_otherwise(filtered: bool) -> float:
    """Return the share of rows whose token is not what PyTorch draws or finds."""
    rows, vocab_size = 12, 9001
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, vocab_size, generator=draw) * 3
    logits[3, 17] = torch.nan
    logits[4, [5, 3000]] = 50.0  # a tie: the first is found
    logits[5, 100:] = -torch.inf
    ours, theirs = TritonOps(), TorchOps()
    best, tokens = ours.best(logits)
    expected, places = theirs.best(logits)
    finite = expected.isfinite()
    wrong = (best.isnan() != expected.isnan()) | (finite & (best != expected))
    wrong |= finite & (tokens != places)
    some = torch.tensor([row for row in range(rows) if row != 3])
    one = torch.arange(len(some))
    drawn = Drawn(
        rows=some,
        temperature=torch.rand(len(some), generator=draw) + 0.3,
        top_k=torch.where(one % 3 > 0, 1 + one * 5, vocab_size)
        if filtered
        else one * 0 + vocab_size,
        top_p=torch.where(one % 2 > 0, 0.1 + 0.07 * one.double(), 1.0)
        if filtered
        else one * 0 + 1.0,
        min_p=(0.02 * (one % 4))[:, None].float() if filtered else None,
        uniforms=torch.from_numpy(uniforms(one.tolist(), [7] * len(some))),
    )
    drawn = replace(drawn, top_p=drawn.top_p.double())
    found = ours.draw(logits.clone(), best, drawn)
    wrong[some] |= found != theirs.draw(logits.clone(), expected, drawn)
    return wrong.float().mean().item()


# ---- whole engines


def engine_differs(family: str, rows: int, outputs: int) -> float:
    """Return the share of greedy tokens that differ from sdpa's, in chunks, row beside row."""
    prompts = [
        [5 + (7 * row + 3 * at * at) % 250 for at in range(3 + 14 * row)] for row in range(rows)
    ]
    told = []
    usual = select.OPS
    with TemporaryDirectory() as folder:
        place = Path(folder) / "model"
        model = families.write(place, families.oracle(family)) if family else tiny.write(place)
        for name in ("sdpa", "triton"):
            select.OPS = (("triton", TritonOps),) if name == "triton" else usual
            select.ONLY_ON = {}
            runner = load(model, attention_backend=name, max_model_len=256)
            assert runner.backend == name
            hand = Hand(runner)
            asked = [hand.add(prompt, outputs) for prompt in prompts]
            hand.finish(*asked, outputs=outputs, chunk=8)
            told.append([token for row in asked for token in row.output])
    return sum(a != b for a, b in zip(*told, strict=True)) / len(told[0])


FAMILIES = ("mistral", "qwen2", "qwen3 with windows", "gemma2", "gemma3")
"""Windows, biases, norms of heads, caps, a scale, gelu, two ropes."""

CASES: dict[str, Callable[[], float]] = {
    **{name: partial(attention_off_by, case) for name, case in (ATTENTION | SOAK).items()},
    "fused": partial(fused_off_by, False),
    "fused_normed": partial(fused_off_by, True),
    "ops": partial(ops_off_by, F32),
    "ops_fp16": partial(ops_off_by, F16),
    "engine": partial(engine_differs, "", 2, 2),
    **{f"engine of {name}": partial(engine_differs, name, 2, 6) for name in FAMILIES},
    "choose": partial(chosen_otherwise, False),
    "choose_filtered": partial(chosen_otherwise, True),
}


def plant(name: str) -> None:
    """Put an error into the launches."""
    if name == "scale":
        triton_backend.LOG2_E = 1.4
    else:
        raise SystemExit(f"no error {name!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--plant")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.plant:
        plant(given.plant)
    sys.stdout.write(json.dumps({name: CASES[name]() for name in given.cases}))
