"""What a decoder does to each row of a step between its products, as it runs on the device.

Owns norms, rope and gates, which kernels/triton/ops.py launches: each reads and writes its rows
once, where PyTorch's ops would several times. Sums and turns are float32, as kernels/ops.py has
them; what it rounds on the way is rounded here too.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(out_ptr, x_ptr, residual_ptr, weight_ptr, eps, x_stride, SIZE: tl.constexpr,
             WIDTH: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """Norm a row of x [rows, SIZE]; with ADD, x + residual, which is kept; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, WIDTH)
    inside = places < SIZE
    read = tl.load(x_ptr + row * x_stride + places, mask=inside, other=0.0)
    x = read.to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * SIZE + places, mask=inside, other=0.0)
        kept = (x + residual.to(tl.float32)).to(read.dtype)
        tl.store(residual_ptr + row * SIZE + places, kept, mask=inside)
        x = kept.to(tl.float32)
    weight = tl.load(weight_ptr + places, mask=inside, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + places, (x * root * weight).to(read.dtype), mask=inside)


@triton.jit
def turn_pairs(out_ptr, x_ptr, turns_ptr, token_stride, HEADS: tl.constexpr,
               HEAD_LINES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Turn pair i of each head by turns [token, i] (cosine, sine); grid (tokens, parts)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEAD_LINES + tl.arange(0, HEAD_LINES)
    dims = tl.arange(0, WIDTH)
    within = dims < HEAD_DIM
    inside = (heads < HEADS)[:, None] & within[None, :]
    source = x_ptr + token * token_stride + heads[:, None] * HEAD_DIM
    here = tl.load(source + dims[None, :], mask=inside, other=0.0)
    beside = tl.load(source + (dims ^ 1)[None, :], mask=inside, other=0.0).to(tl.float32)
    turn = turns_ptr + token * HEAD_DIM + dims // 2 * 2
    cosine = tl.load(turn, mask=within, other=1.0)
    sine = tl.load(turn + 1, mask=within, other=0.0)
    signed = tl.where(dims % 2 == 0, -sine, sine)
    turned = here.to(tl.float32) * cosine[None, :] + beside * signed[None, :]
    target = out_ptr + (token * HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(target, turned.to(here.dtype), mask=inside)


@triton.jit
def gate(out_ptr, gate_up_ptr, SIZE: tl.constexpr, PART: tl.constexpr,
         GELU: tl.constexpr):  # fmt: skip
    """Return silu(gate) x up, or gelu's by its tanh approximation; grid (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = places < SIZE
    read = tl.load(gate_up_ptr + row * 2 * SIZE + places, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + places, mask=inside, other=0.0)
    x = read.to(tl.float32)
    if GELU:  # x (1 + tanh(y)) / 2 is x sigmoid(2 y)
        opened = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        opened = x / (1.0 + tl.exp(-x))
    result = opened.to(read.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * SIZE + places, result.to(read.dtype), mask=inside)
