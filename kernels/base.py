"""The kernel seam: what every attention backend and every set of fused ops must offer.

Owns the protocols, the packed description of a step that attention reads, and the refusal type.
engine/model.py calls through this and nothing else; a backend alone knows its cache's layout.
Knows no engine, no scheduler: sequences are rows.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

Cache = object
"""Keys and values of all layers, laid out as its backend likes; nobody else looks inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of a model, as attention sees them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """A step's rows packed one after another; T tokens, R rows. Device tensors are int32/int64.

    Row r owns tokens query_starts[r]..query_starts[r+1] of the pack; they are the last ones of its
    context_lengths[r] tokens (causal, bottom-right aligned). slot_mapping[t] = block x block_tokens
    + offset is where token t's key and value go. Rows of padding point to block 0. The host lists
    say the same without a device read.
    """

    query_starts: torch.Tensor  # [R + 1] int32
    context_lengths: torch.Tensor  # [R] int32
    slot_mapping: torch.Tensor  # [T] int64
    block_tables: torch.Tensor  # [R, blocks of the longest row] int32, padded with block 0
    query_lengths_host: list[int]
    context_lengths_host: list[int]


class AttentionBackend(Protocol):
    """Paged attention over blocks of block_tokens tokens; block 0 is never a sequence's."""

    name: str

    def supports(
        self, shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
    ) -> str | None:
        """Return None, or one line that says why this backend cannot serve."""
        ...

    def allocate_kv(
        self,
        shape: AttentionShape,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: str,
    ) -> Cache:
        """Return a zeroed cache of `blocks` blocks, block 0 included."""
        ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: Cache,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Write k, v into the cache, then attend with q.

        q is [T, heads, head_dim], k and v [T, kv_heads, head_dim]; returns q's shape.
        """
        ...
