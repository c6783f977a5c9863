"""The oracle: paged attention written to be read, one row at a time, in float32.

Owns the meaning that every other backend is tested against; kernels/select.py offers it by name
and as the last resort. Never optimised: what it says is right by looking at it.
"""

from dataclasses import dataclass

import torch

from kernels.base import AttentionBatch, AttentionShape, Cache, Prepared, type_name


@dataclass(frozen=True, slots=True)
class ReferenceCache:
    """Keys and values by layer and slot: [layers, blocks x block_tokens, kv_heads, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor
    block_tokens: int
    shape: AttentionShape


class ReferenceBackend:
    """Gathers exactly a row's context, token by token, and attends to it."""

    name = "reference"

    def supports(
        self, shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
    ) -> str | None:
        """Return None, or why not: it serves everywhere, in every type of floating point."""
        return None if dtype.is_floating_point else f"does not compute in {type_name(dtype)}"

    def allocate_kv(
        self,
        shape: AttentionShape,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: str,
    ) -> Cache:
        """Return a zeroed cache."""
        size = (shape.layers, blocks * block_tokens, shape.kv_heads, shape.head_dim)
        keys = torch.zeros(size, dtype=dtype, device=device)
        return ReferenceCache(keys, torch.zeros_like(keys), block_tokens, shape)

    def clear_blocks(self, cache: Cache, blocks: list[int]) -> None:
        """Zero these blocks."""
        assert isinstance(cache, ReferenceCache)
        for block in blocks:
            slots = slice(block * cache.block_tokens, (block + 1) * cache.block_tokens)
            cache.keys[:, slots] = 0
            cache.values[:, slots] = 0

    def prepare(self, batch: AttentionBatch, cache: Cache) -> Prepared:
        """Return the batch: nothing is worked out ahead."""
        return batch

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: Cache,
        prepared: Prepared,
    ) -> torch.Tensor:
        """Write k, v into the cache, then attend row by row."""
        assert isinstance(cache, ReferenceCache)
        assert isinstance(prepared, AttentionBatch)
        keys, values = cache.keys[layer], cache.values[layer]
        keys[prepared.slot_mapping] = k
        values[prepared.slot_mapping] = v
        out = torch.empty_like(q)
        start = 0
        for row, length in enumerate(prepared.query_lengths_host):
            positions = torch.arange(prepared.context_lengths_host[row], device=q.device)
            blocks = prepared.block_tables[row, positions // cache.block_tokens].long()
            slots = blocks * cache.block_tokens + positions % cache.block_tokens
            tokens = slice(start, start + length)
            out[tokens] = attend_row(q[tokens], keys[slots], values[slots], cache.shape, layer)
            start += length
        return out


def attend_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape, layer: int
) -> torch.Tensor:
    """Return softmax(q k x scale) v of one row, causal and bottom-right aligned.

    q is [n, heads, head_dim], the last n of the context's tokens; k, v [context, kv_heads,
    head_dim]; consecutive heads / kv_heads query heads share a key head (Ainslie et al., 2023).
    A cap bounds the scores as in Gemma 2; with a window a token sees that many, itself included.
    """
    count, heads, head_dim = q.shape
    context, kv_heads, _ = k.shape
    shared = heads // kv_heads
    keys = k.float().repeat_interleave(shared, dim=1)
    values = v.float().repeat_interleave(shared, dim=1)
    scale = head_dim**-0.5 if shape.scale is None else shape.scale
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if shape.cap is not None:
        scores = shape.cap * torch.tanh(scores / shape.cap)
    queries = torch.arange(context - count, context, device=q.device)[:, None]
    positions = torch.arange(context, device=q.device)
    hidden = positions > queries
    if window := shape.window(layer):
        hidden = hidden | (positions <= queries - window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
