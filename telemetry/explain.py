"""The two rules: what a request's part of a step was spent on, and what it pays for.

Owns `split` (causes, for explaining) and `shares` (for billing), as array functions over the rows
of any number of steps at once. explain_fold.py sums them for every request, explanation.py walks
one request's life with them: nobody else divides device time. Must never read a clock, and every
division is exact: the parts of a row sum to its time, the shares of a step to its device time.

The reasons for the rules stand in causes.py, from where they go into SCHEMA.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SPLIT = (
    "scheduler",
    "own_prefill",
    "own_decode",
    "recompute",
    "neighbour_prefill",
    "neighbour_decode",
    "padding",
)
"""The causes that `split` divides a row's time into, in the order of its columns."""

PREFILL, DECODE, SPARE, PREFILL_TOKENS, DECODE_TOKENS, SPARE_TOKENS = range(6)
"""Columns of a step's totals: modelled cost and tokens of its prefill, decode and spare rows."""


class Model(NamedTuple):
    """A step's cost in ns: fixed + p x prefill + d x decode tokens + c x context tokens read.

    Before the first fit every token weighs the same and nothing is fixed: `fitted` is 0 then.
    `error` is the fit's mean absolute error over the mean step time.
    """

    fixed: float
    p: float
    d: float
    c: float
    fitted: float
    error: float


COUNTED = Model(0.0, 1.0, 1.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All rows of some steps: `steps` [N] is the index of each row's step, rising.

    starts, counts, prompts [N]: first position, tokens, prompt length (0 where unknown).
    device_ns, spare [S]: device time; padding tokens and idle rows. models [S, 6].
    """

    steps: Ints
    starts: Ints
    counts: Ints
    prompts: Ints
    device_ns: Ints
    spare: Ints
    models: Floats

    def costs(self) -> tuple[Floats, Bools]:
        """Return each row's marginal cost in ns and whether it computes as a prefill."""
        return costs(self.starts, self.counts, self.prompts, self.models[self.steps])

    def totals(self) -> Floats:
        """Return what all rows of each step weigh together, [S, 6]."""
        marginal, prefill = self.costs()
        totals = np.empty((len(self.device_ns), 6))
        for column, weights in (
            (PREFILL, np.where(prefill, marginal, 0.0)),
            (DECODE, np.where(prefill, 0.0, marginal)),
            (PREFILL_TOKENS, np.where(prefill, self.counts, 0)),
            (DECODE_TOKENS, np.where(prefill, 0, self.counts)),
        ):
            totals[:, column] = np.bincount(self.steps, weights, len(self.device_ns))
        totals[:, SPARE] = self.spare * self.models[:, 2]
        totals[:, SPARE_TOKENS] = self.spare
        return totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Rows to be explained, each for itself; all arrays are [N], models [N, 6], totals [N, 6].

    `lengths` is the wall time in ns that the row accounts for, `lost` the number of its tokens
    that preemptions ever took: positions below it are recomputed.
    """

    starts: Ints
    counts: Ints
    prompts: Ints
    lost: Ints
    lengths: Ints
    device_ns: Ints
    models: Floats
    totals: Floats


def costs(starts: Ints, counts: Ints, prompts: Ints, models: Floats) -> tuple[Floats, Bools]:
    """Return the marginal cost of rows in ns, and which compute as prefills.

    A row of several tokens computes as a prefill whatever its tokens are, one of a single token
    does so below its prompt's end.
    """
    prefill = (counts > 1) | (starts < prompts)
    token = np.where(prefill, models[:, 1], models[:, 2])
    return np.asarray(token * counts + models[:, 3] * (starts + counts)), prefill


def split(parts: Parts) -> Ints:
    """Return [N, 7] ns by cause, the columns of SPLIT; each row sums to its length exactly."""
    marginal, prefill = costs(parts.starts, parts.counts, parts.prompts, parts.models)
    device = np.minimum(parts.lengths, parts.device_ns)
    others = _others(parts, marginal, prefill)
    weight = others.sum(axis=1)
    counted = parts.models[:, 4] == 0
    everything = np.maximum(marginal + weight, 1.0)
    alone = np.where(counted, device * marginal / everything, parts.models[:, 0] + marginal)
    rest = np.where(weight > 0, np.maximum(device - alone, 0.0), 0.0)
    scale = rest / np.where(weight > 0, weight, 1.0)
    result = np.empty((len(device), len(SPLIT)), dtype=np.int64)
    result[:, 0] = parts.lengths - device
    result[:, 4:7] = np.floor(others * scale[:, None])
    own = device - result[:, 4:7].sum(axis=1)
    recomputed, prefilled, decoded = _own_tokens(parts)
    result[:, 2] = own * decoded // parts.counts
    with_prefill = own * recomputed // parts.counts
    result[:, 3] = np.where(prefilled > 0, with_prefill, own - result[:, 2])
    result[:, 1] = own - result[:, 2] - result[:, 3]
    return result


def _others(parts: Parts, marginal: Floats, prefill: Bools) -> Floats:
    """Return [N, 3]: what all but the row itself weigh as prefill, as decode and as padding.

    Where the model gives them no cost at all although they are there, their tokens weigh.
    """
    counts = parts.counts.astype(np.float64)
    others = parts.totals[:, (PREFILL, DECODE, SPARE)]
    tokens = parts.totals[:, (PREFILL_TOKENS, DECODE_TOKENS, SPARE_TOKENS)]
    for table, own in ((others, marginal), (tokens, counts)):
        table[:, 0] -= np.where(prefill, own, 0.0)
        table[:, 1] -= np.where(prefill, 0.0, own)
    # Sums of floats: what is left of a kind without others is noise, its tokens tell.
    others[tokens <= 0] = 0.0
    others = np.maximum(others, 0.0)
    weightless = others.sum(axis=1) == 0
    others[weightless] = tokens[weightless]
    return np.asarray(others)


def _own_tokens(parts: Parts) -> tuple[Ints, Ints, Ints]:
    """Return how many tokens of each row are recomputed, prefilled and decoded, by position."""
    starts, ends = parts.starts, parts.starts + parts.counts
    recomputed = np.clip(np.minimum(ends, parts.lost) - starts, 0, parts.counts)
    fresh = np.maximum(starts, parts.lost)
    prefilled = np.clip(np.minimum(ends, parts.prompts) - fresh, 0, parts.counts)
    return recomputed, prefilled, parts.counts - recomputed - prefilled


def shares(batch: Batch) -> Ints:
    """Return [N] ns of device time that each row pays; those of a step sum to its device_ns.

    In proportion to marginal cost, the fixed cost in equal parts. What rounding leaves is the
    first row's.
    """
    if not len(batch.steps):
        return np.zeros(0, dtype=np.int64)
    marginal, _ = batch.costs()
    steps, count = batch.steps, len(batch.device_ns)
    rows = np.bincount(steps, minlength=count)
    total = np.bincount(steps, marginal, count)
    weightless = total <= 0
    marginal = np.where(weightless[steps], 1.0, marginal)
    total = np.where(weightless, rows, total)
    device = batch.device_ns.astype(np.float64)
    fixed = np.minimum(device, batch.models[:, 0])
    paid = (fixed / np.maximum(rows, 1))[steps]
    paid += (device - fixed)[steps] * marginal / total[steps]
    result = np.floor(paid).astype(np.int64)
    # The sum of floors may pass the whole by a float's last bit: the first row takes that too.
    left = batch.device_ns - np.bincount(steps, result, count).astype(np.int64)
    first = np.flatnonzero(np.diff(steps, prepend=-1))
    result[first] += left[steps[first]]
    return result


def named_neighbours(batch: Batch, own: Ints, causes: Ints) -> tuple[Floats, Floats]:
    """Return the ns that each row [N] added to the own row of its step, as prefill and as decode.

    `own` [S] is the index of the request's row in each step, `causes` [S, 7] what `split` gave it.
    """
    marginal, prefill = batch.costs()
    neighbour = np.ones(len(batch.steps), dtype=np.bool_)
    neighbour[own] = False
    prefills = _named(batch, marginal, prefill & neighbour, causes[:, 4])
    return prefills, _named(batch, marginal, ~prefill & neighbour, causes[:, 5])


def _named(batch: Batch, marginal: Floats, kind: Bools, caused_ns: Ints) -> Floats:
    """Divide what each step's rows of one kind caused among them, as `split` weighed them."""
    count = len(batch.device_ns)
    weights = np.where(kind, marginal, 0.0)
    weightless = np.bincount(batch.steps, weights, count) <= 0
    weights = np.where(kind & weightless[batch.steps], batch.counts, weights)
    whole = np.bincount(batch.steps, weights, count)
    scale = caused_ns / np.where(whole > 0, whole, 1.0)
    return np.asarray(weights * scale[batch.steps])
