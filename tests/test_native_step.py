"""C++ for CPUs: products, attention and whole steps against PyTorch, in every shape that it serves.

Each test runs once for every target of kernels/native.py that this machine's CPU can run.
"""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.model import Decoder
from engine.rehearsal import text_step
from engine.spec import read_spec
from engine.weights import load_weights
from kernels import native, native_ops
from kernels.base import AttentionBatch, AttentionShape, DecoderWeights, StepBatch
from kernels.native import step_library, targets
from kernels.native_ops import NativeInt4Ops, NativeInt8Ops, NativeOps, threads
from kernels.native_step import NativeBackend, NativeCache
from kernels.ops import TorchOps
from kernels.reference import ReferenceBackend
from tests import families, tiny
from tests.oracle import step_of, weights_of
from tests.test_kernels import MIXED, Scene, attend, batch_of, dense, packed, scene, write_past

MATRICES = ("qkv", "output", "gate_up", "down")
SHAPE = tiny.Shape(hidden=96, heads=6, kv_heads=2, head_dim=32, intermediate=160, vocab_size=330)
"""Nothing a multiple of 64, a vocabulary that no tile divides, three heads to a key head."""


pytestmark = pytest.mark.usefixtures("target", "two_threads")


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 32), (64, 96), (576, 70), (160, 1)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 15, 33, 130])
def test_products_are_products(rows: int, inputs: int, outputs: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=draw).bfloat16()
    weight = torch.randn(outputs, inputs, generator=draw)
    weight[1:2] = 0.0  # a row without a scale
    expected = x.double() @ weight.double().T
    for ops, tolerance in ((NativeOps(threads()), 2e-2), (NativeInt8Ops(threads()), 6e-2)):
        for whole_rows in (False, True):
            product = ops.linear(x, ops.pack(weight, whole_rows=whole_rows)).double()
            assert product.shape == expected.shape
            assert (product - expected).abs().max() / inputs**0.5 < tolerance, ops.name


@pytest.mark.parametrize("inputs", [32, 96, 160, 352, 576, 896, 2016, 2048, 2080])
def test_a_turned_row_keeps_what_is_small_beside_what_is_large(inputs: int) -> None:
    """One scale for the row would lose it; sizes with too odd a part keep a scale for 32 inputs."""
    draw, ops = torch.Generator().manual_seed(inputs), NativeInt8Ops(threads())
    x, weight = torch.randn(7, inputs, generator=draw), torch.randn(64, inputs, generator=draw)
    x[:, 5] = 60.0
    weight[:, 5] = 0.0  # what is large has no part in the result
    packed_weight = ops.pack(weight, whole_rows=True)
    assert isinstance(packed_weight, native_ops.NativeWeight)
    assert packed_weight.turned == (inputs != 2080)
    x = x.bfloat16()
    expected = x.double() @ weight.double().T
    off = (ops.linear(x, packed_weight).double() - expected).norm() / expected.norm()
    one_scale = (x.abs().amax(dim=1) / 127).double()[:, None]
    rounded = (x.double() / one_scale).round() * one_scale
    lost = (rounded @ weight.double().T - expected).norm() / expected.norm()
    assert off < min(0.3 * lost, 0.05) if inputs > 160 else off < 0.5 * lost


def in_4_bits(outputs: int, inputs: int, draw: torch.Generator) -> torch.Tensor:
    """Return weights as GGUF's Q4_1 and Q4_0 hold them, and blocks of few values among them."""
    blocks = (outputs, inputs // 32, 1)
    step = (torch.rand(blocks, generator=draw) * 0.05 + 1e-4).half().float()
    least = (torch.randn(blocks, generator=draw) * 0.3).half().float()
    least[::2] = -8 * step[::2]
    quants = torch.randint(0, 16, (outputs, inputs // 32, 32), generator=draw).float()
    quants[::3] = quants[::3] // 4 + 5  # the ends are not there
    quants[1::7] = 9.0  # one value alone
    quants[5::11] = 3 * (quants[5::11] // 6)  # steps that are several of the file's
    return (quants * step + least).reshape(outputs, inputs)


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 32), (64, 96), (576, 70), (160, 40)])
def test_weights_of_4_bits_are_exact_and_serve_few_rows(inputs: int, outputs: int) -> None:
    """Few rows are as near as rounding the input allows; more rows read them in 8 bits."""
    draw, ops = torch.Generator().manual_seed(inputs), NativeInt8Ops(threads())
    weight = in_4_bits(outputs, inputs, draw)
    packed_weight = ops.pack(weight)
    assert isinstance(packed_weight, native_ops.NativeWeight)
    assert packed_weight.fours is not None
    x = torch.randint(-127, 128, (6, inputs), generator=draw).float()
    x[:, ::32] = 127.0  # so that blocks of input are integers, and nothing of it is rounded
    expected = x.double() @ weight.double().T
    scale = expected.abs().max()
    for rows in (1, 2, 3):
        off = (ops.linear(x[:rows].bfloat16(), packed_weight).double() - expected[:rows]).abs()
        assert off.max() / scale < 4e-3, "bf16 of the result"
    many = (ops.linear(x.bfloat16(), packed_weight).double() - expected).abs().max() / scale
    assert many < 5e-2
    four = NativeInt4Ops(threads())
    for rows in (1, 3, 6):  # where there are 4 bits alone, many rows read them, too
        off = (four.linear(x[:rows].bfloat16(), four.pack(weight)).double() - expected[:rows]).abs()
        assert off.max() / scale < 4e-3
    off_by_a_little = weight.clone()
    off_by_a_little[outputs // 2, inputs // 2] *= 1.001
    assert getattr(ops.pack(off_by_a_little), "fours", weight) is None
    assert getattr(ops.pack(torch.randn(outputs, inputs)), "fours", weight) is None


def test_what_is_no_number_stays_none() -> None:
    """Rounding to int8 must not hide it: the engine ends the request by it."""
    weight = torch.randn(64, 96)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for ops in (NativeOps(threads()), NativeInt8Ops(threads())):
            for whole_rows in (False, True):
                x = torch.randn(11, 96).bfloat16()
                x[3, 70] = bad
                finite = ops.linear(x, ops.pack(weight, whole_rows=whole_rows)).isfinite()
                assert not finite[3].any(), (ops.name, bad)
                others = [row for row in range(11) if row != 3]
                assert finite[others].all(), "the neighbours keep theirs"


def attend_native(
    drawn: Scene, shape: AttentionShape, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    backend = NativeBackend(threads())
    cache = backend.allocate_kv(shape, drawn.blocks, drawn.block_tokens, dtype, "cpu")
    assert isinstance(cache, NativeCache)
    cache.values.fill_(255 if dtype == torch.int8 else 3e4)  # left by earlier owners
    layer = shape.layers - 1
    for position in range(max(context - count for context, count in drawn.rows)):
        write_past(backend, drawn, cache, layer, position)
    spans = [(context - count, context) for context, count in drawn.rows]
    prepared = backend.prepare(batch_of(drawn, spans), cache)
    k, v = packed(drawn.keys, spans), packed(drawn.values, spans)
    return backend.attend(layer, drawn.q, k, v, cache, prepared)


@pytest.mark.parametrize("block_tokens", [16, 32, 256])
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(layers=2, heads=9, kv_heads=3, head_dim=64),
        AttentionShape(layers=1, heads=8, kv_heads=1, head_dim=96),
        AttentionShape(layers=1, heads=2, kv_heads=2, head_dim=128),
        AttentionShape(layers=1, heads=5, kv_heads=1, head_dim=256),
        AttentionShape(layers=1, heads=32, kv_heads=2, head_dim=32),
    ],
    ids=lambda shape: f"{shape.heads}x{shape.head_dim}",
)
@pytest.mark.parametrize(
    "rows",
    [MIXED, [(1, 1)], [(200, 1)], [(70, 1), (130, 1)], [(90, 90)], [(150, 60)], [(20, 1)] * 9],
    ids=lambda rows: f"{len(rows)}rows{rows[0][0]}",
)
def test_paged_attention_is_attention(
    rows: list[tuple[int, int]], shape: AttentionShape, block_tokens: int
) -> None:
    drawn = scene(rows, shape, block_tokens=block_tokens, dtype=torch.bfloat16, padding=1)
    difference = (attend_native(drawn, shape).double() - dense(drawn))[:-1].abs().max().item()
    assert difference < 2e-2


def test_cleared_blocks_leave_no_trace() -> None:
    shape = AttentionShape(layers=2, heads=4, kv_heads=2, head_dim=32)
    backend = NativeBackend(threads())
    cache = backend.allocate_kv(shape, 6, 32, torch.bfloat16, "cpu")
    assert isinstance(cache, NativeCache)
    cache.values.fill_(float("nan"))
    backend.clear_blocks(cache, [1, 4])
    units = cache.values.isnan().flatten(2).any(-1)
    assert units.tolist() == [[block not in (1, 4) for block in range(6) for _ in range(2)]] * 2


def in_torch(path: Path, step: StepBatch, dtype: str) -> torch.Tensor:
    weights, reference = weights_of(path, dtype, positions=256), ReferenceBackend()
    cache = reference.allocate_kv(weights.shape, 9, 16, weights.embedding.dtype, "cpu")
    return Decoder(weights, reference, TorchOps()).forward(step, cache)


def decoder(path: Path, dtype: str, positions: int = 256) -> tuple[Decoder, DecoderWeights]:
    ops = NativeInt8Ops(threads()) if dtype == "int8" else NativeOps(threads())
    weights = load_weights(
        read_spec(str(path)),
        dtype=dtype,
        device="cpu",
        positions=positions,
        pack=ops.pack,
        progress=lambda stage, fraction: None,
    )
    return Decoder(weights, NativeBackend(threads()), ops), weights


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "times"), [("bf16", 1.3), ("int8", 5.0)])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 40, 100])
def test_a_step_is_the_model(tmp_path: Path, dtype: str, times: float, count: int) -> None:
    """Against PyTorch in float32, with its bf16 as the yardstick; and against its own parts."""
    path = tiny.write(tmp_path / "tiny", shape=SHAPE)
    tokens = [(7 * i + 3) % 330 for i in range(count)]
    step = step_of(tokens)
    expected, rounded = (in_torch(path, step, dtype) for dtype in ("f32", "bf16"))
    tolerance = times * (rounded - expected).norm() / expected.norm()
    model, packed_weights = decoder(path, dtype)
    shape = packed_weights.shape
    kv = NativeBackend(threads()).allocate_kv(shape, 9, 16, torch.bfloat16, "cpu")
    logits, logits_of = model.forward_all(step, kv)
    assert logits.shape == expected.shape
    assert (logits - expected).norm() / expected.norm() < tolerance
    assert torch.equal(logits_of(step.sample_tokens), logits)
    again = logits_of(torch.tensor([count - 1, 0]))
    told = logits_of(torch.arange(count))[[count - 1, 0]]
    assert (again - told).norm() / told.norm() < tolerance
    in_parts = model.logits(model.hidden(step, kv), step.sample_tokens)
    assert (in_parts - logits).norm() / expected.norm() < tolerance
    assert packed_weights.embedding.dtype == torch.bfloat16


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "times"), [("bf16", 1.5), ("int8", 6.0)])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_step_of_a_qwen_is_the_model(tmp_path: Path, name: str, dtype: str, times: float) -> None:
    """Biases of queries, keys and values, norms of heads: a prompt whole, in chunks, by tokens."""
    model = families.oracle(name, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    path = families.write(tmp_path / "model", model)
    tokens = [(7 * i + 3) % 310 for i in range(40)]
    expected, rounded = (in_torch(path, step_of(tokens), kind) for kind in ("f32", "bf16"))
    tolerance = times * (rounded - expected).norm() / expected.norm()
    native_model, weights = decoder(path, dtype)
    backend = NativeBackend(threads())
    assert backend.supports(weights.shape, "cpu", torch.bfloat16, 16) is None
    for rows in (40, 1, 7):
        cache = backend.allocate_kv(weights.shape, 9, 16, torch.bfloat16, "cpu")
        steps = [text_step(tokens, first, rows, 16) for first in range(0, 40, rows)]
        logits = torch.cat([native_model.forward(step, cache) for step in steps])
        assert (logits - expected).norm() / expected.norm() < tolerance


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_decoding_goes_on_where_a_prompt_ended(tmp_path: Path, dtype: str) -> None:
    """Token by token, in chunks or at once, beside others or alone: the same logits."""
    path = tiny.write(tmp_path / "tiny", shape=SHAPE)
    tokens = [(11 * i + 5) % 330 for i in range(90)]
    model, weights = decoder(path, dtype)
    backend = NativeBackend(threads())
    whole = model.forward(
        step_of(tokens), backend.allocate_kv(weights.shape, 9, 16, torch.bfloat16, "cpu")
    )
    for cuts in ([30, 31, 32, 64, 90], [16, 90], [1, 2, 3, 90]):
        cache = backend.allocate_kv(weights.shape, 20, 16, torch.bfloat16, "cpu")
        start = 0
        for stop in cuts:
            logits = model.forward(piece(tokens, start, stop), cache)
            assert (logits[-1] - whole[stop - 1]).abs().max() / whole.abs().max() < 2e-2
            start = stop


@torch.inference_mode()
def test_a_step_in_4_bits_is_one_of_few_rows_in_8(tmp_path: Path) -> None:
    """Which reads the same weights; the head is in 8 bits in both."""
    path = tiny.write(tmp_path / "tiny", shape=SHAPE)
    tokens, draw = [(13 * i + 2) % 330 for i in range(30)], torch.Generator().manual_seed(1)
    backend, logits = NativeBackend(threads()), {}
    weights = load_weights(
        read_spec(str(path)),
        dtype="int4",
        device="cpu",
        positions=64,
        pack=TorchOps().pack,
        progress=lambda stage, fraction: None,
    )
    drawn = [
        {name: in_4_bits(*getattr(layer, name).shape, draw) for name in MATRICES}
        for layer in weights.layers
    ]
    for ops, rows in ((NativeInt4Ops(threads()), 30), (NativeInt8Ops(threads()), 3)):
        layers = tuple(
            replace(layer, **{name: ops.pack(weight) for name, weight in one.items()})
            for layer, one in zip(weights.layers, drawn, strict=True)
        )
        whole = replace(weights, layers=layers, head=ops.pack(torch.as_tensor(weights.head)))
        cache = backend.allocate_kv(whole.shape, 4, 16, torch.bfloat16, "cpu")
        model = Decoder(whole, backend, ops)
        steps = [text_step(tokens, first, rows, 16) for first in range(0, 30, rows)]
        logits[ops.name] = torch.cat([model.forward(step, cache) for step in steps])
    off = logits["native-int4"] - logits["native-int8"]
    assert off.norm() / logits["native-int8"].norm() < 2e-2


@torch.inference_mode()
def test_a_step_tells_where_its_time_went_if_it_is_asked(tmp_path: Path) -> None:
    model, weights = decoder(tiny.write(tmp_path / "tiny", shape=SHAPE), "int8")
    cache = NativeBackend(threads()).allocate_kv(weights.shape, 9, 16, torch.bfloat16, "cpu")
    threads().profile(on=True)
    began_ns = time.perf_counter_ns()
    for _ in range(3):
        model.forward(step_of([5] * 40), cache)
    spent_ns = time.perf_counter_ns() - began_ns
    parts = threads().profile(on=False)
    assert all(parts[name] > 0 for name in ("norms", "linear", "attention", "head"))
    assert sum(parts.values()) < spent_ns
    model.forward(step_of([5] * 40), cache)
    assert not any(threads().profile(on=False).values())


@torch.inference_mode()
def test_a_long_step_beats(tmp_path: Path) -> None:
    """Long enough for a beat whatever the machine: 1,500 tokens, each attending to all before."""
    shape = tiny.Shape(layers=12, hidden=256, heads=8, head_dim=32, intermediate=512)
    path, beats = tiny.write(tmp_path / "tiny", shape=shape), 0

    def beat() -> None:
        nonlocal beats
        beats += 1

    _, weights = decoder(path, "bf16", positions=1500)
    backend = NativeBackend(threads())
    cache = backend.allocate_kv(weights.shape, 96, 16, torch.bfloat16, "cpu")
    backend.step(weights, step_of([7] * 1500), cache, beat)
    assert beats > 0


def piece(tokens: list[int], start: int, stop: int) -> StepBatch:
    """Tokens start..stop of a sequence in blocks 1 on, beside three decodes of another."""
    count, others = stop - start, 3
    table = list(range(1, 8))
    lengths, contexts = [count] + [1] * others, [stop] + [17] * others
    slots = [16 + position for position in range(start, stop)] + [16 * 12 + 0] * others
    return StepBatch(
        input_ids=torch.tensor(tokens[start:stop] + [9] * others),
        positions=torch.tensor([*range(start, stop), *[16] * others]),
        sample_tokens=torch.tensor([count - 1]),
        attention=AttentionBatch(
            query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
            context_lengths=torch.tensor(contexts).int(),
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor([table] + [[10, 12, 0, 0, 0, 0, 0]] * others).int(),
            query_lengths_host=lengths,
            context_lengths_host=contexts,
        ),
    )


def test_scenes_of_the_reference_agree(tmp_path: Path) -> None:
    shape = AttentionShape(layers=1, heads=6, kv_heads=2, head_dim=64)
    drawn = scene([(300, 1), (40, 40), (17, 2)], shape, dtype=torch.bfloat16)
    difference = attend_native(drawn, shape) - attend(ReferenceBackend(), drawn, shape)
    assert difference.abs().max() < 3e-2


def test_it_says_what_it_cannot_serve() -> None:
    shape = AttentionShape(layers=1, heads=4, kv_heads=2, head_dim=48)
    backend = NativeBackend(threads())
    assert "head dimension 48" in (backend.supports(shape, "cpu", torch.bfloat16, 16) or "")
    fits = AttentionShape(layers=1, heads=4, kv_heads=2, head_dim=64)
    assert "multiples of 16" in (backend.supports(fits, "cpu", torch.bfloat16, 24) or "")
    assert "not for cuda" in (backend.supports(fits, "cuda", torch.bfloat16, 16) or "")
    assert "not in f32" in (backend.supports(fits, "cpu", torch.float32, 16) or "")
    wide = AttentionShape(layers=1, heads=64, kv_heads=2, head_dim=64)
    assert "32 query heads" in (backend.supports(wide, "cpu", torch.bfloat16, 16) or "")


def test_the_best_that_the_processor_runs_serves(target: str) -> None:
    """As on a CPU without AVX-512, or without AVX2: what is left serves, and nothing refuses."""
    assert targets()[0] == target
    assert targets()[-1] == "portable"
    assert threads().functions._name.endswith(f"-{target}.so")
    for dtype in (torch.bfloat16, torch.int8):
        assert native_ops.refusal("cpu", dtype) is None


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(native, "_folders", lambda: (tmp_path / "none",))
    step_library.cache_clear()
    assert "no C++ compiler" in (native_ops.refusal("cpu", torch.int8) or "")
    step_library.cache_clear()
