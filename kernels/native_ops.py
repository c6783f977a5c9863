"""Products with weights packed for C++, and tokens found by it: the ops of the native backend.

Owns how weights lie in tiles, in bf16, int8 or 4 bits, and the threads that all of our C++ shares.
kernels/select.py offers them by name; kernels/native_step.py reads what they packed. They lie the
same way for every target of kernels/native.py, of which the best that the CPU runs serves.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from kernels.base import PackedWeight, type_name
from kernels.choose import Drawn
from kernels.huge_pages import HugePages
from kernels.native import TARGETS, NativeError, step_library, targets, version
from kernels.ops import TorchOps

TILE = 32
FOUR_BYTES, UNIT = 640, 32 * 32
"""Bytes of so many weights in 4 bits, with what they are scaled by."""
BF16, INT8, TURNED = 0, 1, 2
"""What C++ calls the forms of packed weights (kernels/cpu/inputs.h)."""
INT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
"""The type that stands for weights in 4 bits: quants of 0 to 15."""
FORMATS = {torch.bfloat16: BF16, torch.int8: INT8, INT4: INT8}
"""Those by the type that an engine is asked for; keys, values and activations are bf16 in all."""


_DRAW = np.dtype(
    [
        *(("temperature", "f4"), ("min_p", "f4"), ("top_k", "i8"), ("top_p", "f8")),
        ("uniform", "f8"),
    ]
)
"""struct Draw of kernels/cpu/choose.h."""


def _told(logits: torch.Tensor) -> tuple[int, int]:
    """Return the vocabulary of float32 logits [S, vocabulary], and how far apart its rows are."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    return logits.shape[1], logits.stride(0)


BEAT = ctypes.CFUNCTYPE(None)
"""What C++ calls in a long step."""
STEP_PARTS = ("embedding", "norms", "linear", "attention", "head", "tokens")
"""enum Section of kernels/cpu/profile.h."""


class DescribedWeight(ctypes.Structure):
    """struct Weight of kernels/cpu/linear.h."""

    _fields_ = (
        ("form", ctypes.c_int32),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("fours", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeight:
    """A weight in tiles of 32 outputs, filled up with zeros; `outputs` of them are the weight's.

    In int8 each output has its scale, in float32, and its row may be turned (kernels/cpu/turn.h).
    `fours` are the same weights in 4 bits, where that is what their file had, never turned; they
    may be all that there is.
    """

    outputs: int
    inputs: int
    turned: bool = False
    values: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    fours: torch.Tensor | None = None

    def described(self) -> DescribedWeight:
        """Return what C++ reads; valid as long as this is."""
        parts = (self.values, self.scales, self.fours)
        values, scales, fours = (None if part is None else part.data_ptr() for part in parts)
        form = TURNED if self.turned else INT8 if scales or fours else BF16
        return DescribedWeight(form, self.padded, self.inputs, values, scales, fours)

    @property
    def padded(self) -> int:
        """Return the outputs with those of zeros."""
        return _padded(self.outputs)


def _padded(outputs: int) -> int:
    return -(-outputs // TILE) * TILE


class NativeThreads:
    """The threads that ops and backend share, made at first use; only the engine's thread asks."""

    def __init__(self, target: str) -> None:
        self._engine: int | None = None
        self._library = step_library(target)
        self._library.engine_new.restype = ctypes.c_void_p
        self._library.model_new.restype = ctypes.c_void_p
        pointer, number = ctypes.c_void_p, ctypes.c_int64  # what every step calls, told once
        self._library.engine_step.argtypes = (
            *(pointer, pointer, pointer, number, pointer),
            *(pointer, pointer, pointer, number, pointer, BEAT),
        )
        self._library.engine_logits.argtypes = (pointer, pointer, pointer, number, pointer)
        self._library.engine_best.argtypes = (
            *(pointer, pointer, number, number, number),
            *(pointer, pointer),
        )
        self._library.engine_draw.argtypes = (
            *(pointer, pointer, number, number, pointer),
            *(pointer, number, pointer, pointer),
        )

    @property
    def engine(self) -> ctypes.c_void_p:
        """Return the C++ engine, with as many threads as PyTorch has been given."""
        if self._engine is None:
            self._engine = self._library.engine_new(torch.get_num_threads())
        return ctypes.c_void_p(self._engine)

    @property
    def functions(self) -> ctypes.CDLL:
        """Return the library."""
        return self._library

    def profile(self, on: bool) -> dict[str, int]:
        """Return where steps' time went since the last call, ns; from now on it is told or not."""
        spent_ns = (ctypes.c_int64 * len(STEP_PARTS))()
        self._library.engine_profile(self.engine, ctypes.c_int32(on), spent_ns)
        return dict(zip(STEP_PARTS, spent_ns, strict=True))


def threads() -> NativeThreads:
    """Return the process's threads: ops and backend never run at the same time."""
    return threads_for(targets()[0])


@lru_cache(maxsize=len(TARGETS))
def threads_for(target: str) -> NativeThreads:
    """Return the threads that run this target's code."""
    return NativeThreads(target)


def refusal(device: str, dtype: torch.dtype) -> str | None:
    """Return why C++ cannot serve this type on this device, None if it can."""
    if device != "cpu":
        return f"is for a CPU, not for {device}"
    if dtype not in FORMATS:
        return f"computes in bf16, int8 and int4, not in {type_name(dtype)}"
    try:
        step_library(targets()[0])
    except NativeError as error:
        return str(error)
    return None


class NativeOps(TorchOps):
    """Products with weights packed into tiles; the rest is PyTorch's, outside a whole step."""

    name = "native"
    dtype = torch.bfloat16

    def __init__(self, threads: NativeThreads) -> None:
        self._threads = threads
        self._pages = HugePages()

    def supports(self, device: str, dtype: torch.dtype) -> str | None:
        """Return None, or why not."""
        if dtype in FORMATS and dtype != self.dtype:
            return f"is for {type_name(self.dtype)}, not for {type_name(dtype)}"
        return refusal(device, dtype)

    def pack(self, weight: torch.Tensor, *, whole_rows: bool = False) -> PackedWeight:
        """Return the weight [out, in] in tiles; one whose inputs are no multiple of 32 as it is."""
        return weight.bfloat16() if weight.shape[1] % TILE else self._packed(weight, whole_rows)

    def _packed(self, weight: torch.Tensor, whole_rows: bool) -> NativeWeight:
        weight, (outputs, inputs) = weight.bfloat16().contiguous(), weight.shape
        values = self._pages.zeros((_padded(outputs) * inputs,), torch.bfloat16)
        self._threads.functions.pack_bf16(
            *(ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(outputs), ctypes.c_int64(inputs)),
            ctypes.c_void_p(values.data_ptr()),
        )
        return NativeWeight(outputs=outputs, inputs=inputs, values=values)

    @property
    def layout(self) -> str:
        """Return how weights lie: as these sources put them."""
        return f"{self.name} {version()}"

    def tensors(self, weight: PackedWeight) -> dict[str, torch.Tensor]:
        """Return what a packed weight consists of."""
        if not isinstance(weight, NativeWeight):
            assert isinstance(weight, torch.Tensor)
            return {"whole": weight}
        sizes = torch.tensor([weight.outputs, weight.inputs, weight.turned])
        parts = {name: getattr(weight, name) for name in ("values", "scales", "fours")}
        return {"sizes": sizes} | {name: part for name, part in parts.items() if part is not None}

    def weight(self, tensors: dict[str, torch.Tensor]) -> PackedWeight:
        """Return the packed weight that consists of these."""
        if "whole" in tensors:
            return tensors["whole"]
        outputs, inputs, turned = tensors["sizes"].tolist()
        parts = {name: part for name, part in tensors.items() if name != "sizes"}
        return NativeWeight(outputs=outputs, inputs=inputs, turned=bool(turned), **parts)

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Return x [T, in] times the transposed weight: [T, out]."""
        if not isinstance(weight, NativeWeight):
            return super().linear(x, weight)
        x, described = x.contiguous(), weight.described()
        out = torch.empty((len(x), described.outputs), dtype=torch.float32)
        self._threads.functions.engine_multiply(
            *(self._threads.engine, ctypes.byref(described), ctypes.c_void_p(x.data_ptr())),
            *(ctypes.c_int64(len(x)), ctypes.c_void_p(out.data_ptr())),
            ctypes.c_int64(described.outputs),
        )
        return out[:, : weight.outputs].to(x.dtype)

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit, NaN if one is none, and its token."""
        count = logits.shape[0]
        values = torch.empty(count, dtype=torch.float32)
        tokens = torch.empty(count, dtype=torch.int64)
        self._threads.functions.engine_best(
            *(self._threads.engine, logits.data_ptr(), count, *_told(logits)),
            *(values.data_ptr(), tokens.data_ptr()),
        )
        return values, tokens

    def draw(self, logits: torch.Tensor, best: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """Return a token for each row that draws."""
        count = len(drawn.rows)
        draws, tokens = np.empty(count, _DRAW), torch.empty(count, dtype=torch.int64)
        for name in ("temperature", "top_k", "top_p"):
            draws[name] = getattr(drawn, name).numpy()
        draws["uniform"] = drawn.uniforms.numpy()
        draws["min_p"] = 0 if drawn.min_p is None else drawn.min_p[:, 0].numpy()
        rows, best = drawn.rows.contiguous(), best.contiguous()
        self._threads.functions.engine_draw(
            *(self._threads.engine, logits.data_ptr(), *_told(logits), best.data_ptr()),
            *(rows.data_ptr(), count, draws.ctypes.data, tokens.data_ptr()),
        )
        return tokens


class NativeInt8Ops(NativeOps):
    """Weights in int8 with a scale an output, activations in int8 with a scale for 32 of them.

    Where whole rows come in, they are turned first, so that one scale a row will do. Weights that a
    file has in 4 bits are kept as they are too: they are read for steps of up to 3 rows, whose time
    is that of reading them.
    """

    name = "native-int8"
    dtype = torch.int8

    def _packed(self, weight: torch.Tensor, whole_rows: bool) -> NativeWeight:
        weight, (outputs, inputs) = weight.float().contiguous(), weight.shape
        values = self._pages.zeros((_padded(outputs) * inputs,), torch.uint8)
        scales = self._pages.zeros((_padded(outputs),), torch.float32)
        functions = self._threads.functions
        turned = whole_rows and bool(functions.can_turn(ctypes.c_int64(inputs)))
        functions.pack_int8(
            *(ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(outputs), ctypes.c_int64(inputs)),
            ctypes.c_int32(turned),
            *(ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(scales.data_ptr())),
        )
        return NativeWeight(
            outputs=outputs,
            inputs=inputs,
            turned=turned,
            values=values,
            scales=scales,
            fours=self._fours(weight),
        )

    def _fours(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return a float32 weight in 4 bits, None if it is not one of 4 bits."""
        outputs, inputs = weight.shape
        packed = torch.empty(_padded(outputs) * inputs // UNIT * FOUR_BYTES, dtype=torch.uint8)
        exact = self._threads.functions.pack_int4(
            *(ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(outputs), ctypes.c_int64(inputs)),
            ctypes.c_void_p(packed.data_ptr()),
        )
        return self._pages.zeros(packed.shape, packed.dtype).copy_(packed) if exact else None


class NativeInt4Ops(NativeInt8Ops):
    """Weights that a file has in 4 bits as they are, all others in int8; activations in int8.

    Less memory is read and held than by int8, and steps of many rows take longer.
    """

    name = "native-int4"
    dtype = INT4

    def _packed(self, weight: torch.Tensor, whole_rows: bool) -> NativeWeight:
        weight, (outputs, inputs) = weight.float().contiguous(), weight.shape
        if (fours := self._fours(weight)) is None:
            return super()._packed(weight, whole_rows)
        return NativeWeight(outputs=outputs, inputs=inputs, fours=fours)
