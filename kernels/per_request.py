"""One attention call for each request, everything else batched: Orca's selective batching.

Owns the splitting of a step into its rows; another backend computes each (Yu et al., OSDI 2022).
kernels/select.py offers it by name alone, so that a lab can measure what one call for all rows is
worth. Never chosen by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    BackendError,
    Cache,
    Prepared,
    int8_refusal,
)

Inner = Callable[[AttentionShape, str, torch.dtype, int], AttentionBackend]
"""Returns the backend that computes single rows, or raises BackendError."""


@dataclass(frozen=True, slots=True)
class PerRequestCache:
    """The inner backend and its cache."""

    backend: AttentionBackend
    cache: Cache


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: slice
    prepared: Prepared


class PerRequestBackend:
    """Rows one by one, each through the backend that would serve them all."""

    name = "per_request"

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    def supports(
        self, shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
    ) -> str | None:
        """Return None, or why no backend serves single rows."""
        try:
            self._inner(shape, device, dtype, block_tokens)
        except BackendError as error:
            return str(error)
        return None

    def allocate_kv(
        self,
        shape: AttentionShape,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: str,
    ) -> Cache:
        """Return the inner backend's cache, zeroed."""
        inner = self._inner(shape, device, dtype, block_tokens)
        return PerRequestCache(inner, inner.allocate_kv(shape, blocks, block_tokens, dtype, device))

    def refuses_int8(
        self, shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
    ) -> str | None:
        """Return what the backend of single rows does."""
        return int8_refusal(
            self._inner(shape, device, dtype, block_tokens), shape, device, dtype, block_tokens
        )

    def clear_blocks(self, cache: Cache, blocks: list[int]) -> None:
        """Zero these blocks."""
        assert isinstance(cache, PerRequestCache)
        cache.backend.clear_blocks(cache.cache, blocks)

    def prepare(self, batch: AttentionBatch, cache: Cache) -> Prepared:
        """Prepare each row as a step of its own."""
        assert isinstance(cache, PerRequestCache)
        rows, start = [], 0
        for row, length in enumerate(batch.query_lengths_host):
            tokens = slice(start, start + length)
            part = _part(batch, row, tokens)
            rows.append(_Row(tokens, cache.backend.prepare(part, cache.cache)))
            start += length
        return tuple(rows)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: Cache,
        prepared: Prepared,
    ) -> torch.Tensor:
        """Write and attend row by row."""
        assert isinstance(cache, PerRequestCache)
        assert isinstance(prepared, tuple)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for row in prepared:
            at = row.tokens
            out[at] = cache.backend.attend(layer, q[at], k[at], v[at], cache.cache, row.prepared)
        return out


def _part(batch: AttentionBatch, row: int, tokens: slice) -> AttentionBatch:
    """Return one row of a step as a step; its table keeps its padding."""
    starts = batch.query_starts[row : row + 2]
    return AttentionBatch(
        query_starts=starts - starts[0],
        context_lengths=batch.context_lengths[row : row + 1],
        slot_mapping=batch.slot_mapping[tokens],
        block_tables=batch.block_tables[row : row + 1],
        query_lengths_host=[tokens.stop - tokens.start],
        context_lengths_host=[batch.context_lengths_host[row]],
    )
