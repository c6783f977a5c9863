"""From logits to tokens: greedy, or one draw a row by its own parameters and its own seed.

Owns the filters (temperature, top_k, top_p, min_tokens) and the random numbers. engine/runner.py
calls it once a step. A row's token depends on its logits, its seed and its output index alone,
never on the batch; filters keep all tokens that tie with the last one kept, so that no order of
equal values decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import SamplingParams
from engine.plan import Plan

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them only overflows."""

VALUES_MAX = 2**22
"""Bound of rows x vocabulary that one pass of drawing holds at once."""

NUCLEUS_FIRST = 1024
"""How many of a row's largest weights are sorted before sorting all of them, on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The rows that draw, D of the S that sample, with their parameters."""

    rows: torch.Tensor  # [D] int64
    temperature: torch.Tensor  # [D] float32
    top_k: torch.Tensor  # [D] int64, vocabulary size when off
    top_p: torch.Tensor  # [D] float64, 1 when off
    uniforms: torch.Tensor  # [D] float64 in [0, 1)


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
    """One token a row, and whether its logits were finite; a token of a False row is void."""

    tokens: torch.Tensor  # [S] int64
    finite: torch.Tensor  # [S] bool


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
        forbidden_rows=torch.tensor(rows, device=device) if rows else None,
        forbidden_tokens=torch.tensor(tokens, device=device) if rows else None,
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
    return Drawn(
        rows=torch.tensor(rows, device=device),
        temperature=torch.tensor([item.temperature for item in some], device=device),
        top_k=torch.tensor(top_k, device=device),
        top_p=torch.tensor([item.top_p for item in some], dtype=torch.float64, device=device),
        uniforms=torch.from_numpy(draws).to(device),
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


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """Choose a token for each row of float32 logits [S, vocabulary], which are overwritten."""
    if batch.forbidden_rows is not None:
        assert batch.forbidden_tokens is not None
        logits[batch.forbidden_rows, batch.forbidden_tokens] = -torch.inf
    best, tokens = logits.max(dim=-1)
    if batch.drawn is not None:
        drawn = batch.drawn
        size = max(1, VALUES_MAX // logits.shape[1])
        for first in range(0, len(drawn.rows), size):
            part = slice(first, first + size)
            rows = drawn.rows[part]
            shifted = logits.index_select(0, rows) - best.index_select(0, rows)[:, None]
            tokens[rows] = _draw(shifted, drawn, part)
    return Sampled(tokens=tokens, finite=best.isfinite())


def _draw(shifted: torch.Tensor, drawn: Drawn, part: slice) -> torch.Tensor:
    """Draw one token a row by inverting the cumulative weights, in order of token id.

    shifted are logits less their row's largest. Sums are in float64 and run from token 0 on, so
    that a row's result does not depend on how many rows there are.
    """
    weights = (shifted / drawn.temperature[part, None]).exp_()
    _keep_top_k(weights, drawn.top_k[part])
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    nucleus = (drawn.top_p[part] < 1).nonzero().squeeze(1)
    if len(nucleus):
        kept = weights.index_select(0, nucleus)
        _keep_top_p(kept, drawn.top_p[part][nucleus] * cumulative[nucleus, -1])
        cumulative[nucleus] = kept.cumsum(-1, dtype=torch.float64)
    # A uniform is at most 1 - 2^-53, so that the product rounds to less than the total, always.
    target = drawn.uniforms[part] * cumulative[:, -1]
    found = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return found.clamp_(max=shifted.shape[1] - 1)


def _keep_top_k(weights: torch.Tensor, top_k: torch.Tensor) -> None:
    """Zero what is smaller than a row's k-th largest weight."""
    rows = (top_k < weights.shape[1]).nonzero().squeeze(1)
    if not len(rows):
        return
    k = top_k[rows]
    some = weights.index_select(0, rows)
    smallest = some.topk(int(k.max()), dim=-1).values.gather(1, k[:, None] - 1)
    weights[rows] = some.masked_fill_(some < smallest, 0)


def _keep_top_p(weights: torch.Tensor, mass: torch.Tensor) -> None:
    """Zero what the smallest set of largest weights reaching a row's mass does not need."""
    vocab_size = weights.shape[1]
    first = min(NUCLEUS_FIRST, vocab_size) if weights.device.type == "cpu" else vocab_size
    largest = weights.topk(first, dim=-1).values
    last = (largest.cumsum(-1, dtype=torch.float64) < mass[:, None]).sum(-1)
    smallest = largest.gather(1, last.clamp(max=first - 1)[:, None])
    if first < vocab_size:
        for row in (last == first).nonzero().flatten().tolist():
            ordered = weights[row].sort(descending=True).values
            reached = (ordered.cumsum(-1, dtype=torch.float64) < mass[row]).sum()
            smallest[row] = ordered[reached.clamp(max=vocab_size - 1)]
    weights.masked_fill_(weights < smallest, 0)
