"""The table of rope's turns: cosine and sine of every position and pair of a head.

Owns the frequencies of each kind of scaling; engine/weights.py calls it once at load. Computed in
float32 in transformers' order of operations, since models were trained with that rounding.
"""

import math

import torch

from engine.rope import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling


def rotations(
    rope: Rope, *, head_dim: int, positions: int, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """Return cosine and sine of each position and pair: [positions, head_dim / 2, 2] float32.

    factors are what a GGUF file divides the frequencies by.
    """
    turns = base_frequencies(rope, head_dim)
    magnitude = 1.0
    if rope.scaling is not None:
        turns = scaled(turns, rope, head_dim)
        magnitude = attention_factor(rope.scaling)
    if factors is not None:
        turns = turns / factors
    angles = torch.arange(positions).float()[:, None] * turns
    return torch.stack([angles.cos() * magnitude, angles.sin() * magnitude], dim=-1)


def base_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return by how much each pair turns at each position, unstretched: [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / rope.base**exponents


def scaled(turns: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the stretched frequencies."""
    match rope.scaling:
        case LinearScaling(factor=factor):
            return turns / factor
        case Llama3Scaling() as scaling:
            return _llama3(turns, scaling)
        case YarnScaling() as scaling:
            return _yarn(turns, scaling, rope.base, head_dim)
        case None:
            return turns


def attention_factor(scaling: RopeScaling) -> float:
    """Return what cosine and sine are multiplied by."""
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


def _llama3(turns: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Divide low frequencies, keep high ones, with a ramp between."""
    rounds = scaling.original_model_len / (2 * math.pi / turns)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = (rounds - low) / (high - low)
    ramp = (1 - kept) * turns / scaling.factor + kept * turns
    return torch.where(kept > 1, turns, torch.where(kept < 0, turns / scaling.factor, ramp))


def _yarn(turns: torch.Tensor, scaling: YarnScaling, base: float, head_dim: int) -> torch.Tensor:
    """Divide pairs that turn less than beta_slow times, keep those above beta_fast, with a ramp."""

    def pair_of(rounds: float) -> float:
        length = scaling.original_model_len / (rounds * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(base))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = 0.001 if high == low else high - low
    divided = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    kept = 1 - divided
    return 1.0 / (scaling.factor * (1.0 / turns)) * (1 - kept) + turns * kept
