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
ALIKE = 0.5
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
    """Return a figure over `blocks` blocks in their order, with its bootstrap standard error.

    Few blocks make the plain bootstrap too sure of itself by the factor (K - 1) / K in variance,
    which is taken back (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 5);
    blocks that resemble their neighbours tell less than they seem to, which is too.
    """
    value = float(statistic(np.ones((1, blocks)))[0])
    if blocks < 2 or not math.isfinite(value):
        return Estimate(value, math.inf, blocks)
    draws = np.random.default_rng(SEED).multinomial(
        blocks, np.full(blocks, 1 / blocks), size=RESAMPLES
    )
    figures = statistic(draws.astype(np.float64))
    known = figures[np.isfinite(figures)]
    if not known.size:
        return Estimate(value, math.inf, blocks)
    alike = _alikeness(statistic(1 - np.eye(blocks)))
    variance = known.var() * blocks / (blocks - 1) * (1 + alike) / (1 - alike)
    return Estimate(value, math.sqrt(variance), blocks)


def _alikeness(without_each: Floats) -> float:
    """Return how far blocks resemble the next one, from the figure without each block [K].

    A slow drift (a machine that grows warm, a queue that builds up) makes neighbours alike: with
    the lag-1 correlation r of the blocks' influence, the variance is (1 + r) / (1 - r) times that
    of independent ones. r is freed of its bias for short series (Kendall, 1954). More than ALIKE
    cannot be told from a trend on so few blocks.
    """
    influence = without_each - without_each.mean()
    total = float(influence @ influence)
    blocks = len(influence)
    if not total > 0 or blocks < 4:  # a NaN is not greater either
        return 0.0
    raw = float(influence[1:] @ influence[:-1]) / total
    return min(max((raw + 1 / blocks) / (1 - 3 / blocks), 0.0), ALIKE)


def half_width(a: Estimate, b: Estimate, *, confidence: float, comparisons: int) -> float:
    """Return how far b - a may be off, all of `comparisons` intervals holding together.

    Bonferroni over the comparisons, Student's t over the blocks of the shorter side.
    """
    if not math.isfinite(a.error + b.error):
        return math.inf
    tail = (1 - confidence) / (2 * comparisons)
    return students_t(1 - tail, min(a.blocks, b.blocks) - 1) * math.hypot(a.error, b.error)


def students_t(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t, probability > 0.5 (Hill, CACM algorithm 396, 1970)."""
    n, both = freedom, 2 * (1 - probability)
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * both) ** (2 / n)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(1 - probability)
        c += 0.3 * (n - 4.5) * (x + 0.6) if n < 5 else 0.0
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = x**2
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y**2)
    else:
        y = (1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1
        y = y * (n + 1) / (n + 2) + 1 / ((d * both) ** (2 / n))
    return math.sqrt(n * y)


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
