"""How fast a step could be here at best: bytes over memory's rate, products over the processor's.

Owns both rates, as PyTorch reaches them here and now, and the floor of a decode step and of a
prompt that follows. Whatever lies between an engine's figure and the floor is the engine's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import KV_AUTO, kv_bytes_per_token
from engine.spec import ModelSpec

READ_BYTES = 2**28
SIZE = 1024
ROUNDS = 7
WEIGHT_BYTES = {"f32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.625}
"""Bytes of a weight by the type that an engine is asked for."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Bytes a second that are read, and products and sums a second (2 a multiply-add)."""

    bytes_s: float
    operations_s: float


def best_of(work: Callable[[], object]) -> float:
    """Return the shortest of some runs, s: what the machine can, not what it was kept from."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def measure(dtype: str) -> Machine:
    """Return both rates with as many threads as PyTorch has, products in this type."""
    large = torch.ones(READ_BYTES // 4)
    if dtype in ("int8", "int4"):
        a = torch.ones((SIZE, SIZE), dtype=torch.int8)
        spent = best_of(lambda: torch._int_mm(a, a))
    else:
        b = torch.ones((SIZE, SIZE), dtype=torch.float32 if dtype == "f32" else torch.bfloat16)
        spent = best_of(lambda: b @ b)
    return Machine(bytes_s=READ_BYTES / best_of(large.sum), operations_s=2 * SIZE**3 / spent)


def parameters(spec: ModelSpec) -> int:
    """Return the weights that one token is multiplied with, head included, embedding not."""
    heads = spec.heads + 2 * spec.kv_heads
    attention = spec.hidden * spec.head_dim * (heads + spec.heads)
    layer = attention + 3 * spec.hidden * spec.intermediate
    return spec.layers * layer + spec.hidden * spec.vocab_size


def decode_s(spec: ModelSpec, dtype: str, machine: Machine, *, rows: int, context: int) -> float:
    """Return the shortest time of a step that decodes so many rows, s."""
    weights = parameters(spec)
    cached = kv_bytes_per_token(spec, KV_AUTO[dtype]) * context
    read = weights * WEIGHT_BYTES[dtype] + rows * cached
    return max(read / machine.bytes_s, 2 * weights * rows / machine.operations_s)


def prefill_s(spec: ModelSpec, machine: Machine, tokens: int) -> float:
    """Return the shortest time of a prompt: its products; one token goes through the head, s."""
    head = spec.hidden * spec.vocab_size
    return 2 * ((parameters(spec) - head) * tokens + head) / machine.operations_s
