"""A whole decoder step in C++ on a CPU: the native backend.

Owns the cache that kernels/cpu/units.h lays out, and what crosses to C++ as pointers.
kernels/select.py offers it by name, with the ops of kernels/native_ops.py: a step reads the weights
that these packed.
"""

import ctypes
from array import array
from dataclasses import dataclass

import torch

from kernels.base import (
    AttentionBatch,
    AttentionShape,
    Beat,
    Cache,
    DecoderWeights,
    LayerWeights,
    PackedWeight,
    Prepared,
    StepBatch,
    beyond_a_llama,
)
from kernels.huge_pages import HugePages
from kernels.native_ops import (
    BEAT,
    TILE,
    DescribedWeight,
    NativeThreads,
    NativeWeight,
    refusal,
)

UNIT_TOKENS = 16
SCALE_BYTES = 4
HEAD_DIM_MAX = 256
COMPUTED = ("biases", "norms of heads")
"""What of engine/family.py's words C++ knows: biases of qkv, and norms before rope."""


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
        ("int8", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCache:
    """Keys and values: [layers, units of 16 tokens, kv_heads, 2 x head_dim x 16] bfloat16.

    In int8 the last are bytes, each token's two scales in float32 behind them: kernels/cpu/units.h.
    """

    values: torch.Tensor
    shape: AttentionShape
    block_tokens: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    batch: _Batch
    kept: tuple[object, ...]
    """What the batch points to."""


def refusal_of(
    shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
) -> str | None:
    """Return why C++ cannot serve a model with this attention, None if it can."""
    if more := [what for what in beyond_a_llama(shape) if what not in COMPUTED]:
        return f"computes llamas and Qwens; this model has {', '.join(more)}"
    if shape.head_dim % TILE or shape.head_dim > HEAD_DIM_MAX:
        return f"head dimension {shape.head_dim} is not 32, 64, ... {HEAD_DIM_MAX}"
    if shape.heads // shape.kv_heads > UNIT_TOKENS:
        return f"{shape.heads // shape.kv_heads} query heads share a key head"
    if block_tokens % UNIT_TOKENS:
        return f"blocks of {block_tokens} tokens are not multiples of {UNIT_TOKENS}"
    return refusal(device, dtype)


def _logits(head: NativeWeight, rows: int) -> torch.Tensor:
    """Return room for what the head makes of rows, its padding included."""
    return torch.empty((rows, head.padded), dtype=torch.float32)


class NativeBackend:
    """Attention over blocks laid out for the dot-product instruction, and the whole step."""

    name = "native"

    def __init__(self, threads: NativeThreads) -> None:
        self._threads = threads
        self._model: ctypes.c_void_p | None = None
        self._weights: DecoderWeights | None = None
        self._kept: list[object] = []
        self._beat: tuple[Beat, object] | None = None

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
        """Return a zeroed cache, in int8 if that is the type, else in bf16."""
        int8 = dtype == torch.int8
        units = blocks * block_tokens // UNIT_TOKENS
        width = 2 * UNIT_TOKENS * (shape.head_dim + (SCALE_BYTES if int8 else 0))
        values = HugePages().zeros(
            (shape.layers, units, shape.kv_heads, width), torch.uint8 if int8 else torch.bfloat16
        )
        return NativeCache(values=values, shape=shape, block_tokens=block_tokens)

    def refuses_int8(
        self, shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
    ) -> str | None:
        """Return None: whatever it serves it can serve from a cache in int8."""
        return None

    def clear_blocks(self, cache: Cache, blocks: list[int]) -> None:
        """Zero these blocks."""
        assert isinstance(cache, NativeCache)
        each = cache.block_tokens // UNIT_TOKENS
        units = (torch.tensor(blocks)[:, None] * each + torch.arange(each)).flatten()
        cache.values[:, units] = 0

    def prepare(self, batch: AttentionBatch, cache: Cache) -> Prepared:
        """Describe the step's rows to C++."""
        assert isinstance(cache, NativeCache)
        lengths = array("i", batch.query_lengths_host)
        contexts = batch.context_lengths.contiguous()
        tables = batch.block_tables.contiguous()
        described = _Batch(
            *(batch.slot_mapping.shape[0], len(lengths), lengths.buffer_info()[0]),
            contexts.data_ptr(),
            *(tables.data_ptr(), tables.shape[1], cache.block_tokens),
            cache.values.dtype == torch.uint8,
        )
        return _Prepared(described, (lengths, contexts, tables))

    def launch_key(self, batch: AttentionBatch, cache: Cache) -> tuple[int, ...]:
        """Return nothing: C++ reads contexts and tables where they are when it is called."""
        return ()

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
        logits = _logits(weights.head, len(batch.sample_tokens))
        self._threads.functions.engine_step(
            *(self._threads.engine, self._described(weights), cache.values.data_ptr()),
            *(cache.values.stride(0) * cache.values.itemsize, ctypes.byref(prepared.batch)),
            *(batch.input_ids.data_ptr(), batch.positions.data_ptr()),
            *(batch.sample_tokens.data_ptr(), len(logits), logits.data_ptr(), self._called(beat)),
        )
        return logits[:, : weights.head.outputs]

    def logits_of(self, weights: DecoderWeights, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [S, vocabulary] of other tokens of the last step, in float32."""
        assert isinstance(weights.head, NativeWeight)
        tokens, logits = tokens.contiguous(), _logits(weights.head, len(tokens))
        self._threads.functions.engine_logits(
            *(self._threads.engine, self._described(weights), tokens.data_ptr()),
            *(len(logits), logits.data_ptr()),
        )
        return logits[:, : weights.head.outputs]

    def _called(self, beat: Beat) -> object:
        """Return what C++ calls for this beat: the same from step to step."""
        if self._beat is None or self._beat[0] is not beat:
            self._beat = beat, BEAT(beat)
        return self._beat[1]

    def _described(self, weights: DecoderWeights) -> ctypes.c_void_p:
        """Tell C++ of the model, once; norms are read as float32."""
        if self._model is not None and self._weights is weights:
            return self._model
        functions, self._weights, shape = self._threads.functions, weights, weights.shape

        def floats(tensor: torch.Tensor) -> ctypes.c_void_p:
            kept = tensor.float().contiguous()
            self._kept.append(kept)
            return ctypes.c_void_p(kept.data_ptr())

        def more(layer: LayerWeights) -> ctypes.Array[ctypes.c_void_p]:
            told = (layer.qkv_bias, layer.query_norm, layer.key_norm)
            return (ctypes.c_void_p * len(told))(
                *(None if one is None else floats(one).value for one in told)
            )

        def described(*parts: PackedWeight) -> ctypes.Array[DescribedWeight]:
            assert all(isinstance(part, NativeWeight) for part in parts)
            told = [part.described() for part in parts if isinstance(part, NativeWeight)]
            return (DescribedWeight * len(told))(*told)

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
                *(self._model, floats(layer.input_norm), floats(layer.post_norm), more(layer)),
                described(layer.qkv, layer.output, layer.gate_up, layer.down),
            )
        return self._model
