"""What chance alone could do to a figure: a block bootstrap over time, in numpy.

Owns the resampling of blocks, quantiles of histograms, and the width of an interval for many
comparisons at once. diff.py calls it with figures summed by block. Requests of one moment share
its load and its luck, so whole blocks of time are drawn, never single requests. Seeded: the same
record gives the same answer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
SEED = 20_261_130
BUCKET = math.log(1.005)
"""Histograms of latencies have buckets half a percent wide, of the logarithm of ns."""

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Weights of blocks [R, K] to one figure for each row [R]."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, its standard error, and the number of blocks that both come from."""

    value: float
    error: float
    blocks: int


def estimate(statistic: Statistic, blocks: int) -> Estimate:
    """Return a figure over `blocks` blocks with its bootstrap standard error.

    Few blocks make the plain bootstrap too sure of itself by the factor (K - 1) / K in variance,
    which is taken back (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 5).
    """
    value = float(statistic(np.ones((1, blocks)))[0])
    if blocks < 2:
        return Estimate(value, math.inf, blocks)
    draws = np.random.default_rng(SEED).multinomial(
        blocks, np.full(blocks, 1 / blocks), size=RESAMPLES
    )
    figures = statistic(draws.astype(np.float64))
    known = figures[np.isfinite(figures)]
    if not math.isfinite(value) or not known.size:
        return Estimate(value, math.inf, blocks)
    return Estimate(value, float(known.std()) * math.sqrt(blocks / (blocks - 1)), blocks)


def half_width(a: Estimate, b: Estimate, *, confidence: float, comparisons: int) -> float:
    """Return how far b - a may be off, all of `comparisons` intervals holding together.

    Bonferroni over the comparisons, Student's t over the blocks of the shorter side.
    """
    if not math.isfinite(a.error + b.error):
        return math.inf
    tail = (1 - confidence) / (2 * comparisons)
    return students_t(1 - tail, min(a.blocks, b.blocks) - 1) * math.hypot(a.error, b.error)


def students_t(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t (Abramowitz and Stegun, 1964, 26.7.5).

    Good to 2 % from 7 degrees of freedom on, for tails down to 0.0005; too small below that.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))


def ratio(numerators: Floats, denominators: Floats) -> Statistic:
    """Return the statistic sum of numerators over sum of denominators, each [K]."""

    def figures(weights: Floats) -> Floats:
        below = weights @ denominators
        found: Floats = np.full(len(below), np.nan)
        np.divide(weights @ numerators, below, out=found, where=below != 0)
        return found

    return figures


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts [K, 1 + B] of times by block: column 0 took none, column j is bucket first + j - 1.

    Bucket n holds exp(n x BUCKET) ns up to the next.
    """

    counts: Floats
    first: int

    @property
    def total(self) -> int:
        """Return how many times there are."""
        return int(self.counts.sum())

    def quantile(self, probability: float) -> Statistic:
        """Return the statistic quantile in ns; inside a bucket the logarithm is taken as even."""

        def figures(weights: Floats) -> Floats:
            counts = np.cumsum(weights @ self.counts, axis=1)
            totals = counts[:, -1]
            targets = probability * totals
            place = np.minimum((counts < targets[:, None]).sum(axis=1), counts.shape[1] - 1)
            rows = np.arange(len(place))
            before = np.where(place > 0, counts[rows, place - 1], 0.0)
            inside = counts[rows, place] - before
            share = np.divide(targets - before, inside, out=np.zeros(len(place)), where=inside > 0)
            found = np.exp((self.first + place - 1 + share) * BUCKET)
            return np.where(totals > 0, np.where(place == 0, 0.0, found), np.nan)

        return figures
