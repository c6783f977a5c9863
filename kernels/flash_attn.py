"""flash-attn 2.8 as an attention backend: an optional package, for CUDA and pages of 256 tokens.

Owns the cache's layout, [layers, blocks, block_tokens, kv_heads, head_dim], and the two calls that
a step becomes; kernels/select.py offers it by name where the package is installed. The pool begins
as zeros and stays finite: whole pages are read, and 0 x NaN is NaN. Never reads the device.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  the field's name for it

from kernels.base import AttentionBatch, AttentionShape, Cache, Prepared, type_name

VERSION = "2.8."
PAGE_TOKENS = 256
HEAD_DIM_MAX = 256


class FlashAttn(Protocol):
    """What we call of the package."""

    __version__: str

    def flash_attn_varlen_func(self, *tensors: Any, **settings: Any) -> Any:
        """Attend with rows packed one after another."""
        ...

    def flash_attn_with_kvcache(self, *tensors: Any, **settings: Any) -> Any:
        """Attend with as many queries of each row."""
        ...


@dataclass(frozen=True, slots=True)
class FlashAttnCache:
    """Keys and values, [layers, blocks, block_tokens, kv_heads, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor
    shape: AttentionShape


@dataclass(frozen=True, slots=True)
class _Prepared:
    """key_starts is None for a step of decodes."""

    batch: AttentionBatch
    key_starts: torch.Tensor | None  # [R + 1] int32
    query_tokens_max: int
    key_tokens_max: int


def installed() -> FlashAttn:
    """Return the package; raises ImportError."""
    import flash_attn  # noqa: PLC0415  optional, and slow to load

    package: FlashAttn = flash_attn
    return package


class FlashAttnBackend:
    """Decode steps as one call over the paged cache, others as one over rows of any length."""

    name = "flash_attn"

    def __init__(self, package: FlashAttn) -> None:
        self._package = package

    def supports(
        self, shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
    ) -> str | None:
        """Return None, or why not."""
        if not self._package.__version__.startswith(VERSION):
            return f"flash-attn {self._package.__version__} is not {VERSION}x"
        if device != "cuda":
            return f"runs on CUDA, not on {device}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"does not compute in {type_name(dtype)}"
        if block_tokens % PAGE_TOKENS:
            return f"blocks of {block_tokens} tokens are not multiples of {PAGE_TOKENS}"
        if shape.head_dim % 8 or shape.head_dim > HEAD_DIM_MAX:
            return f"head dimension {shape.head_dim} is not 8, 16, ... {HEAD_DIM_MAX}"
        if torch.cuda.get_device_capability() < (8, 0):
            return "needs compute capability 8.0 or later"
        return None

    def allocate_kv(
        self,
        shape: AttentionShape,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: str,
    ) -> Cache:
        """Return a zeroed cache."""
        size = (shape.layers, blocks, block_tokens, shape.kv_heads, shape.head_dim)
        keys = torch.zeros(size, dtype=dtype, device=device)
        return FlashAttnCache(keys, torch.zeros_like(keys), shape)

    def clear_blocks(self, cache: Cache, blocks: list[int]) -> None:
        """Zero these blocks."""
        assert isinstance(cache, FlashAttnCache)
        rows = torch.tensor(blocks, device=cache.keys.device)
        cache.keys[:, rows] = 0
        cache.values[:, rows] = 0

    def launch_key(self, batch: AttentionBatch, cache: Cache) -> tuple[int, ...]:
        """Return every integer that the calls on this batch take."""
        assert isinstance(cache, FlashAttnCache)
        counts = batch.query_lengths_host
        return (len(counts), sum(counts), max(counts), batch.block_tables.shape[1])

    def prepare(self, batch: AttentionBatch, cache: Cache) -> Prepared:
        """Sum up the context lengths on the device, where rows differ in length."""
        assert isinstance(cache, FlashAttnCache)
        counts = batch.query_lengths_host
        starts = None
        if max(counts) > 1 or sum(counts) != len(counts):
            starts = F.pad(batch.context_lengths.cumsum(0), (1, 0)).int()
        tokens = batch.block_tables.shape[1] * cache.keys.shape[2]
        return _Prepared(batch, starts, max(counts), tokens)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: Cache,
        prepared: Prepared,
    ) -> torch.Tensor:
        """Write k, v into the cache, then attend."""
        assert isinstance(cache, FlashAttnCache)
        assert isinstance(prepared, _Prepared)
        shape, batch = cache.shape, prepared.batch
        keys, values = cache.keys[layer], cache.values[layer]
        keys.view(-1, *k.shape[1:]).index_copy_(0, batch.slot_mapping, k)
        values.view(-1, *v.shape[1:]).index_copy_(0, batch.slot_mapping, v)
        window = shape.window(layer)
        scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        sides = (window - 1, 0) if window else (-1, -1)
        out: torch.Tensor
        if prepared.key_starts is None:
            out = self._package.flash_attn_with_kvcache(
                q.unsqueeze(1),
                keys,
                values,
                cache_seqlens=batch.context_lengths,
                block_table=batch.block_tables,
                softmax_scale=scale,
                causal=True,
                window_size=sides,
                softcap=shape.cap or 0.0,
            )
            return out.squeeze(1)
        out = self._package.flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=batch.query_starts,
            cu_seqlens_k=prepared.key_starts,
            max_seqlen_q=prepared.query_tokens_max,
            max_seqlen_k=prepared.key_tokens_max,
            softmax_scale=scale,
            causal=True,
            window_size=sides,
            softcap=shape.cap or 0.0,
            block_table=batch.block_tables,
        )
        return out
