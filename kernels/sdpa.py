"""Paged attention through PyTorch's scaled_dot_product_attention, on a CPU or any device.

Owns the cache's layout (blocks by head, so that a gathered row is contiguous for each head) and
the grouping of rows: decode rows of similar context share one gather and one call, prefill chunks
go one by one. kernels/select.py offers it by name. Holds no state but the cache's tensors.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the field's name for it

from kernels.base import AttentionBatch, AttentionShape, Cache, Prepared

GATHER_BYTES_MAX = 2 * 2**20
"""Bound of the keys that one group gathers: larger groups leave the CPU's cache and cost more."""


PART_TOKENS, WHOLE_TOKENS = 64, 512
"""Queries of a prefill without history on a CPU: up to WHOLE_TOKENS they go in parts.

PyTorch's CPU kernel takes keys 512 at a time and computes what the causal mask hides within those;
in parts of 64 queries, each with the keys it sees, 512 tokens cost a third less (torch 2.13).
"""


@dataclass(frozen=True, slots=True)
class SdpaCache:
    """Keys and values of a layer: [layers][blocks x kv_heads, block_tokens, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor
    kv_heads: int


@dataclass(frozen=True, slots=True)
class _Decode:
    """Rows of one query token each, of similar context; `tokens` None means all of the pack.

    gather lists the blocks of each row and head, padded with block 0; the mask hides what lies
    beyond a row's context.
    """

    tokens: torch.Tensor | None  # [rows]
    rows: int
    gather: torch.Tensor  # [rows x kv_heads x blocks]
    mask: torch.Tensor | None  # [rows, 1, 1, blocks x block_tokens]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens start..stop of the pack, of one row; they see `context` tokens, the last ones theirs.

    Without history nothing is gathered: all keys are the pack's own, up to `stop`.
    """

    start: int
    stop: int
    context: int
    gather: torch.Tensor | None  # [kv_heads x blocks]
    mask: torch.Tensor | None  # [stop - start, context]


@dataclass(frozen=True, slots=True)
class _Prepared:
    slots: torch.Tensor  # [T x kv_heads]
    decodes: tuple[_Decode, ...]
    chunks: tuple[_Chunk, ...]
    keys: torch.Tensor
    values: torch.Tensor


class SdpaBackend:
    """Grouped heads are query rows of their key head, so that keys and values are read once."""

    name = "sdpa"

    def supports(
        self, shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
    ) -> str | None:
        """Return None, or why not."""
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{dtype} is not a type it computes in"
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
        size = (shape.layers, blocks * shape.kv_heads, block_tokens, shape.head_dim)
        keys = torch.zeros(size, dtype=dtype, device=device)
        return SdpaCache(keys, torch.zeros_like(keys), shape.kv_heads)

    def clear_blocks(self, cache: Cache, blocks: list[int]) -> None:
        """Zero these blocks."""
        assert isinstance(cache, SdpaCache)
        rows = _by_head(torch.tensor(blocks, device=cache.keys.device), cache.kv_heads).flatten()
        cache.keys[:, rows] = 0
        cache.values[:, rows] = 0

    def prepare(self, batch: AttentionBatch, cache: Cache) -> Prepared:
        """Group the step's rows; build masks, gather indices and the gathers' memory."""
        assert isinstance(cache, SdpaCache)
        _, _, block_tokens, head_dim = cache.keys.shape
        block, offset = batch.slot_mapping // block_tokens, batch.slot_mapping % block_tokens
        slots = _by_head(block, cache.kv_heads) * block_tokens + offset[:, None]
        decodes = tuple(_decode_groups(batch, cache))
        chunks = tuple(_chunks(batch, cache))
        gathers = [group.gather for group in decodes]
        gathers += [chunk.gather for chunk in chunks if chunk.gather is not None]
        longest = max((gather.numel() for gather in gathers), default=0)
        memory = cache.keys.new_empty((2, longest, block_tokens, head_dim))
        return _Prepared(slots.flatten(), decodes, chunks, memory[0], memory[1])

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: Cache,
        prepared: Prepared,
    ) -> torch.Tensor:
        """Write k, v into the cache, then attend group by group."""
        assert isinstance(cache, SdpaCache)
        assert isinstance(prepared, _Prepared)
        keys, values = cache.keys[layer], cache.values[layer]
        head_dim = q.shape[-1]
        keys.view(-1, head_dim).index_copy_(0, prepared.slots, k.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, prepared.slots, v.reshape(-1, head_dim))
        out: torch.Tensor | None = None
        for group in prepared.decodes:
            rows = q if group.tokens is None else q.index_select(0, group.tokens)
            k_rows = _gathered(keys, group.gather, prepared.keys, group.rows * cache.kv_heads)
            v_rows = _gathered(values, group.gather, prepared.values, group.rows * cache.kv_heads)
            attended = _attend_decode(rows, k_rows, v_rows, group.mask)
            if group.tokens is None:
                return attended
            out = torch.empty_like(q) if out is None else out
            out.index_copy_(0, group.tokens, attended)
        out = torch.empty_like(q) if out is None else out
        for chunk in prepared.chunks:
            tokens = slice(chunk.start, chunk.stop)
            if chunk.gather is None:
                seen = slice(chunk.stop - chunk.context, chunk.stop)
                k_row, v_row = k[seen].transpose(0, 1), v[seen].transpose(0, 1)
            else:
                k_row = _gathered(keys, chunk.gather, prepared.keys, cache.kv_heads)
                v_row = _gathered(values, chunk.gather, prepared.values, cache.kv_heads)
                k_row, v_row = k_row[:, : chunk.context], v_row[:, : chunk.context]
            out[tokens] = _attend_chunk(q[tokens], k_row, v_row, chunk.mask)
        return out


def _by_head(blocks: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the cache's rows of these blocks, one column a head: [..., kv_heads]."""
    heads = torch.arange(kv_heads, device=blocks.device)
    return blocks.long().unsqueeze(-1) * kv_heads + heads


def _gathered(
    source: torch.Tensor, gather: torch.Tensor, memory: torch.Tensor, sequences: int
) -> torch.Tensor:
    """Return [sequences, tokens, head_dim]: the listed blocks one after another, in `memory`."""
    target = memory[: gather.numel()]
    torch.index_select(source, 0, gather, out=target)
    return target.view(sequences, -1, source.shape[-1])


def _attend_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend q [rows, heads, head_dim] to k, v [rows x kv_heads, tokens, head_dim]."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[0] // rows
    grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
    k, v = k.view(rows, kv_heads, -1, head_dim), v.view(rows, kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)


def _attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend q [n, heads, head_dim] to k, v [kv_heads, context, head_dim].

    Without a mask the chunk has no history, so that is_causal, which is top-left aligned, is right.
    """
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)


def _decode_groups(batch: AttentionBatch, cache: SdpaCache) -> list[_Decode]:
    """Group rows of one query token by power-of-two class of context, within the gather's bound.

    A group is padded to its own longest row, not to its class.
    """
    _, _, block_tokens, head_dim = cache.keys.shape
    block_bytes = cache.kv_heads * block_tokens * head_dim * cache.keys.element_size()
    lengths, contexts = batch.query_lengths_host, batch.context_lengths_host
    blocks = [-(-context // block_tokens) for context in contexts]
    rows = [row for row, length in enumerate(lengths) if length == 1]
    classes: dict[int, list[int]] = {}
    for row in rows:
        classes.setdefault((blocks[row] - 1).bit_length(), []).append(row)
    groups: list[_Decode] = []
    for _, members in sorted(classes.items()):
        width = max(blocks[row] for row in members)
        size = max(1, GATHER_BYTES_MAX // (width * block_bytes))
        for first in range(0, len(members), size):
            part = members[first : first + size]
            whole = len(part) == len(lengths)
            groups.append(_decode_group(batch, cache, part, whole))
    return groups


def _decode_group(
    batch: AttentionBatch, cache: SdpaCache, members: list[int], whole: bool
) -> _Decode:
    device = batch.block_tables.device
    block_tokens = cache.keys.shape[2]
    contexts = [batch.context_lengths_host[row] for row in members]
    width = -(-max(contexts) // block_tokens)
    if whole:
        tokens, tables = None, batch.block_tables[:, :width]
        lengths = batch.context_lengths
    else:
        rows = torch.tensor(members, device=device)
        tokens = batch.query_starts.index_select(0, rows).long()
        tables = batch.block_tables.index_select(0, rows)[:, :width]
        lengths = batch.context_lengths.index_select(0, rows)
    gather = _by_head(tables, cache.kv_heads).transpose(1, 2)
    mask = None
    if min(contexts) < width * block_tokens:
        hidden = torch.arange(width * block_tokens, device=device) >= lengths[:, None]
        mask = _additive(hidden, cache.keys.dtype)[:, None, None]
    return _Decode(tokens, len(members), gather.flatten(), mask)


def _chunks(batch: AttentionBatch, cache: SdpaCache) -> list[_Chunk]:
    """Describe each row of several query tokens."""
    device, dtype = batch.block_tables.device, cache.keys.dtype
    block_tokens = cache.keys.shape[2]
    chunks: list[_Chunk] = []
    start = 0
    for row, length in enumerate(batch.query_lengths_host):
        stop, context = start + length, batch.context_lengths_host[row]
        if length > 1 and context == length:
            whole = device.type != "cpu" or length > WHOLE_TOKENS
            part = length if whole else PART_TOKENS
            for first in range(0, length, part):
                last = min(first + part, length)
                mask = _causal(last - first, last, dtype, device) if first else None
                chunks.append(_Chunk(start + first, start + last, last, None, mask))
        elif length > 1:
            table = batch.block_tables[row, : -(-context // block_tokens)]
            gather = _by_head(table, cache.kv_heads).T.flatten()
            mask = _causal(length, context, dtype, device)
            chunks.append(_Chunk(start, stop, context, gather, mask))
        start = stop
    return chunks


def _causal(count: int, context: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the additive mask of the last `count` of `context` tokens, bottom-right aligned."""
    positions = torch.arange(context, device=device)
    return _additive(positions > positions[context - count :, None], dtype)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where seen and minus infinity where hidden."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf)
