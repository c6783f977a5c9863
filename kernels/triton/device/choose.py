"""From logits to tokens, as it runs on the device: the largest of a row, and a draw under filters.

Owns the arithmetic of kernels/triton/ops.py's Chooser, to the meaning of kernels/choose.py: filters
are bounds on a row's weights, and ties with the last one kept are kept. No sort: a bound is found
among a float's bits. Sums run over one row in a fixed order, whatever its neighbours.
"""

import triton
import triton.language as tl


@triton.jit
def find_largest(values_ptr, tokens_ptr, logits_ptr, row_stride, vocab_size, SPAN: tl.constexpr,
                 TILE: tl.constexpr):  # fmt: skip
    """Find a span's largest logit and its first token; grid (rows, spans). NaN is above all."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * SPAN
    best = tl.full([TILE], float("-inf"), tl.float32)
    found = tl.zeros([TILE], tl.int32)
    wrong = tl.zeros([TILE], tl.int32)
    for first in range(begin, begin + SPAN, TILE):
        places = first + tl.arange(0, TILE)
        x = tl.load(
            logits_ptr + row * row_stride + places, mask=places < vocab_size, other=float("-inf")
        )
        wrong = wrong | (x != x).to(tl.int32)
        found = tl.where(x > best, places, found)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, found, 2147483647), 0)
    largest = tl.where(tl.max(wrong, 0) > 0, float("nan"), largest)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values_ptr + place, largest)
    tl.store(tokens_ptr + place, token)


@triton.jit
def join_largest(best_ptr, token_ptr, values_ptr, tokens_ptr, spans,
                 SPANS_MAX: tl.constexpr):  # fmt: skip
    """Find the largest of a row's spans; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, SPANS_MAX)
    inside = places < spans
    values = tl.load(values_ptr + row * spans + places, mask=inside, other=float("-inf"))
    tokens = tl.load(tokens_ptr + row * spans + places, mask=inside, other=2147483647)
    wrong = tl.max((values != values).to(tl.int32), 0) > 0
    clean = tl.where(values != values, float("-inf"), values)
    largest = tl.max(clean, 0)
    token = tl.min(tl.where(clean == largest, tokens, 2147483647), 0)
    tl.store(best_ptr + row, tl.where(wrong, float("nan"), largest))
    tl.store(token_ptr + row, token.to(tl.int64))


@triton.jit
def weigh(line_ptr, vocab_size, best, temperature, TILE: tl.constexpr):
    """Put weights in the place of a row's logits, the largest one's being 1."""
    for first in range(0, vocab_size, TILE):
        places = first + tl.arange(0, TILE)
        inside = places < vocab_size
        x = tl.load(line_ptr + places, mask=inside, other=float("-inf"))
        tl.store(line_ptr + places, tl.exp((x - best) / temperature), mask=inside)
    tl.debug_barrier()


@triton.jit
def reaches(line_ptr, low, step, wanted, vocab_size, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """Return how many of the bounds low + 1, 2, 3 steps keep weights that reach what is wanted.

    Bounds are floats' bits; what is kept is counted, or summed up.
    """
    kind = tl.int32 if COUNTS else tl.float32
    one = tl.zeros([TILE], kind)
    two = tl.zeros([TILE], kind)
    three = tl.zeros([TILE], kind)
    for first in range(0, vocab_size, TILE):
        places = first + tl.arange(0, TILE)
        weights = tl.load(line_ptr + places, mask=places < vocab_size, other=0.0)
        bits = weights.to(tl.int32, bitcast=True)
        worth = (weights > 0).to(tl.int32) if COUNTS else weights
        one += tl.where(bits >= low + step, worth, 0)
        two += tl.where(bits >= low + 2 * step, worth, 0)
        three += tl.where(bits >= low + 3 * step, worth, 0)
    count = (tl.sum(one.to(tl.float64), 0) >= wanted).to(tl.int32)
    count += (tl.sum(two.to(tl.float64), 0) >= wanted).to(tl.int32)
    return count + (tl.sum(three.to(tl.float64), 0) >= wanted).to(tl.int32)


@triton.jit
def largest_bound(line_ptr, wanted, least, vocab_size, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """Return the largest bound, `least` or above, whose weights still reach what is wanted.

    Weights lie in 0..1, where floats are in the order of their bits: 15 quarterings find it. If
    all that is not below `least` does not reach it, that is the bound.
    """
    low = tl.cast(least, tl.float32).to(tl.int32, bitcast=True)
    high = tl.cast(1.0, tl.float32).to(tl.int32, bitcast=True) + 1
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        count = reaches(line_ptr, low, step, wanted, vocab_size, COUNTS, TILE)
        high = tl.where(count == 3, high, tl.minimum(high, low + (count + 1) * step))
        low = low + count * step
    return low.to(tl.float32, bitcast=True)


@triton.jit
def kept_of(line_ptr, tile, bound, vocab_size, TILE: tl.constexpr):
    """Return a tile's weights in double precision, 0 where they are below the bound."""
    places = tile * TILE + tl.arange(0, TILE)
    weights = tl.load(line_ptr + places, mask=places < vocab_size, other=0.0)
    return tl.where(weights >= bound, weights, 0.0).to(tl.float64)


@triton.jit
def bound_of(line_ptr, top_k, top_p, vocab_size, TILE: tl.constexpr):
    """Return what top_k and then top_p keep: weights that are not below this."""
    bound = tl.cast(0.0, tl.float32)
    if top_k < vocab_size:
        bound = largest_bound(line_ptr, top_k.to(tl.float64), bound, vocab_size, True, TILE)
    if top_p < 1:
        total = tl.cast(0.0, tl.float64)
        for tile in range(0, (vocab_size + TILE - 1) // TILE):
            total += tl.sum(kept_of(line_ptr, tile, bound, vocab_size, TILE), 0)
        bound = largest_bound(line_ptr, top_p * total, bound, vocab_size, False, TILE)
    return bound


@triton.jit(  # small tensors may lie anywhere in a larger one: not a compilation for each place
    do_not_specialize_on_alignment=[
        *("best_ptr", "rows_ptr", "temperatures_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"),
        "uniforms_ptr",
    ]
)
def draw(tokens_ptr, sums_ptr, logits_ptr, best_ptr, rows_ptr, temperatures_ptr, top_k_ptr,
         top_p_ptr, min_p_ptr, uniforms_ptr, row_stride, vocab_size, HAS_MIN_P: tl.constexpr,
         TILE: tl.constexpr):  # fmt: skip
    """Draw a token for one row; grid (rows that draw,). sums is [them, tiles].

    It is the token at which the cumulative weight exceeds the uniform's share of all. One of
    weight 0 is never found.
    """
    which = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + which)
    line_ptr = logits_ptr + row * row_stride
    best = tl.load(best_ptr + row)
    bound = tl.cast(0.0, tl.float32)
    if best == best:  # of a row that is not finite nobody reads the token
        weigh(line_ptr, vocab_size, best, tl.load(temperatures_ptr + which), TILE)
        top_k = tl.load(top_k_ptr + which)
        bound = bound_of(line_ptr, top_k, tl.load(top_p_ptr + which), vocab_size, TILE)
    if HAS_MIN_P:
        bound = tl.maximum(bound, tl.load(min_p_ptr + which))
    tiles = (vocab_size + TILE - 1) // TILE
    total = tl.cast(0.0, tl.float64)
    for tile in range(0, tiles):
        part = tl.sum(kept_of(line_ptr, tile, bound, vocab_size, TILE), 0)
        tl.store(sums_ptr + which * tiles + tile, part)
        total += part
    tl.debug_barrier()
    target = tl.load(uniforms_ptr + which) * total
    before = tl.cast(0.0, tl.float64)
    begin = before
    chosen = 0
    for tile in range(0, tiles):
        after = before + tl.load(sums_ptr + which * tiles + tile)
        if (before <= target) & (after > before):
            chosen = tile
            begin = before
        before = after
    weights = kept_of(line_ptr, chosen, bound, vocab_size, TILE)
    sums = tl.cumsum(weights, 0)
    places = tl.arange(0, TILE)
    last = tl.max(tl.where(weights > 0, places, 0), 0)
    found = tl.min(tl.where((weights > 0) & (sums > target - begin), places, last), 0)
    tl.store(tokens_ptr + which, (chosen * TILE + found).to(tl.int64))
