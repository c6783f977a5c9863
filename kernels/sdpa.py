"""Paged attention through PyTorch's scaled_dot_product_attention, on a CPU or any device.

Owns the cache's layout (blocks by head, so that a gathered row is contiguous for each head) and
the grouping of rows: decode rows of similar context share one gather and one call, prefill chunks
go one by one; layers with a window gather no more than it. kernels/select.py offers it by name.
Holds no state but the cache's tensors.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the field's name for it

from kernels.base import AttentionBatch, AttentionShape, Cache, Prepared, type_name

GATHER_BYTES_MAX = 2 * 2**20
"""Bound of the keys that one group gathers: larger groups leave the CPU's cache and cost more."""


PART_TOKENS, WHOLE_TOKENS = 64, 512
"""Queries of a prefill without history on a CPU: up to WHOLE_TOKENS they go in parts.

PyTorch's CPU kernel takes keys 512 at a time and computes what the causal mask hides within those;
in parts of 64 queries, each with the keys it sees, 512 tokens cost a third less (torch 2.13).
Where a window or a cap asks for a mask or for all scores, parts are never above WHOLE_TOKENS.
"""


@dataclass(frozen=True, slots=True)
class SdpaCache:
    """Keys and values of a layer: [layers][blocks x kv_heads, block_tokens, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor
    shape: AttentionShape

    @property
    def kv_heads(self) -> int:
        """Return how many of its rows a block has."""
        return self.shape.kv_heads


@dataclass(frozen=True, slots=True)
class _Decode:
    """Rows of one query token each, of similar context; `tokens` None means all of the pack.

    gather lists the blocks of each row and head that it sees, padded with whatever; the mask hides
    what lies beyond a row's context or before its window.
    """

    tokens: torch.Tensor | None  # [rows]
    rows: int
    gather: torch.Tensor  # [rows x kv_heads x blocks]
    mask: torch.Tensor | None  # [rows, 1, 1, blocks x block_tokens]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens start..stop of the pack, of one row; of all up to the last they see the last `seen`.

    Without history nothing is gathered: all keys are the pack's own. What is gathered begins with
    `skip` tokens that none of them sees.
    """

    start: int
    stop: int
    seen: int
    skip: int
    gather: torch.Tensor | None  # [kv_heads x blocks]
    mask: torch.Tensor | None  # [stop - start, seen]


@dataclass(frozen=True, slots=True)
class _View:
    """What the layers with one window see of a step."""

    decodes: tuple[_Decode, ...]
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, slots=True)
class _Prepared:
    slots: torch.Tensor  # [T x kv_heads]
    views: dict[int, _View]  # by the layer's window
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
            return f"does not compute in {type_name(dtype)}"
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
        return SdpaCache(keys, torch.zeros_like(keys), shape)

    def clear_blocks(self, cache: Cache, blocks: list[int]) -> None:
        """Zero these blocks."""
        assert isinstance(cache, SdpaCache)
        rows = _by_head(torch.tensor(blocks, device=cache.keys.device), cache.kv_heads).flatten()
        cache.keys[:, rows] = 0
        cache.values[:, rows] = 0

    def prepare(self, batch: AttentionBatch, cache: Cache) -> Prepared:
        """Group the step's rows; build masks, gather indices and the gathers' memory.

        A window that is no shorter than any context hides nothing.
        """
        assert isinstance(cache, SdpaCache)
        _, _, block_tokens, head_dim = cache.keys.shape
        block, offset = batch.slot_mapping // block_tokens, batch.slot_mapping % block_tokens
        slots = _by_head(block, cache.kv_heads) * block_tokens + offset[:, None]
        longest = max(batch.context_lengths_host)
        windows = {one: one if one < longest else 0 for one in cache.shape.windows or (0,)}
        made = {one: _view(batch, cache, one) for one in sorted(set(windows.values()))}
        gathers = [group.gather for view in made.values() for group in view.decodes]
        chunks = [chunk.gather for view in made.values() for chunk in view.chunks]
        gathers += [gather for gather in chunks if gather is not None]
        most = max((gather.numel() for gather in gathers), default=0)
        memory = cache.keys.new_empty((2, most, block_tokens, head_dim))
        views = {window: made[hiding] for window, hiding in windows.items()}
        return _Prepared(slots.flatten(), views, memory[0], memory[1])

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
        keys, values, shape = cache.keys[layer], cache.values[layer], cache.shape
        view = prepared.views[shape.window(layer)]
        head_dim = q.shape[-1]
        keys.view(-1, head_dim).index_copy_(0, prepared.slots, k.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, prepared.slots, v.reshape(-1, head_dim))
        out: torch.Tensor | None = None
        for group in view.decodes:
            rows = q if group.tokens is None else q.index_select(0, group.tokens)
            k_rows = _gathered(keys, group.gather, prepared.keys, group.rows * cache.kv_heads)
            v_rows = _gathered(values, group.gather, prepared.values, group.rows * cache.kv_heads)
            attended = _attend_decode(rows, k_rows, v_rows, group.mask, shape)
            if group.tokens is None:
                return attended
            out = torch.empty_like(q) if out is None else out
            out.index_copy_(0, group.tokens, attended)
        out = torch.empty_like(q) if out is None else out
        for chunk in view.chunks:
            tokens = slice(chunk.start, chunk.stop)
            if chunk.gather is None:
                seen = slice(chunk.stop - chunk.seen, chunk.stop)
                k_row, v_row = k[seen].transpose(0, 1), v[seen].transpose(0, 1)
            else:
                seen = slice(chunk.skip, chunk.skip + chunk.seen)
                k_row = _gathered(keys, chunk.gather, prepared.keys, cache.kv_heads)[:, seen]
                v_row = _gathered(values, chunk.gather, prepared.values, cache.kv_heads)[:, seen]
            out[tokens] = _attend_chunk(q[tokens], k_row, v_row, chunk.mask, shape)
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


# ---- attention


def _attend_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    shape: AttentionShape,
) -> torch.Tensor:
    """Attend q [rows, heads, head_dim] to k, v [rows x kv_heads, tokens, head_dim]."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[0] // rows
    grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
    k, v = k.view(rows, kv_heads, -1, head_dim), v.view(rows, kv_heads, -1, head_dim)
    if shape.cap is not None:
        return _capped(grouped, k, v, mask, shape).reshape(q.shape)
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=shape.scale)
    return attended.reshape(q.shape)


def _attend_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    shape: AttentionShape,
) -> torch.Tensor:
    """Attend q [n, heads, head_dim] to k, v [kv_heads, context, head_dim].

    Without a mask the chunk has no history, so that is_causal, which is top-left aligned, is right.
    """
    if shape.cap is not None:
        count, heads, head_dim = q.shape
        grouped = q.transpose(0, 1).reshape(1, len(k), heads // len(k), count, head_dim)
        attended = _capped(grouped, k[None, :, None], v[None, :, None], mask, shape)
        return attended.reshape(heads, count, head_dim).transpose(0, 1)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=shape.scale,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    shape: AttentionShape,
) -> torch.Tensor:
    """Return attention whose scores stay within the cap, in float32; PyTorch's has no cap."""
    assert shape.cap is not None
    scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
    scores = torch.matmul(q.float(), k.float().mT) * (scale / shape.cap)
    scores = scores.tanh_().mul_(shape.cap)
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)


# ---- what each layer sees of a step


def _view(batch: AttentionBatch, cache: SdpaCache, window: int) -> _View:
    return _View(tuple(_decode_groups(batch, cache, window)), tuple(_chunks(batch, cache, window)))


def _decode_groups(batch: AttentionBatch, cache: SdpaCache, window: int) -> list[_Decode]:
    """Group rows of one query token by power-of-two class of what they see, in bounded gathers.

    A group is padded to its own longest row, not to its class.
    """
    _, _, block_tokens, head_dim = cache.keys.shape
    block_bytes = cache.kv_heads * block_tokens * head_dim * cache.keys.element_size()
    lengths, contexts = batch.query_lengths_host, batch.context_lengths_host
    blocks = [
        -(-context // block_tokens) - _first_seen(context, window) // block_tokens
        for context in contexts
    ]
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
            groups.append(_decode_group(batch, cache, part, window))
    return groups


def _first_seen(context: int, window: int) -> int:
    """Return the position of the first token that a decode row sees."""
    return max(0, context - window) if window else 0


def _decode_group(
    batch: AttentionBatch, cache: SdpaCache, members: list[int], window: int
) -> _Decode:
    device = batch.block_tables.device
    block_tokens = cache.keys.shape[2]
    contexts = [batch.context_lengths_host[row] for row in members]
    tokens, tables, lengths = None, batch.block_tables, batch.context_lengths
    if len(members) < len(batch.query_lengths_host):
        rows = torch.tensor(members, device=device)
        tokens = batch.query_starts.index_select(0, rows).long()
        tables = tables.index_select(0, rows)
        lengths = lengths.index_select(0, rows)
    firsts = [_first_seen(context, window) // block_tokens for context in contexts]
    width = max(-(-it // block_tokens) - first for it, first in zip(contexts, firsts, strict=True))
    mask = None
    if window:
        start = (lengths - window).clamp(min=0) // block_tokens
        places = start[:, None] + torch.arange(width, device=device)
        tables = tables.gather(1, places.clamp(max=tables.shape[1] - 1).long())
        positions = start[:, None] * block_tokens + torch.arange(
            width * block_tokens, device=device
        )
        ends = lengths[:, None]
        hidden = (positions >= ends) | (positions < ends - window)
        mask = _additive(hidden, cache.keys.dtype)[:, None, None]
    elif min(contexts) < width * block_tokens:
        hidden = torch.arange(width * block_tokens, device=device) >= lengths[:, None]
        mask = _additive(hidden, cache.keys.dtype)[:, None, None]
    gather = _by_head(tables[:, :width], cache.kv_heads).transpose(1, 2)
    return _Decode(tokens, len(members), gather.flatten(), mask)


def _chunks(batch: AttentionBatch, cache: SdpaCache, window: int) -> list[_Chunk]:
    """Describe each row of several query tokens, in parts."""
    chunks: list[_Chunk] = []
    start = 0
    for row, length in enumerate(batch.query_lengths_host):
        if length > 1:
            part = _part_tokens(batch, row, limited=bool(window or cache.shape.cap))
            for first in range(0, length, part):
                last = min(first + part, length)
                chunks.append(_chunk(batch, cache, (row, start, first, last), window))
        start += length
    return chunks


def _part_tokens(batch: AttentionBatch, row: int, *, limited: bool) -> int:
    """Return how many tokens of a row go in one call."""
    length = batch.query_lengths_host[row]
    fresh = batch.context_lengths_host[row] == length
    if fresh and batch.block_tables.device.type == "cpu" and length <= WHOLE_TOKENS:
        return PART_TOKENS
    return WHOLE_TOKENS if limited else length


def _chunk(
    batch: AttentionBatch, cache: SdpaCache, place: tuple[int, int, int, int], window: int
) -> _Chunk:
    """Describe tokens first..last of a row, whose first token is the pack's `start`-th."""
    row, start, first, last = place
    device, dtype, block_tokens = batch.block_tables.device, cache.keys.dtype, cache.keys.shape[2]
    past = batch.context_lengths_host[row] - batch.query_lengths_host[row]
    end = past + last
    seen = min(end, last - first + window - 1) if window else end
    mask = None
    if past or first or cache.shape.cap is not None or (window and end > window):
        mask = _causal(last - first, seen, window, dtype, device)
    gather, skip = None, 0
    if past:
        block = (end - seen) // block_tokens
        table = batch.block_tables[row, block : -(-end // block_tokens)]
        gather, skip = _by_head(table, cache.kv_heads).T.flatten(), (end - seen) % block_tokens
    return _Chunk(start + first, start + last, seen, skip, gather, mask)


def _causal(
    count: int, seen: int, window: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the additive mask of the last `count` of `seen` tokens, bottom-right aligned."""
    positions = torch.arange(seen, device=device)
    queries = positions[seen - count :, None]
    hidden = positions > queries
    return _additive(hidden | (positions <= queries - window) if window else hidden, dtype)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where seen and minus infinity where hidden."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf)
