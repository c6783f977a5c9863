"""The ops of a decoder layer in plain PyTorch, and with weights packed by oneDNN on a CPU.

Owns the reference fallback for every op that a faster set may fuse; kernels/select.py offers them
by name. Knows shapes only: no model, no cache, no sequence.
"""

import torch
import torch.nn.functional as F  # noqa: N812  the field's name for it

from kernels.base import PackedWeight, type_name
from kernels.choose import TorchChooser

PACK_ROWS = 32
"""Rows of input that oneDNN's weight layout is made for: it serves 1 to 512 rows well too."""

PACK_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""How far the packed product may be off, over the largest value: some roundings of the type."""


class TorchOps(TorchChooser):
    """Every op in PyTorch, on any device; weights stay as they are."""

    name = "torch"

    def supports(self, device: str, dtype: torch.dtype) -> str | None:
        """Return None: these ops serve everywhere, in any floating point."""
        if dtype.is_floating_point:
            return None
        return f"does not compute in {type_name(dtype)}"

    def pack(self, weight: torch.Tensor, *, whole_rows: bool = False) -> PackedWeight:
        """Return the weight itself."""
        return weight

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Return x [T, in] times the transposed weight: [T, out]."""
        assert isinstance(weight, torch.Tensor)
        return F.linear(x, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x over its root mean square, times weight; a float32 weight is applied in it."""
        if weight.dtype != x.dtype:
            return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and x + residual."""
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def rope(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Turn each adjacent pair of a head as one complex product, in float32."""
        turn = torch.view_as_complex(rotations).unsqueeze(1)
        pairs = x.float().view(*x.shape[:-1], -1, 2)
        turned = torch.view_as_real(torch.view_as_complex(pairs) * turn)
        return turned.flatten(-2).to(x.dtype)

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) x up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) x up, gelu by its tanh approximation."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)


class OneDnnOps(TorchOps):
    """PyTorch's ops with weights reordered once by oneDNN: 1.2 to 2.4 x the linear speed.

    Measured on 2 Zen 4 cores at 1 to 512 rows, f32 and bf16. The reordered weight replaces the
    plain one, so that nothing is held twice but a tied embedding.
    """

    name = "onednn"

    def supports(self, device: str, dtype: torch.dtype) -> str | None:
        """Return None, or why not; the operators are not public, so they are tried, not trusted."""
        if device != "cpu":
            return f"packs weights for a CPU, not for {device}"
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return "this PyTorch was built without oneDNN"
        if dtype not in PACK_TOLERANCE:
            return f"does not pack {type_name(dtype)}"
        weight = torch.linspace(-1, 1, 64 * 32).sin().view(64, 32).to(dtype)
        x = torch.linspace(-2, 1, 4 * 32).cos().view(4, 32).to(dtype)
        try:
            result = self.linear(x, self.pack(weight))
        except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
            return f"oneDNN's packed linear failed: {error}".splitlines()[0]
        expected = x.float() @ weight.float().T
        difference = ((result.float() - expected).abs().max() / expected.abs().max()).item()
        if not difference <= PACK_TOLERANCE[dtype]:
            return f"oneDNN's packed linear is off by {difference:.2g}"
        return None

    def pack(self, weight: torch.Tensor, *, whole_rows: bool = False) -> PackedWeight:
        """Return the weight in oneDNN's own order, opaque to every other operator."""
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        return packed

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Return x [T, in] times the transposed weight: [T, out]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return product
