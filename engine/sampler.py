"""From logits to tokens: greedy, or one draw a row by its own parameters and its own seed.

Owns the filters (temperature, top_k, top_p, min_p, min_tokens) and the random numbers.
engine/runner.py calls it once a step. A row's token depends on its logits, its seed and its output
index alone, never on the batch; filters keep all tokens that tie with the last one kept, so that
no order of equal values decides.
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

VALUES_MAX = 2**20
"""Bound of rows x vocabulary that one pass of drawing holds: a few MB, within a CPU's cache."""

NUCLEUS_TIERS = (64, 1024)
"""How many of a row's largest weights are sorted at first, and then, before all, on a CPU."""

BLOCK = 256
"""Tokens whose weights are summed as one step of the search for a draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The rows that draw, D of the S that sample, with their parameters."""

    rows: torch.Tensor  # [D] int64
    temperature: torch.Tensor  # [D] float32
    top_k: torch.Tensor  # [D] int64, vocabulary size when off
    top_p: torch.Tensor  # [D] float64, 1 when off
    uniforms: torch.Tensor  # [D] float64 in [0, 1)
    min_p: torch.Tensor | None = None  # [D, 1] float32, 0 when off; None when off everywhere


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
    min_p = [item.min_p for item in some]
    return Drawn(
        rows=torch.tensor(rows, device=device),
        temperature=torch.tensor([item.temperature for item in some], device=device),
        top_k=torch.tensor(top_k, device=device),
        top_p=torch.tensor([item.top_p for item in some], dtype=torch.float64, device=device),
        min_p=torch.tensor(min_p, device=device)[:, None] if any(min_p) else None,
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
            weights = logits.index_select(0, rows).sub_(best.index_select(0, rows)[:, None])
            tokens[rows] = _draw(weights.div_(drawn.temperature[part, None]).exp_(), drawn, part)
    return Sampled(tokens=tokens, finite=best.isfinite())


def _draw(weights: torch.Tensor, drawn: Drawn, part: slice) -> torch.Tensor:
    """Draw one token a row from its weights [rows, vocabulary], whose largest is 1."""
    limited = (drawn.top_k[part] < weights.shape[1]).nonzero().squeeze(1)
    if len(limited):
        smallest = _smallest_of_top_k(_rows(weights, limited), drawn.top_k[part][limited])
        _cut(weights, limited, smallest)
    nucleus = (drawn.top_p[part] < 1).nonzero().squeeze(1)
    if len(nucleus):
        some = _rows(weights, nucleus)
        total = _blocks(some).sum(-1).sum(-1, dtype=torch.float64)
        _cut(weights, nucleus, _smallest_of_top_p(some, drawn.top_p[part][nucleus] * total))
    if drawn.min_p is not None:
        weights.masked_fill_(weights < drawn.min_p[part], 0)
    return _found(_blocks(weights), drawn.uniforms[part]).clamp_(max=weights.shape[1] - 1)


def _rows(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return these rows; the tensor itself when they are all of them."""
    return weights if len(rows) == len(weights) else weights.index_select(0, rows)


def _cut(weights: torch.Tensor, rows: torch.Tensor, smallest: torch.Tensor) -> None:
    """Zero what is smaller than the smallest weight [rows, 1] that a filter keeps."""
    limits = weights.new_zeros((len(weights), 1)).index_copy_(0, rows, smallest)
    weights.masked_fill_(weights < limits, 0)


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    """Return weights [rows, vocabulary] as [rows, blocks, BLOCK]; the last block ends in zeros."""
    missing = -weights.shape[1] % BLOCK
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    return weights.view(len(weights), -1, BLOCK)


def _found(blocks: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the token at which each row's cumulative weight exceeds its uniform's share of all.

    Tokens stand in order of id; the block is found first, then the token in it. Every sum runs
    over one row in a fixed order, so that a row's result does not depend on how many there are. A
    token of weight 0 is never found: uniforms are at most 1 - 2^-53, so that a share of a sum
    rounds to less than the sum.
    """
    sums = blocks.sum(-1).double()
    cumulative = sums.cumsum(-1)
    target = uniforms * cumulative[:, -1]
    block = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    block.clamp_(max=sums.shape[1] - 1)
    rows = torch.arange(len(block), device=block.device)
    before = cumulative[rows, block] - sums[rows, block]
    share = ((target - before) / sums[rows, block]).clamp_(0, 1 - 2**-53)
    inner = blocks[rows, block].cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(inner, (share * inner[:, -1])[:, None], right=True).squeeze(1)
    return block * BLOCK + token


def _smallest_of_top_k(weights: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return each row's k-th largest weight [rows, 1]."""
    largest = weights.topk(int(top_k.max()), dim=-1).values
    return largest.gather(1, top_k[:, None] - 1)


def _smallest_of_top_p(weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Return the last weight [rows, 1] of each row's smallest set that reaches its mass.

    A peaked row needs few of its largest weights, so few are sorted before more are.
    """
    vocab_size = weights.shape[1]
    tiers = NUCLEUS_TIERS if weights.device.type == "cpu" else ()
    smallest = weights.new_zeros((len(weights), 1))
    rows = torch.arange(len(weights), device=weights.device)
    for first in (*(tier for tier in tiers if tier < vocab_size), vocab_size):
        largest = _rows(weights, rows).topk(first, dim=-1).values
        last = (largest.cumsum(-1, dtype=torch.float64) < mass[rows, None]).sum(-1)
        found = largest.gather(1, last.clamp(max=first - 1)[:, None])
        reached = (last < first).logical_or_(torch.tensor(first == vocab_size, device=last.device))
        smallest[rows[reached]] = found[reached]
        rows = rows[~reached]
        if not len(rows):
            break
    return smallest
