"""The ops of a decoder layer fused by Triton, on CUDA, and a Chooser that never waits for it.

Owns the launches of kernels/triton/device/rows.py and choose.py; kernels/select.py offers them by
name. Products are PyTorch's. What it chooses follows the host's random numbers, as every Chooser's,
so that a request's tokens are drawn by the same stream on every device.
"""

import torch
import triton

from kernels.base import type_name
from kernels.choose import Drawn
from kernels.ops import TorchOps
from kernels.triton.device import choose, rows
from kernels.triton.launch import power_of_two

SIZE_MAX = 2**15
"""The longest row that one program norms."""

GATE_PART = 1024
HEADS_AT_ONCE = 8
SPAN = 2**14
"""Logits that one program looks through for the largest."""

TILE = 2**10
DRAW_TILE, DRAW_WARPS = 2**13, 16
"""A row is drawn from by one program, which goes through it some 20 to 40 times."""


class TritonOps(TorchOps):
    """PyTorch's products, and Triton's everything else; what it cannot take goes to PyTorch."""

    name = "triton"

    def supports(self, device: str, dtype: torch.dtype) -> str | None:
        """Return None, or why not."""
        if device != "cuda" and not triton.knobs.runtime.interpret:
            return f"runs on CUDA, not on {device}"
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"does not compute in {type_name(dtype)}"
        return None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x over its root mean square, times weight."""
        size = x.shape[-1]
        if size > SIZE_MAX or x.stride(-1) != 1:
            return super().rms_norm(x, weight, eps)
        lines = x if x.is_contiguous() else x.contiguous()
        out = torch.empty_like(lines)
        _norm(out, lines.view(-1, size), lines, weight, eps, add=False)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and x + residual."""
        if x.shape[-1] > SIZE_MAX or not (x.is_contiguous() and residual.is_contiguous()):
            return super().add_rms_norm(x, residual, weight, eps)
        out = torch.empty_like(x)
        _norm(out, x, residual, weight, eps, add=True)
        return out, residual

    def rope(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Turn each adjacent pair of a head, in float32."""
        tokens, heads, head_dim = x.shape
        if x.stride(1) != head_dim or x.stride(2) != 1:
            x = x.contiguous()
        out = x.new_empty(x.shape)
        rows.turn_pairs[(tokens, -(-heads // HEADS_AT_ONCE))](
            out, x, rotations.contiguous(), x.stride(0), HEADS=heads, HEAD_LINES=HEADS_AT_ONCE,
            HEAD_DIM=head_dim, WIDTH=power_of_two(head_dim),
        )  # fmt: skip
        return out

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) x up."""
        return _gated(gate_up, gelu=False)

    def gelu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) x up, gelu by its tanh approximation."""
        return _gated(gate_up, gelu=True)

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit and its first token."""
        count, vocab_size = logits.shape
        spans = -(-vocab_size // SPAN)
        values = logits.new_empty((count, spans))
        tokens = torch.empty((count, spans), dtype=torch.int32, device=logits.device)
        largest = logits.new_empty(count)
        found = torch.empty(count, dtype=torch.int64, device=logits.device)
        if count:
            choose.find_largest[(count, spans)](
                values, tokens, logits, logits.stride(0), vocab_size, SPAN=SPAN, TILE=TILE
            )
            choose.join_largest[(count,)](
                largest, found, values, tokens, spans, SPANS_MAX=power_of_two(spans)
            )
        return largest, found

    def draw(self, logits: torch.Tensor, best: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """Return a token for each row that draws."""
        count, vocab_size = len(drawn.rows), logits.shape[1]
        sums = torch.empty(
            (count, -(-vocab_size // DRAW_TILE)), dtype=torch.float64, device=logits.device
        )
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        choose.draw[(count,)](
            tokens, sums, logits, best, drawn.rows, drawn.temperature, drawn.top_k, drawn.top_p,
            drawn.top_p if drawn.min_p is None else drawn.min_p, drawn.uniforms, logits.stride(0),
            vocab_size, HAS_MIN_P=drawn.min_p is not None, TILE=DRAW_TILE,
            num_warps=DRAW_WARPS,
        )  # fmt: skip
        return tokens


def _norm(
    out: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    """Norm the rows of x [rows, size] into out, all of them contiguous."""
    count, size = x.shape
    width = power_of_two(size)
    rows.rms_norm[(count,)](
        out, x, residual, weight, eps, x.stride(0), SIZE=size, WIDTH=width, ADD=add,
        num_warps=min(16, max(1, width // 512)),
    )  # fmt: skip


def _gated(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    count, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((count, size))
    rows.gate[(count, -(-size // GATE_PART))](
        out, gate_up, SIZE=size, PART=GATE_PART, GELU=gelu
    )  # fmt: skip
    return out
