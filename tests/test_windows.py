"""Attention that sees a window, caps its scores or scales them anew: every backend against float64.

Owns the tests of what AttentionShape asks beyond plain causal attention. Scenes are those of
test_kernels.py: blocks in no order, among stale values, decodes and chunks in one step.
"""

import pytest
import torch

from kernels import sdpa
from kernels.base import AttentionBackend, AttentionShape
from kernels.native_step import refusal_of
from kernels.reference import ReferenceBackend
from kernels.sdpa import SdpaBackend
from tests.test_kernels import MIXED, TOLERANCE, Scene, attend, batch_of, fill_stale, packed, scene

BACKENDS = (ReferenceBackend(), SdpaBackend())
LONG = [(700, 700), (40, 40), (90, 30), (650, 600), (333, 1), (64, 1), (3, 1), (12, 12)]


pytestmark = pytest.mark.usefixtures("one_thread")


def shape_of(window: int, **values: float) -> AttentionShape:
    """Return a shape whose last layer has this window, its first another."""
    sizes = {"layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 16}
    return AttentionShape(**sizes, windows=(11, window), **values)  # type: ignore[arg-type]


def exact(drawn: Scene, shape: AttentionShape, window: int) -> torch.Tensor:
    """Return the scene's attention written out token by token, in float64."""
    out = []
    start = 0
    scale = shape.scale or shape.head_dim**-0.5
    for (context, count), keys, values in zip(drawn.rows, drawn.keys, drawn.values, strict=True):
        for token in range(count):
            last = context - count + token + 1
            seen = slice(max(0, last - window) if window else 0, last)
            k = keys[seen].double().repeat_interleave(shape.heads // shape.kv_heads, 1)
            v = values[seen].double().repeat_interleave(shape.heads // shape.kv_heads, 1)
            scores = (k * drawn.q[start + token].double()).sum(-1) * scale
            if shape.cap:
                scores = shape.cap * (scores / shape.cap).tanh()
            out.append((scores.softmax(0)[..., None] * v).sum(0))
        start += count
    return torch.stack(out)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [16, 5])
@pytest.mark.parametrize(
    ("window", "values"),
    [(1, {}), (7, {}), (16, {}), (33, {}), (0, {"cap": 2.0}), (9, {"cap": 0.5, "scale": 0.3})],
)
def test_mixed_rows_see_their_window(
    backend: AttentionBackend,
    dtype: torch.dtype,
    block_tokens: int,
    window: int,
    values: dict[str, float],
) -> None:
    shape = shape_of(window, **values)
    drawn = scene(MIXED, shape, dtype=dtype, block_tokens=block_tokens, padding=2)
    difference = attend(backend, drawn, shape).double() - exact(drawn, shape, window)
    assert difference[:-2].abs().max().item() < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [1, 50, 512, 600, 0])
@pytest.mark.parametrize("values", [{}, {"cap": 1.5, "scale": 0.4}])
def test_long_chunks_see_their_window(window: int, values: dict[str, float]) -> None:
    """Longer than a part, with and without history, beside decodes."""
    shape = shape_of(window, **values)
    drawn = scene(LONG, shape)
    expected = attend(ReferenceBackend(), drawn, shape)
    assert torch.allclose(attend(SdpaBackend(), drawn, shape), expected, atol=2e-6, rtol=0)


def test_only_what_a_window_sees_is_gathered() -> None:
    """A row of 325 tokens with a window of 11 looks in two blocks of 16, not in 21."""
    shape = shape_of(11)
    drawn = scene([(325, 1)], shape)
    backend = SdpaBackend()
    cache = backend.allocate_kv(shape, drawn.blocks, 16, torch.float32, "cpu")
    prepared = backend.prepare(batch_of(drawn, [(324, 325)]), cache)
    assert isinstance(prepared, sdpa._Prepared)
    assert prepared.views[11].decodes[0].gather.numel() == 2 * shape.kv_heads


def test_a_window_longer_than_every_row_costs_nothing() -> None:
    shape = AttentionShape(layers=2, heads=6, kv_heads=2, head_dim=16, windows=(64, 0))
    drawn = scene([(20, 1), (40, 40)], shape)
    backend = SdpaBackend()
    cache = backend.allocate_kv(shape, drawn.blocks, 16, torch.float32, "cpu")
    prepared = backend.prepare(batch_of(drawn, [(19, 20), (0, 40)]), cache)
    assert isinstance(prepared, sdpa._Prepared)
    assert prepared.views[64] is prepared.views[0]


def test_layers_differ_by_their_windows() -> None:
    """One step: layer 0 sees 11 tokens, layer 1 all of them."""
    shape = shape_of(0)
    drawn = scene([(60, 60)], shape)
    for backend in BACKENDS:
        cache = backend.allocate_kv(shape, drawn.blocks, 16, torch.float32, "cpu")
        fill_stale(cache, 3e4)
        spans = [(0, 60)]
        prepared = backend.prepare(batch_of(drawn, spans), cache)
        k, v = packed(drawn.keys, spans), packed(drawn.values, spans)
        for layer, window in enumerate(shape.windows):
            out = backend.attend(layer, drawn.q, k, v, cache, prepared)
            assert torch.allclose(out.double(), exact(drawn, shape, window), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"windows": (8, 0)}, "a window of 8 tokens"),
        ({"cap": 50.0}, "a cap on scores"),
        ({"scale": 0.5}, "scores scaled by 0.5"),
        ({"beyond": ("biases", "gelu", "two ropes")}, "this model has gelu, two ropes"),
    ],
)
def test_cpp_refuses_what_it_does_not_compute(values: dict[str, object], cause: str) -> None:
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
    shape = AttentionShape(**sizes, **values)  # type: ignore[arg-type]
    assert cause in (refusal_of(shape, "cpu", torch.bfloat16, 16) or "")


PLAIN = AttentionShape(layers=2, heads=4, kv_heads=2, head_dim=32)


def test_integers_are_no_keys() -> None:
    assert "int8" in (ReferenceBackend().supports(PLAIN, "cpu", torch.int8, 16) or "")
    assert "int8" in (SdpaBackend().supports(PLAIN, "cpu", torch.int8, 16) or "")
