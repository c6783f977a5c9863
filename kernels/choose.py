"""From logits to tokens: the largest of a row, or a draw under temperature, top_k, top_p and min_p.

Owns the filters, in PyTorch, on any device; kernels/cpu/choose.h has them in C++, and tests hold
both to the same. Filters keep all tokens that tie with the last one kept, so that no order of equal
values decides. Knows no request: engine/sampler.py says who draws by what.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

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


class Chooser(Protocol):
    """Finds tokens among float32 logits [S, vocabulary]."""

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit [S], NaN if one is none, and its token [S] int64."""
        ...

    def draw(self, logits: torch.Tensor, best: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """Return a token [D] int64 for each row that draws; logits may be overwritten.

        What is drawn for a row whose best is not finite is void.
        """
        ...


class TorchChooser:
    """Both in PyTorch."""

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit and its token."""
        values, tokens = logits.max(dim=-1)
        return values, tokens

    def draw(self, logits: torch.Tensor, best: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """Return a token for each row that draws."""
        size = max(1, VALUES_MAX // logits.shape[1])
        found = []
        for first in range(0, len(drawn.rows), size):
            part = slice(first, first + size)
            rows = drawn.rows[part]
            weights = logits.index_select(0, rows).sub_(best.index_select(0, rows)[:, None])
            weights.div_(drawn.temperature[part, None]).exp_()
            found.append(_draw(weights, drawn, part))
        return torch.cat(found)


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
