"""Keys and values on their way into the paged cache, as it runs on the device.

Owns two kernels that kernels/triton/backend.py launches: keys and values as they are, and a step's
fused projection, whose heads are normed and turned on the way. A slot below 0 is nobody's: it is
passed over. The cache is [blocks, key heads, block_tokens, head_dim].
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def store_kv(k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, k_token_stride, k_head_stride,
             v_token_stride, v_head_stride, block_stride, head_stride, KV_HEADS: tl.constexpr,
             HEAD_LINES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
             BLOCK_TOKENS: tl.constexpr):  # fmt: skip
    """Write one token's keys and values; grid (tokens,)."""
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, HEAD_LINES)
    dims = tl.arange(0, WIDTH)
    inside = (heads < KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    place = slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * HEAD_DIM
    target = place + heads[:, None] * head_stride + dims[None, :]
    k_place = token.to(tl.int64) * k_token_stride + heads[:, None] * k_head_stride + dims[None, :]
    v_place = token.to(tl.int64) * v_token_stride + heads[:, None] * v_head_stride + dims[None, :]
    tl.store(keys_ptr + target, tl.load(k_ptr + k_place, mask=inside), mask=inside)
    tl.store(values_ptr + target, tl.load(v_ptr + v_place, mask=inside), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def turn_and_store(q_ptr, qkv_ptr, turns_ptr, q_norm_ptr, k_norm_ptr, keys_ptr, values_ptr,
                   slots_ptr, eps, block_stride, head_stride, HEADS: tl.constexpr,
                   KV_HEADS: tl.constexpr, HEAD_LINES: tl.constexpr, HEAD_DIM: tl.constexpr,
                   WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
                   NORMED: tl.constexpr):  # fmt: skip
    """Take HEAD_LINES heads of one token's queries, keys and values; grid (tokens, parts).

    Queries and keys are normed where the model norms heads, then pair i of a head is turned by
    turns [token, i] (cosine, sine). Queries go to q [tokens, heads, head_dim], the rest into the
    cache. A value beside a pair's is loaded again, not shuffled: it is in the cache.
    """
    token = tl.program_id(0).to(tl.int64)
    lines = tl.program_id(1) * HEAD_LINES + tl.arange(0, HEAD_LINES)
    dims = tl.arange(0, WIDTH)
    within = dims < HEAD_DIM
    inside = (lines < HEADS + 2 * KV_HEADS)[:, None] & within[None, :]
    source = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + lines[:, None]) * HEAD_DIM
    here = tl.load(source + dims[None, :], mask=inside, other=0.0)
    beside = tl.load(source + (dims ^ 1)[None, :], mask=inside, other=0.0)
    kind = here.dtype
    is_query = lines < HEADS
    is_key = (lines >= HEADS) & (lines < HEADS + KV_HEADS)
    x = here.to(tl.float32)
    y = beside.to(tl.float32)
    if NORMED:
        root = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        q_here = tl.load(q_norm_ptr + dims, mask=within, other=0.0).to(tl.float32)
        k_here = tl.load(k_norm_ptr + dims, mask=within, other=0.0).to(tl.float32)
        q_beside = tl.load(q_norm_ptr + (dims ^ 1), mask=within, other=0.0).to(tl.float32)
        k_beside = tl.load(k_norm_ptr + (dims ^ 1), mask=within, other=0.0).to(tl.float32)
        queried = is_query[:, None]
        x = (x * root * tl.where(queried, q_here[None, :], k_here[None, :])).to(kind)
        y = (y * root * tl.where(queried, q_beside[None, :], k_beside[None, :])).to(kind)
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    turn = turns_ptr + token * HEAD_DIM + dims // 2 * 2
    cosine = tl.load(turn, mask=within, other=1.0)
    sine = tl.load(turn + 1, mask=within, other=0.0)
    signed = tl.where(dims % 2 == 0, -sine, sine)
    turned = (x * cosine[None, :] + y * signed[None, :]).to(kind)
    q_place = (token * HEADS + lines[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(q_ptr + q_place, turned, mask=inside & is_query[:, None])
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        head = tl.where(is_key, lines - HEADS, lines - HEADS - KV_HEADS)
        place = slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * HEAD_DIM
        target = place + head[:, None] * head_stride + dims[None, :]
        is_value = lines >= HEADS + KV_HEADS
        tl.store(keys_ptr + target, turned, mask=inside & is_key[:, None])
        tl.store(values_ptr + target, here, mask=inside & is_value[:, None])
