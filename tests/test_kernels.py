"""Attention and ops: every backend against the oracle, the oracle against plain attention.

Owns the tests of kernels/. A scene is a set of rows with their contexts and query lengths; its
history is written through the backend itself, into blocks in no order, among stale values.
"""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from kernels import sdpa, select
from kernels.base import AttentionBackend, AttentionBatch, AttentionShape, BackendError
from kernels.ops import OneDnnOps, TorchOps
from kernels.reference import ReferenceBackend, ReferenceCache
from kernels.sdpa import SdpaBackend, SdpaCache

GROUPED = AttentionShape(layers=2, heads=9, kv_heads=3, head_dim=64)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Outputs are averages of values of size 1: a few roundings of the type."""

MIXED = [(1, 1), (5, 1), (16, 1), (17, 1), (40, 1), (40, 7), (33, 33), (18, 2), (1, 1), (16, 16)]
"""(context, query) of each row: decodes on and off block borders, chunks with and without past."""


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Scene:
    """Rows over a paged cache: full keys and values of each row, and where they lie."""

    rows: list[tuple[int, int]]
    tables: list[list[int]]
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    block_tokens: int
    blocks: int


def scene(
    rows: list[tuple[int, int]],
    shape: AttentionShape = GROUPED,
    *,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> Scene:
    """Draw a scene; `padding` rows at its end lie in block 0 with a context of one token."""
    draw = torch.Generator().manual_seed(len(rows) * 1000 + block_tokens)
    needed = [-(-context // block_tokens) + 1 for context, _ in rows]  # one reserved ahead
    order = (torch.randperm(sum(needed) + 3, generator=draw) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed] + [[0]] * padding
    rows = rows + [(1, 1)] * padding

    def normal(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, shape.head_dim, generator=draw).to(dtype)

    return Scene(
        rows=rows,
        tables=tables,
        q=normal(sum(count for _, count in rows), shape.heads),
        keys=[normal(context, shape.kv_heads) for context, _ in rows],
        values=[normal(context, shape.kv_heads) for context, _ in rows],
        block_tokens=block_tokens,
        blocks=sum(needed) + 4,
    )


def batch_of(scene: Scene, spans: list[tuple[int, int]]) -> AttentionBatch:
    """Return the batch of rows whose tokens start..stop are computed (spans of every row)."""
    size = scene.block_tokens
    slots = [
        table[position // size] * size + position % size
        for table, (start, stop) in zip(scene.tables, spans, strict=True)
        for position in range(start, stop)
    ]
    width = max(-(-stop // size) for _, stop in spans)
    counts = [stop - start for start, stop in spans]
    return AttentionBatch(
        query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
        context_lengths=torch.tensor([stop for _, stop in spans]).int(),
        slot_mapping=torch.tensor(slots),
        block_tables=torch.tensor(
            [(table + [0] * width)[:width] for table in scene.tables], dtype=torch.int32
        ),
        query_lengths_host=counts,
        context_lengths_host=[stop for _, stop in spans],
    )


def packed(parts: list[torch.Tensor], spans: list[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([part[start:stop] for part, (start, stop) in zip(parts, spans, strict=True)])


def attend(
    backend: AttentionBackend, scene: Scene, shape: AttentionShape = GROUPED, *, stale: float = 3e4
) -> torch.Tensor:
    """Run the scene: write each row's past one token after another, then its last tokens."""
    dtype = scene.q.dtype
    cache = backend.allocate_kv(shape, scene.blocks, scene.block_tokens, dtype, "cpu")
    fill_stale(cache, stale)
    layer = shape.layers - 1
    for position in range(max(context - count for context, count in scene.rows)):
        write_past(backend, scene, cache, layer, position)
    spans = [(context - count, context) for context, count in scene.rows]
    prepared = backend.prepare(batch_of(scene, spans), cache)
    k, v = packed(scene.keys, spans), packed(scene.values, spans)
    return backend.attend(layer, scene.q, k, v, cache, prepared)


def write_past(
    backend: AttentionBackend, scene: Scene, cache: object, layer: int, position: int
) -> None:
    """Compute one token of each row whose past reaches this position, as a step of decodes."""
    live = [row for row, (context, count) in enumerate(scene.rows) if position < context - count]
    part = replace(
        scene,
        rows=[scene.rows[row] for row in live],
        tables=[scene.tables[row] for row in live],
        keys=[scene.keys[row] for row in live],
        values=[scene.values[row] for row in live],
    )
    spans = [(position, position + 1)] * len(live)
    prepared = backend.prepare(batch_of(part, spans), cache)
    k, v = packed(part.keys, spans), packed(part.values, spans)
    backend.attend(layer, scene.q[: len(live)], k, v, cache, prepared)


def fill_stale(cache: object, value: float) -> None:
    """Leave values of earlier owners everywhere."""
    assert isinstance(cache, SdpaCache | ReferenceCache)
    cache.keys.fill_(value)
    cache.values.fill_(-value)


def dense(scene: Scene) -> torch.Tensor:
    """Return the scene's attention by PyTorch over whole, unpaged sequences, in float64."""
    out = []
    start = 0
    for (context, count), k, v in zip(scene.rows, scene.keys, scene.values, strict=True):
        q = scene.q[start : start + count].double().transpose(0, 1)
        seen = torch.ones(count, context).tril(context - count).bool()
        out.append(
            F.scaled_dot_product_attention(
                q[None],
                k.double().transpose(0, 1)[None],
                v.double().transpose(0, 1)[None],
                attn_mask=seen,
                enable_gqa=True,
            )[0].transpose(0, 1)
        )
        start += count
    return torch.cat(out)


@pytest.mark.parametrize("backend", [ReferenceBackend(), SdpaBackend()], ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [16, 5])
def test_paged_attention_is_attention(
    backend: AttentionBackend, dtype: torch.dtype, block_tokens: int
) -> None:
    drawn = scene(MIXED, dtype=dtype, block_tokens=block_tokens, padding=2)
    difference = (attend(backend, drawn).double() - dense(drawn))[:-2].abs().max().item()
    assert difference < TOLERANCE[dtype]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1), (6, 2)])
@pytest.mark.parametrize(
    "rows",
    [
        MIXED,
        [(64, 1)] * 5,
        [(20, 1), (31, 1), (17, 1)],
        [(31, 1)] * 3,
        [(1, 1)],
        [(100, 1), (3, 1), (64, 1), (65, 1)],
        [(50, 50)],
        [(130, 130), (64, 64), (65, 65), (600, 600)],
        [(50, 3)],
    ],
)
def test_sdpa_agrees_with_the_oracle(
    heads: int, kv_heads: int, rows: list[tuple[int, int]]
) -> None:
    shape = AttentionShape(layers=1, heads=heads, kv_heads=kv_heads, head_dim=16)
    drawn = scene(rows, shape)
    expected = attend(ReferenceBackend(), drawn, shape)
    assert torch.allclose(attend(SdpaBackend(), drawn, shape), expected, atol=2e-6, rtol=0)


def test_a_row_does_not_depend_on_how_rows_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = scene(MIXED)
    together = attend(SdpaBackend(), drawn)
    monkeypatch.setattr(sdpa, "GATHER_BYTES_MAX", 1)
    alone = attend(SdpaBackend(), drawn)
    assert torch.allclose(together, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", [ReferenceBackend(), SdpaBackend()], ids=lambda one: one.name)
def test_cleared_blocks_leave_no_trace(backend: AttentionBackend) -> None:
    drawn = scene([(20, 1), (5, 1), (33, 1)])
    clean = attend(backend, drawn)
    cache = backend.allocate_kv(GROUPED, drawn.blocks, 16, torch.float32, "cpu")
    fill_stale(cache, float("nan"))
    backend.clear_blocks(cache, list(range(drawn.blocks)))
    spans = [(0, context) for context, _ in drawn.rows]
    q = torch.zeros(sum(context for context, _ in drawn.rows), 9, 64)
    ends = batch_of(drawn, spans).query_starts[1:].long() - 1
    q[ends] = drawn.q
    k, v = packed(drawn.keys, spans), packed(drawn.values, spans)
    backend.attend(1, q, k, v, cache, backend.prepare(batch_of(drawn, spans), cache))
    spans = [(context - 1, context) for context, _ in drawn.rows]
    k, v = packed(drawn.keys, spans), packed(drawn.values, spans)
    again = backend.attend(1, drawn.q, k, v, cache, backend.prepare(batch_of(drawn, spans), cache))
    assert torch.allclose(again, clean, atol=1e-6, rtol=0)


def test_layers_do_not_share_their_cache() -> None:
    drawn = scene([(8, 8)])
    spans = [(0, 8)]
    for backend in (ReferenceBackend(), SdpaBackend()):
        cache = backend.allocate_kv(GROUPED, drawn.blocks, 16, torch.float32, "cpu")
        prepared = backend.prepare(batch_of(drawn, spans), cache)
        backend.attend(0, drawn.q, drawn.keys[0], drawn.values[0], cache, prepared)
        assert isinstance(cache, SdpaCache | ReferenceCache)
        assert cache.keys[0].abs().sum() > 0
        assert cache.keys[1].abs().sum() == 0


# ---- ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 32, 100])
def test_packed_linear_is_linear(rows: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=draw).to(dtype)
    weight = torch.randn(160, 96, generator=draw).to(dtype)
    packed_ops, plain = OneDnnOps(), TorchOps()
    assert packed_ops.supports("cpu", dtype) is None
    product = packed_ops.linear(x, packed_ops.pack(weight)).double()
    expected = x.double() @ weight.double().T
    scale = expected.abs().max()
    assert (product - expected).abs().max() / scale < (1e-6 if dtype == torch.float32 else 5e-3)
    assert (plain.linear(x, plain.pack(weight)).double() - product).abs().max() / scale < 1e-2


def test_packed_linear_is_for_cpus_and_their_types() -> None:
    assert "not for cuda" in (OneDnnOps().supports("cuda", torch.bfloat16) or "")
    assert "float64" in (OneDnnOps().supports("cpu", torch.float64) or "")


def test_norms_are_over_the_root_mean_square() -> None:
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    total = (x + residual).double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed, kept = TorchOps().add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.allclose(normed.double(), expected, atol=1e-6)
    assert torch.equal(kept, x + residual)
    assert torch.allclose(TorchOps().rms_norm(x + residual, weight, 1e-5), normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_turns_adjacent_pairs(dtype: torch.dtype) -> None:
    angles = torch.randn(4, 8)
    x = torch.randn(4, 3, 16).to(dtype)
    turned = TorchOps().rope(x.clone(), torch.stack([angles.cos(), angles.sin()], -1))
    for pair in range(8):
        first, second = x[..., 2 * pair].float(), x[..., 2 * pair + 1].float()
        cosine, sine = angles[:, None, pair].cos(), angles[:, None, pair].sin()
        expected = torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1)
        assert torch.allclose(turned[..., 2 * pair : 2 * pair + 2].float(), expected, atol=2e-2)
    assert turned.dtype == dtype


def test_the_gate_opens_the_up_half() -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    out = TorchOps().silu_multiply(torch.cat([gate, up], -1))
    assert torch.allclose(out, gate * torch.sigmoid(gate) * up, atol=1e-6)


# ---- who is chosen


NATIVE = {"native", "native ops", "native-int8 ops", "native-int4 ops"}
"""What refuses float32."""
GPU = {"flash_attn", "triton", "triton ops"}
"""What refuses a CPU."""


def choose(name: str, dtype: torch.dtype = torch.float32) -> select.Choice:
    return select.choose(name, GROUPED, device="cpu", dtype=dtype, block_tokens=16)


def test_auto_takes_the_first_that_serves_and_keeps_refusals() -> None:
    assert choose("auto").backend.name == "sdpa"
    assert set(choose("auto").refusals) == NATIVE | GPU
    chosen = choose("auto", torch.float64)
    assert chosen.backend.name == "reference"
    assert set(chosen.refusals) == NATIVE | GPU | {"onednn ops", "sdpa"}
    assert "float64" in chosen.refusals["sdpa"]


def test_a_backend_asked_for_by_name_serves_or_fails_loudly() -> None:
    assert choose("reference").backend.name == "reference"
    with pytest.raises(BackendError, match="does not compute in float64"):
        choose("sdpa", torch.float64)
    with pytest.raises(
        BackendError, match="no attention backend 'flash'; there are native, flash_attn"
    ):
        choose("flash")


def test_a_backend_that_cannot_be_loaded_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> AttentionBackend:
        raise ImportError("No module named 'fast_attention'")

    monkeypatch.setattr(select, "BACKENDS", (("fast", absent), *select.BACKENDS))
    chosen = choose("auto")
    assert chosen.backend.name == "sdpa"
    assert chosen.refusals["fast"] == "cannot be loaded: No module named 'fast_attention'"
    with pytest.raises(BackendError, match="cannot serve: cannot be loaded"):
        choose("fast")
