"""Attention over paged keys and values, as it runs on the device: one kernel for all of a step.

Owns the arithmetic of kernels/triton/backend.py, which launches it. A program owns a block of one
row's query tokens, with all query heads of one key head, so that grouped heads read keys and values
once; with segments, several programs share a row's context and `combine_parts` joins them. Reads
no key beyond a row's context: what lies there may be anything.
"""

import triton
import triton.language as tl


@triton.jit
def row_of_block(starts_ptr, rows, block, BLOCK_QUERIES: tl.constexpr):
    """Return the row that owns a block of queries: row r's begin at starts[r] // size + r."""
    low = 0
    high = rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_QUERIES + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def blocks_of(table_ptr, tile, last, end, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr):
    """Return which blocks hold the tile's tokens: one number, or [TILE] where it spans several."""
    if BLOCK_TOKENS % TILE == 0:
        blocks = tl.load(table_ptr + tile * TILE // BLOCK_TOKENS, mask=tile < last, other=0)
    else:
        positions = tile * TILE + tl.arange(0, TILE)
        there = positions < tl.minimum(end, last * TILE)
        blocks = tl.load(table_ptr + positions // BLOCK_TOKENS, mask=there, other=0)
    return blocks


@triton.jit
def visit_tiles(state, q, queries, first, last, end, window, table_ptr, keys_ptr, values_ptr,
                block_stride, scale, cap, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
                BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr,
                WINDOWED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Take tiles first..last into the running softmax (Milakov, Gimelshein, 2018), in base 2.

    state is sums of weighted values, largest score and sum of weights of each query. Without
    MASKED every query sees all of these tiles.
    """
    weighted, largest, total = state
    dims = tl.arange(0, WIDTH)
    whole = WIDTH == HEAD_DIM
    blocks = blocks_of(table_ptr, first, last, end, BLOCK_TOKENS, TILE)
    for tile in range(first, last):
        positions = tile * TILE + tl.arange(0, TILE)
        offsets = blocks.to(tl.int64) * block_stride + positions % BLOCK_TOKENS * HEAD_DIM
        # One tile ahead: keys wait for no table, so that the compiler can fetch them early.
        blocks = blocks_of(table_ptr, tile + 1, last, end, BLOCK_TOKENS, TILE)
        k_ptrs = keys_ptr + offsets[None, :] + dims[:, None]
        v_ptrs = values_ptr + offsets[:, None] + dims[None, :]
        if MASKED:
            inside = positions < end
            k = tl.load(k_ptrs, mask=inside[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif whole:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        else:
            k = tl.load(k_ptrs, mask=(dims < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="tf32x3") * scale
        if CAPPED:  # tanh by exp, whose overflow ends at 1
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if MASKED:
            seen = inside[None, :] & (positions[None, :] <= queries[:, None])
            if WINDOWED:
                seen = seen & (positions[None, :] > queries[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(above == float("-inf"), 0.0, above)  # nothing seen yet: no inf - inf
        shrink = tl.exp2(largest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(v.dtype), v, weighted, input_precision="tf32x3")
        largest = above
    return weighted, largest, total


@triton.jit
def attended(q, queries, first_query, last_query, first, last, end, window, table_ptr, keys_ptr,
             values_ptr, block_stride, scale, cap, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
             BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
             CAPPED: tl.constexpr, WINDOWED: tl.constexpr, DECODE: tl.constexpr):  # fmt: skip
    """Return the softmax state over tiles first..last; only their edges are masked, if worth it.

    Queries stand at first_query..last_query of their row.
    """
    state = (
        tl.zeros([BLOCK_M, WIDTH], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    if DECODE:
        return visit_tiles(
            state, q, queries, first, last, end, window, table_ptr, keys_ptr, values_ptr,
            block_stride, scale, cap, HEAD_DIM, WIDTH, BLOCK_TOKENS, TILE, CAPPED, WINDOWED, True,
        )  # fmt: skip
    clear = first
    if WINDOWED:
        left = tl.maximum(last_query - window + 1, 0)
        clear = tl.minimum(tl.maximum((left + TILE - 1) // TILE, first), last)
        state = visit_tiles(
            state, q, queries, first, clear, end, window, table_ptr, keys_ptr, values_ptr,
            block_stride, scale, cap, HEAD_DIM, WIDTH, BLOCK_TOKENS, TILE, CAPPED, WINDOWED, True,
        )  # fmt: skip
    edge = tl.minimum(tl.maximum((first_query + 1) // TILE, clear), last)
    state = visit_tiles(
        state, q, queries, clear, edge, end, window, table_ptr, keys_ptr, values_ptr,
        block_stride, scale, cap, HEAD_DIM, WIDTH, BLOCK_TOKENS, TILE, CAPPED, WINDOWED, False,
    )  # fmt: skip
    return visit_tiles(
        state, q, queries, edge, last, end, window, table_ptr, keys_ptr, values_ptr,
        block_stride, scale, cap, HEAD_DIM, WIDTH, BLOCK_TOKENS, TILE, CAPPED, WINDOWED, True,
    )  # fmt: skip


@triton.jit
def parts_of(tiles, segments, part_tiles):
    """Return in how many parts a row of one token is computed that sees so many tiles."""
    return tl.minimum(tl.maximum((tiles + part_tiles - 1) // part_tiles, 1), segments)


@triton.jit
def part_of(first, last, part, parts):
    """Return the tiles of one part of first..last."""
    each = (last - first + parts - 1) // parts
    begin = first + part * each
    return begin, tl.minimum(begin + each, last)


@triton.jit
def keep_part(parts_ptr, largest_ptr, totals_ptr, state, lines, dims, real, inside,
              WIDTH: tl.constexpr):  # fmt: skip
    """Keep a part's softmax state for `combine_parts`."""
    weighted, largest, total = state
    tl.store(parts_ptr + lines[:, None] * WIDTH + dims[None, :], weighted, mask=inside)
    tl.store(largest_ptr + lines, largest, mask=real)
    tl.store(totals_ptr + lines, total, mask=real)


@triton.jit(
    do_not_specialize=["rows", "segments", "part_tiles", "table_stride", "window"],
    do_not_specialize_on_alignment=["tables_ptr", "contexts_ptr", "starts_ptr"],
)
def paged_attention(out_ptr, parts_ptr, largest_ptr, totals_ptr, q_ptr, keys_ptr, values_ptr,
                    tables_ptr, contexts_ptr, starts_ptr, scale, cap, window, rows, segments,
                    part_tiles, table_stride, q_token_stride, q_head_stride, block_stride,
                    head_stride, HEADS: tl.constexpr, GROUP: tl.constexpr,
                    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
                    TILE: tl.constexpr, BLOCK_M: tl.constexpr, CAPPED: tl.constexpr,
                    WINDOWED: tl.constexpr, DECODE: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """Attend with one block of queries of a row; grid (blocks, key heads, segments).

    scale has log2(e) in it; with CAPPED it is 2 log2(e) / cap x the scores' and cap has log2(e).
    Rows of one token are split by their context; their parts go to [row, key head, segment].
    """
    BLOCK_QUERIES: tl.constexpr = BLOCK_M // GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # long chunks stand last and begin first
    head = tl.program_id(1)
    row = block if DECODE else row_of_block(starts_ptr, rows, block, BLOCK_QUERIES)
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    before = 0 if DECODE else (block - start // BLOCK_QUERIES - row) * BLOCK_QUERIES
    if before >= count:
        return
    context = tl.load(contexts_ptr + row)
    first_query = context - count + before
    end = tl.minimum(first_query + BLOCK_QUERIES, context)
    first = tl.maximum(first_query - window + 1, 0) // TILE if WINDOWED else 0
    last = tl.maximum(end + TILE - 1, 0) // TILE
    parts = 1
    if SPLIT:
        parts = tl.where(count == 1, parts_of(last - first, segments, part_tiles), 1)
        segment = tl.program_id(2)
        if segment >= parts:
            return
        first, last = part_of(first, last, segment, parts)
    lines = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, WIDTH)
    token = before + lines // GROUP
    real = (lines < BLOCK_QUERIES * GROUP) & (token < count)
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    heads = head * GROUP + lines % GROUP
    place = (start + token).to(tl.int64) * q_token_stride + heads * q_head_stride
    q = tl.load(q_ptr + place[:, None] + dims[None, :], mask=inside, other=0.0)
    offset = tl.cast(head, tl.int64) * head_stride
    weighted, largest, total = attended(
        q, context - count + token, first_query, end - 1, first, last, end, window,
        tables_ptr + tl.cast(row, tl.int64) * table_stride, keys_ptr + offset, values_ptr + offset,
        block_stride, scale, cap, HEAD_DIM, WIDTH, BLOCK_TOKENS, TILE, BLOCK_M, CAPPED, WINDOWED,
        DECODE,
    )  # fmt: skip
    if SPLIT:
        shared = tl.zeros([BLOCK_M], tl.int32) + parts > 1
        part = (tl.cast(row, tl.int64) * tl.num_programs(1) + head) * segments + segment
        keep_part(
            parts_ptr, largest_ptr, totals_ptr, (weighted, largest, total), part * GROUP + lines,
            dims, real & shared, inside & shared[:, None], WIDTH,
        )  # fmt: skip
        inside = inside & (shared == 0)[:, None]
    result = weighted / tl.where(total == 0, 1.0, total)[:, None]
    place = ((start + token).to(tl.int64) * HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["segments", "part_tiles", "window"],
    do_not_specialize_on_alignment=["contexts_ptr", "starts_ptr"],
)
def combine_parts(out_ptr, parts_ptr, largest_ptr, totals_ptr, contexts_ptr, starts_ptr, window,
                  segments, part_tiles, HEADS: tl.constexpr, GROUP: tl.constexpr,
                  GROUP_LINES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
                  TILE: tl.constexpr, WINDOWED: tl.constexpr):  # fmt: skip
    """Join the parts of one row and key head; grid (rows, key heads). Others have none."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts_ptr + row)
    if tl.load(starts_ptr + row + 1) - start != 1:
        return
    context = tl.load(contexts_ptr + row)
    first = tl.maximum(context - window, 0) // TILE if WINDOWED else 0
    parts = parts_of((context + TILE - 1) // TILE - first, segments, part_tiles)
    if parts == 1:
        return
    lines = tl.arange(0, GROUP_LINES)
    dims = tl.arange(0, WIDTH)
    real = lines < GROUP
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    weighted = tl.zeros([GROUP_LINES, WIDTH], tl.float32)
    largest = tl.full([GROUP_LINES], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_LINES], tl.float32)
    begin = (tl.cast(row, tl.int64) * tl.num_programs(1) + head) * segments
    for part in range(0, parts):
        line = (begin + part) * GROUP + lines
        sums = tl.load(totals_ptr + line, mask=real, other=0.0)
        peak = tl.load(largest_ptr + line, mask=real, other=float("-inf"))
        values = tl.load(parts_ptr + line[:, None] * WIDTH + dims[None, :], mask=inside, other=0.0)
        above = tl.maximum(largest, peak)
        base = tl.where(above == float("-inf"), 0.0, above)
        shrink = tl.exp2(largest - base)
        weight = tl.exp2(peak - base)
        total = total * shrink + sums * weight
        weighted = weighted * shrink[:, None] + values * weight[:, None]
        largest = above
    result = weighted / tl.where(total == 0, 1.0, total)[:, None]
    place = (tl.cast(start, tl.int64) * HEADS + head * GROUP + lines) * HEAD_DIM
    out = out_ptr + place[:, None] + dims[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=inside)
