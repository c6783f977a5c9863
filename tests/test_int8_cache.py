"""Keys and values in int8: C++ against attention in float64, for every target and in odd shapes.

What is compared is twofold: exact attention, from which rounding to 8 bits may differ by so much,
and exact attention over what the cache should hold, from which nearly nothing may.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.rehearsal import text_step
from kernels.base import AttentionShape
from kernels.native_ops import threads
from kernels.native_step import NativeBackend, NativeCache
from tests import tiny
from tests.oracle import step_of
from tests.test_kernels import MIXED, Scene, batch_of, dense, packed, scene
from tests.test_native_step import SHAPE as MODEL
from tests.test_native_step import attend_native, decoder, in_torch, piece

pytestmark = pytest.mark.usefixtures("target", "two_threads")

ROUNDED, EXACT = 2.5e-2, 5e-2
"""Outputs are averages of values of up to 4.8; the first is a few roundings to bf16 of these."""
GROUPED = AttentionShape(layers=1, heads=6, kv_heads=2, head_dim=64)


def uneven(drawn: Scene) -> Scene:
    """Give each token a size of its own, so that a neighbour's scale would be wrong."""
    draw = torch.Generator().manual_seed(3)

    def sized(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [torch.rand(*part.shape[:2], 1, generator=draw) + 0.2 for part in parts]
        return [(part * size).to(part.dtype) for part, size in zip(parts, sizes, strict=True)]

    return replace(drawn, keys=sized(drawn.keys), values=sized(drawn.values))


def in_8_bits(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a cache in int8 holds of keys or values."""
    scales = [part.double().abs().amax(-1, keepdim=True) / 127 for part in parts]
    return [(part / scale).round() * scale for part, scale in zip(parts, scales, strict=True)]


@pytest.mark.parametrize("block_tokens", [16, 256])
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(layers=2, heads=9, kv_heads=3, head_dim=64),
        AttentionShape(layers=1, heads=8, kv_heads=1, head_dim=96),
        AttentionShape(layers=1, heads=5, kv_heads=1, head_dim=256),
        AttentionShape(layers=1, heads=32, kv_heads=2, head_dim=32),
    ],
    ids=lambda shape: f"{shape.heads}x{shape.head_dim}",
)
@pytest.mark.parametrize(
    "rows",
    [MIXED, [(1, 1)], [(300, 1)], [(70, 1), (130, 1)], [(150, 60)], [(20, 1)] * 9],
    ids=lambda rows: f"{len(rows)}rows{rows[0][0]}",
)
def test_attention_over_int8_is_attention(
    rows: list[tuple[int, int]], shape: AttentionShape, block_tokens: int
) -> None:
    plain = scene(rows, shape, block_tokens=block_tokens, dtype=torch.bfloat16, padding=1)
    drawn = uneven(plain)
    out = attend_native(drawn, shape, torch.int8).double()
    held = replace(drawn, keys=in_8_bits(drawn.keys), values=in_8_bits(drawn.values))
    assert (out - dense(held))[:-1].abs().max() < ROUNDED
    assert (out - dense(drawn))[:-1].abs().max() < EXACT


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
def test_a_neighbours_scale_would_be_seen(which: int) -> None:
    """The tolerances above are worth something."""
    drawn = uneven(scene([(70, 1), (40, 1)], GROUPED, dtype=torch.bfloat16))
    right, wrong = attention_with_scales(drawn, None), attention_with_scales(drawn, which)
    expected = dense(drawn)
    assert (right.double() - expected).abs().max() < EXACT
    assert (wrong.double() - expected).abs().max() > 2 * EXACT


def attention_with_scales(drawn: Scene, moved: int | None) -> torch.Tensor:
    """Attend over a cache whose scales of keys or of values were moved on by a token."""
    backend = NativeBackend(threads())
    cache = cache_of(backend, drawn, GROUPED)
    whole = [(0, context) for context, _ in drawn.rows]
    step(backend, drawn, cache, whole)
    if moved is not None:
        held = scales(cache)[..., 16 * moved : 16 * (moved + 1)]
        held.copy_(held.roll(1, -1))
    return step(backend, drawn, cache, [(context - 1, context) for context, _ in drawn.rows])


def scales(cache: NativeCache) -> torch.Tensor:
    """Return each unit's scales: of 16 keys, then of 16 values."""
    return cache.values[..., -128:].view(torch.float32)


def cache_of(backend: NativeBackend, drawn: Scene, shape: AttentionShape) -> NativeCache:
    cache = backend.allocate_kv(shape, drawn.blocks, drawn.block_tokens, torch.int8, "cpu")
    assert isinstance(cache, NativeCache)
    return cache


def step(
    backend: NativeBackend, drawn: Scene, cache: NativeCache, spans: list[tuple[int, int]]
) -> torch.Tensor:
    """Compute these tokens of each row; queries are the scene's where they are its last ones."""
    count = sum(stop - start for start, stop in spans)
    q = drawn.q if count == len(drawn.q) else torch.ones(count, *drawn.q.shape[1:]).bfloat16()
    k, v = packed(drawn.keys, spans), packed(drawn.values, spans)
    return backend.attend(0, q, k, v, cache, backend.prepare(batch_of(drawn, spans), cache))


@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(bad: float, what: str) -> None:
    """A decode and a chunk that see it are none; who shares the step is spared."""
    for rows in ([(70, 1), (40, 1)], [(70, 5), (40, 5)]):
        drawn = scene(rows, GROUPED, dtype=torch.bfloat16)
        parts: list[torch.Tensor] = getattr(drawn, what)
        parts[0][33, 1, 7] = bad
        out = attend_native(drawn, GROUPED, torch.int8).isfinite().all(-1)
        count = rows[0][1]
        assert out[:count, :3].all(), "the other key head's"
        assert not out[:count, 3:].any()
        assert out[count:].all()


def test_a_query_that_is_no_number_stays_none() -> None:
    drawn = scene([(70, 1), (40, 1)], GROUPED, dtype=torch.bfloat16)
    drawn.q[0, 4, 5] = float("inf")
    out = attend_native(drawn, GROUPED, torch.int8).isfinite().all(-1)
    assert out.tolist() == [[True] * 4 + [False, True], [True] * 6]


def test_cleared_blocks_leave_no_trace() -> None:
    shape = AttentionShape(layers=2, heads=4, kv_heads=2, head_dim=32)
    backend = NativeBackend(threads())
    cache = backend.allocate_kv(shape, 6, 32, torch.int8, "cpu")
    assert isinstance(cache, NativeCache)
    cache.values.fill_(255)
    backend.clear_blocks(cache, [1, 4])
    units = scales(cache).isnan().flatten(2).any(-1)
    assert units.tolist() == [[block not in (1, 4) for block in range(6) for _ in range(2)]] * 2
    assert not cache.values[:, 2:4].any()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_step_is_the_model_and_decoding_goes_on(tmp_path: Path, dtype: str) -> None:
    """Token by token, in chunks or at once, beside others or alone: the same logits."""
    path = tiny.write(tmp_path / "tiny", shape=MODEL)
    tokens = [(11 * i + 5) % 330 for i in range(90)]
    model, weights = decoder(path, dtype)
    backend = NativeBackend(threads())
    whole = model.forward(
        step_of(tokens), backend.allocate_kv(weights.shape, 9, 16, torch.int8, "cpu")
    )
    expected, rounded = (in_torch(path, step_of(tokens), kind) for kind in ("f32", "bf16"))
    off = (whole - expected).norm() / (rounded - expected).norm()
    assert off < (3.0 if dtype == "bf16" else 6.0)
    for cuts in ([30, 31, 32, 64, 90], [16, 90], [1, 2, 3, 90]):
        cache = backend.allocate_kv(weights.shape, 20, 16, torch.int8, "cpu")
        start = 0
        for stop in cuts:
            logits = model.forward(piece(tokens, start, stop), cache)
            assert (logits[-1] - whole[stop - 1]).abs().max() / whole.abs().max() < 4e-2
            start = stop
    cache = backend.allocate_kv(weights.shape, 9, 16, torch.int8, "cpu")
    steps = [text_step(tokens, first, 1, 16) for first in range(90)]
    decoded = torch.cat([model.forward(one, cache) for one in steps])
    assert (decoded - whole).norm() / whole.norm() < 4e-2
