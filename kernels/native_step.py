"""A whole decoder step in C++ on a CPU with AVX-512 BF16: the native backend and its ops.

Owns the packing of weights into tiles, the cache that kernels/cpu/attention.h lays out, and what
crosses to C++ as pointers. kernels/select.py offers both by name; they come as a pair, since a step
reads the weights that these ops packed. Never called on a CPU that cannot run it.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from kernels.base import (
    AttentionBatch,
    AttentionShape,
    Beat,
    Cache,
    DecoderWeights,
    PackedWeight,
    Prepared,
    StepBatch,
    beyond_a_llama,
)
from kernels.choose import Drawn
from kernels.native import NativeError, library
from kernels.ops import TorchOps

TILE = 32
UNIT_TOKENS = 16
FOUR_BYTES, UNIT = 640, 32 * 32
"""Bytes of so many weights in 4 bits, with what they are scaled by."""
HEAD_DIM_MAX = 256
BF16, INT8 = 0, 1
"""What C++ calls the forms of packed weights."""
FORMATS = {torch.bfloat16: BF16, torch.int8: INT8}
"""Those by the type that an engine is asked for; keys, values and activations are bf16 in both."""


_BEAT = ctypes.CFUNCTYPE(None)


_DRAW = np.dtype(
    [
        *(("temperature", "f4"), ("min_p", "f4"), ("top_k", "i8"), ("top_p", "f8")),
        ("uniform", "f8"),
    ]
)
"""struct Draw of kernels/cpu/choose.h."""


def _told(logits: torch.Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    """Return the vocabulary of float32 logits [S, vocabulary], and how far apart its rows are."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    return ctypes.c_int64(logits.shape[1]), ctypes.c_int64(logits.stride(0))


class _Weight(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("fours", ctypes.c_void_p),
    )


class _Shape(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim"))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("query_lengths", ctypes.c_void_p),
        ("context_lengths", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("blocks_width", ctypes.c_int64),
        ("block_tokens", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeight:
    """A weight in tiles of 32 outputs, filled up with zeros; `outputs` of them are the weight's.

    In int8 each output has its scale, in float32. `fours` are the same weights in 4 bits, where
    that is what their file had.
    """

    outputs: int
    inputs: int
    values: torch.Tensor
    scales: torch.Tensor | None = None
    fours: torch.Tensor | None = None

    def described(self) -> _Weight:
        """Return what C++ reads; valid as long as this is."""
        scales = None if self.scales is None else self.scales.data_ptr()
        fours = None if self.fours is None else self.fours.data_ptr()
        form, values = BF16 if scales is None else INT8, self.values.data_ptr()
        return _Weight(form, _padded(self.outputs), self.inputs, values, scales, fours)


def _padded(outputs: int) -> int:
    return -(-outputs // TILE) * TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCache:
    """Keys and values: [layers, units of 16 tokens, kv_heads, 2 x head_dim x 16] bfloat16."""

    values: torch.Tensor
    shape: AttentionShape
    block_tokens: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    batch: _Batch
    kept: tuple[torch.Tensor, ...]
    """What the batch points to."""


class NativeThreads:
    """The threads that ops and backend share, made at first use; only the engine's thread asks."""

    def __init__(self) -> None:
        self._engine: int | None = None
        self._library = library()
        self._library.engine_new.restype = ctypes.c_void_p
        self._library.model_new.restype = ctypes.c_void_p

    @property
    def engine(self) -> ctypes.c_void_p:
        """Return the C++ engine, with as many threads as PyTorch has been given."""
        if self._engine is None:
            self._engine = self._library.engine_new(torch.get_num_threads())
        return ctypes.c_void_p(self._engine)

    @property
    def functions(self) -> ctypes.CDLL:
        """Return the library."""
        return self._library


@lru_cache(maxsize=1)
def threads() -> NativeThreads:
    """Return the process's threads: ops and backend never run at the same time."""
    return NativeThreads()


def refusal(device: str, dtype: torch.dtype) -> str | None:
    """Return why C++ cannot serve this type on this device, None if it can."""
    if device != "cpu":
        return f"is for a CPU, not for {device}"
    if dtype not in FORMATS:
        return f"computes in bf16 and int8, not in {str(dtype).removeprefix('torch.')}"
    try:
        able = bool(library().processor_has_avx512_bf16())
    except NativeError as error:
        return str(error)
    return None if able else "needs a CPU with AVX-512 BF16 and VNNI"


def refusal_of(
    shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
) -> str | None:
    """Return why C++ cannot serve a model with this attention, None if it can."""
    if more := beyond_a_llama(shape):
        return f"computes llamas alone; this model has {', '.join(more)}"
    if shape.head_dim % TILE or shape.head_dim > HEAD_DIM_MAX:
        return f"head dimension {shape.head_dim} is not 32, 64, ... {HEAD_DIM_MAX}"
    if shape.heads // shape.kv_heads > UNIT_TOKENS:
        return f"{shape.heads // shape.kv_heads} query heads share a key head"
    if block_tokens % UNIT_TOKENS:
        return f"blocks of {block_tokens} tokens are not multiples of {UNIT_TOKENS}"
    return refusal(device, dtype)


class NativeOps(TorchOps):
    """Products with weights packed into tiles; the rest is PyTorch's, outside a whole step."""

    name = "native"
    dtype = torch.bfloat16

    def __init__(self, threads: NativeThreads) -> None:
        self._threads = threads

    def supports(self, device: str, dtype: torch.dtype) -> str | None:
        """Return None, or why not."""
        if dtype in FORMATS and dtype != self.dtype:
            return f"packs {str(self.dtype).removeprefix('torch.')}"
        return refusal(device, dtype)

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Return the weight [out, in] in tiles; one whose inputs are no multiple of 32 as it is."""
        outputs, inputs = weight.shape
        return weight.bfloat16() if inputs % TILE else self._packed(weight, outputs, inputs)

    def _packed(self, weight: torch.Tensor, outputs: int, inputs: int) -> NativeWeight:
        weight = weight.bfloat16().contiguous()
        values = torch.empty(_padded(outputs) * inputs, dtype=torch.bfloat16)
        self._threads.functions.pack_bf16(
            *(ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(outputs), ctypes.c_int64(inputs)),
            ctypes.c_void_p(values.data_ptr()),
        )
        return NativeWeight(outputs=outputs, inputs=inputs, values=values)

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Return x [T, in] times the transposed weight: [T, out]."""
        if not isinstance(weight, NativeWeight):
            return super().linear(x, weight)
        x, described = x.contiguous(), weight.described()
        out = torch.empty((len(x), described.outputs), dtype=torch.float32)
        self._threads.functions.engine_multiply(
            *(self._threads.engine, ctypes.byref(described), ctypes.c_void_p(x.data_ptr())),
            *(ctypes.c_int64(len(x)), ctypes.c_void_p(out.data_ptr())),
            ctypes.c_int64(described.outputs),
        )
        return out[:, : weight.outputs].to(x.dtype)

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit, NaN if one is none, and its token."""
        values = torch.empty(len(logits), dtype=torch.float32)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._threads.functions.engine_best(
            *(self._threads.engine, ctypes.c_void_p(logits.data_ptr())),
            *(ctypes.c_int64(len(logits)), *_told(logits)),
            *(ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(tokens.data_ptr())),
        )
        return values, tokens

    def draw(self, logits: torch.Tensor, best: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """Return a token for each row that draws."""
        count = len(drawn.rows)
        draws, tokens = np.empty(count, _DRAW), torch.empty(count, dtype=torch.int64)
        for name in ("temperature", "top_k", "top_p"):
            draws[name] = getattr(drawn, name).numpy()
        draws["uniform"] = drawn.uniforms.numpy()
        draws["min_p"] = 0 if drawn.min_p is None else drawn.min_p[:, 0].numpy()
        rows, best = drawn.rows.contiguous(), best.contiguous()
        self._threads.functions.engine_draw(
            *(self._threads.engine, ctypes.c_void_p(logits.data_ptr()), *_told(logits)),
            ctypes.c_void_p(best.data_ptr()),
            *(ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(count)),
            *(ctypes.c_void_p(draws.ctypes.data), ctypes.c_void_p(tokens.data_ptr())),
        )
        return tokens


class NativeInt8Ops(NativeOps):
    """Weights in int8 with a scale an output, activations in int8 with a scale for 32 of them.

    Weights that a file has in 4 bits are kept as they are too: they are read for steps of up to 3
    rows, whose time is that of reading them.
    """

    name = "native-int8"
    dtype = torch.int8

    def _packed(self, weight: torch.Tensor, outputs: int, inputs: int) -> NativeWeight:
        weight = weight.float().contiguous()
        values = torch.empty(_padded(outputs) * inputs, dtype=torch.uint8)
        scales = torch.empty(_padded(outputs), dtype=torch.float32)
        self._threads.functions.pack_int8(
            *(ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(outputs), ctypes.c_int64(inputs)),
            *(ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(scales.data_ptr())),
        )
        return NativeWeight(
            outputs=outputs,
            inputs=inputs,
            values=values,
            scales=scales,
            fours=self._fours(weight),
        )

    def _fours(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return a float32 weight in 4 bits, None if it is not one of 4 bits."""
        outputs, inputs = weight.shape
        packed = torch.empty(_padded(outputs) * inputs // UNIT * FOUR_BYTES, dtype=torch.uint8)
        exact = self._threads.functions.pack_int4(
            *(ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(outputs), ctypes.c_int64(inputs)),
            ctypes.c_void_p(packed.data_ptr()),
        )
        return packed if exact else None


class NativeBackend:
    """Attention over blocks laid out for the dot-product instruction, and the whole step."""

    name = "native"

    def __init__(self, threads: NativeThreads) -> None:
        self._threads = threads
        self._model: ctypes.c_void_p | None = None
        self._weights: DecoderWeights | None = None
        self._kept: list[object] = []

    def supports(
        self, shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
    ) -> str | None:
        """Return None, or why not."""
        return refusal_of(shape, device, dtype, block_tokens)

    def allocate_kv(
        self,
        shape: AttentionShape,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: str,
    ) -> Cache:
        """Return a zeroed cache."""
        units = blocks * block_tokens // UNIT_TOKENS
        size = (shape.layers, units, shape.kv_heads, 2 * shape.head_dim * UNIT_TOKENS)
        return NativeCache(
            values=torch.zeros(size, dtype=torch.bfloat16), shape=shape, block_tokens=block_tokens
        )

    def clear_blocks(self, cache: Cache, blocks: list[int]) -> None:
        """Zero these blocks."""
        assert isinstance(cache, NativeCache)
        each = cache.block_tokens // UNIT_TOKENS
        units = (torch.tensor(blocks)[:, None] * each + torch.arange(each)).flatten()
        cache.values[:, units] = 0

    def prepare(self, batch: AttentionBatch, cache: Cache) -> Prepared:
        """Describe the step's rows to C++."""
        assert isinstance(cache, NativeCache)
        lengths = torch.tensor(batch.query_lengths_host, dtype=torch.int32)
        contexts = torch.tensor(batch.context_lengths_host, dtype=torch.int32)
        tables = batch.block_tables.contiguous()
        described = _Batch(
            *(len(batch.slot_mapping), len(lengths), lengths.data_ptr(), contexts.data_ptr()),
            *(tables.data_ptr(), tables.shape[1], cache.block_tokens),
        )
        return _Prepared(described, (lengths, contexts, tables))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: Cache,
        prepared: Prepared,
    ) -> torch.Tensor:
        """Write k, v into the cache, then attend with q."""
        assert isinstance(cache, NativeCache)
        assert isinstance(prepared, _Prepared)
        qkv = torch.cat([q, k, v], dim=1).float().contiguous()
        out = torch.empty(q.shape, dtype=torch.float32)
        shape = _Shape(cache.shape.heads, cache.shape.kv_heads, cache.shape.head_dim)
        self._threads.functions.engine_attend(
            *(self._threads.engine, ctypes.byref(shape)),
            *(ctypes.c_void_p(cache.values[layer].data_ptr()), ctypes.c_void_p(qkv.data_ptr())),
            *(ctypes.byref(prepared.batch), ctypes.c_void_p(out.data_ptr())),
        )
        return out.to(q.dtype)

    def serves(self, weights: DecoderWeights) -> bool:
        """Return whether every weight is in tiles: widths that are no multiples of 32 are not."""
        parts = [weights.head]
        for layer in weights.layers:
            parts += [layer.qkv, layer.output, layer.gate_up, layer.down]
        return all(isinstance(part, NativeWeight) for part in parts)

    def step(
        self, weights: DecoderWeights, batch: StepBatch, cache: Cache, beat: Beat
    ) -> torch.Tensor:
        """Return the logits [S, vocabulary] of the tokens in batch.sample_tokens, in float32."""
        assert isinstance(cache, NativeCache)
        assert isinstance(weights.head, NativeWeight)
        prepared = self.prepare(batch.attention, cache)
        assert isinstance(prepared, _Prepared)
        count, padded = len(batch.sample_tokens), weights.head.described().outputs
        logits = torch.empty((count, padded), dtype=torch.float32)
        self._threads.functions.engine_step(
            *(self._threads.engine, self._described(weights)),
            ctypes.c_void_p(cache.values.data_ptr()),
            *(ctypes.c_int64(cache.values[0].numel()), ctypes.byref(prepared.batch)),
            ctypes.c_void_p(batch.input_ids.data_ptr()),
            ctypes.c_void_p(batch.positions.data_ptr()),
            ctypes.c_void_p(batch.sample_tokens.data_ptr()),
            *(ctypes.c_int64(count), ctypes.c_void_p(logits.data_ptr()), _BEAT(beat)),
        )
        return logits[:, : weights.head.outputs]

    def _described(self, weights: DecoderWeights) -> ctypes.c_void_p:
        """Tell C++ of the model, once; norms are read as float32."""
        if self._model is not None and self._weights is weights:
            return self._model
        functions, self._weights, shape = self._threads.functions, weights, weights.shape

        def floats(tensor: torch.Tensor) -> ctypes.c_void_p:
            kept = tensor.float().contiguous()
            self._kept.append(kept)
            return ctypes.c_void_p(kept.data_ptr())

        def described(*parts: PackedWeight) -> ctypes.Array[_Weight]:
            assert all(isinstance(part, NativeWeight) for part in parts)
            told = [part.described() for part in parts if isinstance(part, NativeWeight)]
            return (_Weight * len(told))(*told)

        first = weights.layers[0]
        assert isinstance(first.down, NativeWeight)
        vocabulary, hidden = weights.embedding.shape
        model = functions.model_new(
            ctypes.byref(_Shape(shape.heads, shape.kv_heads, shape.head_dim)),
            (ctypes.c_int64 * 3)(hidden, first.down.inputs, vocabulary),
            *(ctypes.c_float(weights.norm_eps), ctypes.c_void_p(weights.embedding.data_ptr())),
            *(floats(weights.rotations), floats(weights.final_norm), described(weights.head)),
        )
        self._model = ctypes.c_void_p(model)
        for layer in weights.layers:
            functions.model_add_layer(
                *(self._model, floats(layer.input_norm), floats(layer.post_norm)),
                described(layer.qkv, layer.output, layer.gate_up, layer.down),
            )
        return self._model
