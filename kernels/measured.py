"""Which set of ops multiplies fastest here, shape by shape: a short measurement, and ops after it.

engine/kernel_table.py asks for the rates once, keeps them, and hands the winners to MeasuredOps;
`iterscope doctor` prints them. A few rows meet one slice of each weight: 0.1 s for all of them on a
quiet machine, BUDGET_S beside other work, and then it says so.
Never changes which set serves on the way: a weight stays with the ops that packed it.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

import torch

from kernels.base import Ops, PackedWeight
from kernels.choose import Drawn
from kernels.ops import TorchOps

ROWS = (1, 8, 64)
VALUES_MAX = 2**19
"""Weights of the slice that is multiplied: more outputs are the same again."""
VALUES_MIN = 2**17
"""A weight of fewer is not worth a choice."""
TRIES, TRIES_MAX = 3, 20
AGREE = 1.15
"""A set's rate is steady when its two best times are no further apart."""
BUDGET_S = 1.0
"""After it nothing is tried more than TRIES times, steady or not."""

Rates = dict[str, dict[str, list[float]]]
"""GFLOP/s at each of ROWS, by shape as `576x1536` (outputs, inputs), then by the name of ops."""


def shape_name(outputs: int, inputs: int) -> str:
    """Return what a shape is called in Rates."""
    return f"{outputs}x{inputs}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured; `steady` is False where other work took the processor meanwhile."""

    rates: Rates
    steady: bool


def measure(
    candidates: Mapping[str, Ops], shapes: set[tuple[int, int]], dtype: torch.dtype
) -> Measurement:
    """Return how fast each candidate multiplies inputs of this type by a weight of each shape."""
    draw, rates, steady = torch.Generator().manual_seed(1), Rates(), True
    until_s = time.perf_counter() + BUDGET_S
    for outputs, inputs in sorted(shapes):
        weight = torch.randn(min(outputs, max(32, VALUES_MAX // inputs)), inputs, generator=draw)
        packed = {name: (ops, ops.pack(weight.to(dtype))) for name, ops in candidates.items()}
        x = torch.randn(max(ROWS), inputs, generator=draw).to(dtype)
        found: dict[str, list[float]] = {name: [] for name in candidates}
        for rows in ROWS:
            for name, times_s in _times_s(packed, x[:rows], until_s).items():
                steady = steady and _agree(times_s)
                found[name].append(2e-9 * rows * weight.numel() / min(times_s))
        rates[shape_name(outputs, inputs)] = found
    return Measurement(rates, steady)


def _times_s(
    packed: Mapping[str, tuple[Ops, PackedWeight]], x: torch.Tensor, until_s: float
) -> dict[str, list[float]]:
    """Return each candidate's times; they take turns, so that a busy moment is not one's alone."""
    times: dict[str, list[float]] = {name: [] for name in packed}
    for turn in range(1 + TRIES_MAX):
        for name, (ops, weight) in packed.items():
            given = x.clone()
            began = time.perf_counter()
            ops.linear(given, weight)
            if turn:  # the first one finds its memory
                times[name].append(time.perf_counter() - began)
        if turn < TRIES:
            continue
        if all(map(_agree, times.values())) or time.perf_counter() > until_s:
            break
    return times


def _agree(times_s: Collection[float]) -> bool:
    best, second, *_ = sorted(times_s)
    return second <= AGREE * best


def fastest(rates: Rates, shape: str) -> str | None:
    """Return the ops that are fastest for a shape over all ROWS; None if it was not measured."""
    found = rates.get(shape)
    if not found:
        return None
    return max(found, key=lambda name: prod(found[name]))


@dataclass(frozen=True, slots=True)
class _Packed:
    ops: Ops
    weight: PackedWeight


class MeasuredOps(TorchOps):
    """Each weight by the ops that are fastest for its shape; tokens are found by the first."""

    name = "measured"

    def __init__(self, candidates: Mapping[str, Ops], rates: Rates) -> None:
        self._candidates = candidates
        self._rates = rates
        self._first = next(iter(candidates.values()))

    def supports(self, device: str, dtype: torch.dtype) -> str | None:
        """Return None, or why not: what the first of them says."""
        return self._first.supports(device, dtype)

    def pack(self, weight: torch.Tensor, *, whole_rows: bool = False) -> PackedWeight:
        """Return the weight [out, in] as its fastest ops pack it."""
        outputs, inputs = weight.shape
        name = fastest(self._rates, shape_name(outputs, inputs))
        ops = self._first if name is None else self._candidates[name]
        return _Packed(ops, ops.pack(weight, whole_rows=whole_rows))

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Return x [T, in] times the transposed weight: [T, out]."""
        assert isinstance(weight, _Packed)
        return weight.ops.linear(x, weight.weight)

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit and its token."""
        return self._first.best(logits)

    def draw(self, logits: torch.Tensor, best: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """Return a token for each row that draws."""
        return self._first.draw(logits, best, drawn)
