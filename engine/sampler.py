"""What a step's rows are sampled by: each by its own parameters, its own seed and its own index.

Owns min_tokens, the random numbers and who draws at all; how a token is found among the logits is
kernels/choose.py's. engine/runner.py calls it once a step. A row's token depends on its logits, its
seed and its output index alone, never on the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import SamplingParams
from engine.plan import Plan
from engine.uploads import moved, upload
from kernels.choose import Chooser, Drawn

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them only overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """A step's sampling rows; `drawn` None is the all-greedy short path.

    forbidden_rows and forbidden_tokens are aligned: tokens that min_tokens hides.
    """

    drawn: Drawn | None
    forbidden_rows: torch.Tensor | None
    forbidden_tokens: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One token a row, and its largest logit; where that is not finite, the token is void."""

    tokens: torch.Tensor  # [S] int64
    best: torch.Tensor  # [S] float32, NaN if one of the row's logits is none


def sampling_batch(
    plan: Plan, eos_ids: tuple[int, ...], vocab_size: int, device: str
) -> SamplingBatch:
    """Collect the parameters of the plan's sampling rows, in row order."""
    wanted = [row for row, samples in enumerate(plan.samples) if samples]
    params = [plan.sampling[row] for row in wanted]
    indices = [plan.output_indices[row] for row in wanted]
    rows, tokens = _forbidden(params, indices, eos_ids, vocab_size)
    return SamplingBatch(
        drawn=_drawn(params, indices, vocab_size, device),
        forbidden_rows=upload(rows, device) if rows else None,
        forbidden_tokens=upload(tokens, device) if rows else None,
    )


def _drawn(
    params: list[SamplingParams], indices: list[int], vocab_size: int, device: str
) -> Drawn | None:
    rows = [row for row, item in enumerate(params) if not is_greedy(item)]
    if not rows:
        return None
    some = [params[row] for row in rows]
    draws = uniforms([item.seed for item in some], [indices[row] for row in rows])
    top_k = [item.top_k if 0 < item.top_k < vocab_size else vocab_size for item in some]
    min_p = [item.min_p for item in some]
    return Drawn(
        rows=upload(rows, device),
        temperature=upload([item.temperature for item in some], device),
        top_k=upload(top_k, device),
        top_p=upload([item.top_p for item in some], device, torch.float64),
        min_p=upload(min_p, device)[:, None] if any(min_p) else None,
        uniforms=moved(torch.from_numpy(draws), device),
    )


def is_greedy(params: SamplingParams) -> bool:
    """Return whether these parameters leave no choice."""
    return params.temperature < GREEDY_BELOW or params.top_k == 1


def _forbidden(
    params: list[SamplingParams], indices: list[int], eos_ids: tuple[int, ...], vocab_size: int
) -> tuple[list[int], list[int]]:
    """List row and token for everything that would end a text before its min_tokens."""
    pairs = [
        (row, token)
        for row, (item, index) in enumerate(zip(params, indices, strict=True))
        if index < item.min_tokens
        for token in (*(() if item.ignore_eos else eos_ids), *item.stop_token_ids)
        if 0 <= token < vocab_size
    ]
    return [row for row, _ in pairs], [token for _, token in pairs]


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each seed and output index.

    SplitMix64 (Steele, Lea, Flood, 2014) as a counter-based generator: the index's step of the
    stream that the mixed seed begins.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    start = np.array([seed % 2**64 for seed in seeds], np.uint64)
    step = np.array(indices, np.uint64) + np.uint64(1)
    mixed = _mix(_mix(start + golden) + step * golden)
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53, np.float64)


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def sample(logits: torch.Tensor, batch: SamplingBatch, chooser: Chooser) -> Sampled:
    """Choose a token for each row of float32 logits [S, vocabulary], which are overwritten."""
    if batch.forbidden_rows is not None:
        assert batch.forbidden_tokens is not None
        places = batch.forbidden_rows * logits.shape[1] + batch.forbidden_tokens
        logits.view(-1).index_fill_(0, places, -torch.inf)  # an assignment waits for the device
    best, tokens = chooser.best(logits)
    if batch.drawn is not None:
        tokens[batch.drawn.rows] = chooser.draw(logits, best, batch.drawn)
    return Sampled(tokens=tokens, best=best)
