"""What repeats tell: intervals of means, paired comparisons of two arms, many at once.

Owns every interval and every "significant" of the lab. Runs of one repeat at one rate stand next
to each other in time and got the same requests, so arms are compared within the pair: what a
minute of a shared machine does to both cancels. A difference of positive figures is judged by its
logarithm, whose mean is a ratio (Fleming and Wallace, CACM 1986, on why ratios are averaged so),
others as they are; intervals are Student's t over pairs (Student, Biometrika 1908). Knows no lab.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from telemetry.bootstrap import students_t

CONFIDENCE = 0.95
LEAST = 0.01
"""A change of less than this share is called the same, however sure it is."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with the interval that holds it; None where one value says nothing of its spread."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Compared:
    """An arm against the baseline: a ratio or a difference, its interval, its p.

    `value`, `low` and `high` are arm / baseline of a ratio, arm - baseline of a difference.
    """

    kind: str
    pairs: int
    value: float | None
    low: float | None
    high: float | None
    p: float | None

    @property
    def significant(self) -> bool:
        """Return whether chance alone does so less often than 1 - CONFIDENCE."""
        return self.p is not None and self.p < 1 - CONFIDENCE


def mean_of(values: Sequence[float], confidence: float = CONFIDENCE) -> Mean:
    """Return the mean of repeats and its interval."""
    middle = fmean(values)
    if len(values) < 2:
        return Mean(middle, None, None)
    half = _t(confidence, len(values)) * stdev(values) / math.sqrt(len(values))
    return Mean(middle, middle - half, middle + half)


def compare(
    arm: Sequence[float | None],
    baseline: Sequence[float | None],
    *,
    as_share: bool = False,
    confidence: float = CONFIDENCE,
) -> Compared:
    """Return what pairs say of arm against baseline; value i of both is one pair.

    A ratio unless a value is not positive or `as_share` says that differences are meant, as of
    figures that are shares themselves. A pair with a figure that nobody knows is left out.
    """
    pairs = [(a, b) for a, b in zip(arm, baseline, strict=True) if a is not None and b is not None]
    ratio = not as_share and all(a > 0 and b > 0 for a, b in pairs)
    kind = "ratio" if ratio else "difference"
    if not pairs:
        return Compared(kind, 0, None, None, None, None)
    steps = [math.log(a / b) if ratio else a - b for a, b in pairs]
    back = math.exp if ratio else float
    middle = fmean(steps)
    if len(steps) < 2:
        return Compared(kind, len(steps), back(middle), None, None, None)
    error = stdev(steps) / math.sqrt(len(steps))
    half = _t(confidence, len(steps)) * error
    return Compared(
        kind,
        len(steps),
        back(middle),
        back(middle - half),
        back(middle + half),
        p_of(middle, error, len(steps) - 1),
    )


def _t(confidence: float, values: int) -> float:
    return students_t(1 - (1 - confidence) / 2, values - 1)


def p_of(middle: float, error: float, freedom: int) -> float:
    """Return how often chance alone takes a mean as far from 0: two-sided, Student's t."""
    if error == 0:
        return 1.0 if middle == 0 else 0.0
    t = abs(middle) / error
    return regularized_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def regularized_beta(x: float, a: float, b: float) -> float:
    """Return I_x(a, b) by its continued fraction (Lentz; Press et al., Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - regularized_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    found = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for part in (even, odd):
            d = 1 / (1 + part * d or tiny)
            c = 1 + part / c or tiny
            found *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    return front * found / a


def holm(ps: Sequence[float | None], level: float = 1 - CONFIDENCE) -> list[bool]:
    """Return which hold all together (Holm, Scandinavian Journal of Statistics 1979).

    The smallest p must lie below level / m, the next below level / (m - 1), until one does not.
    """
    known = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    found = [False] * len(ps)
    for rank, (p, place) in enumerate(known):
        if p >= level / (len(known) - rank):
            break
        found[place] = True
    return found


def verdict(found: Compared, better: str) -> str:
    """Return better, worse, same or unknown for a figure of which `more` or `less` is better."""
    if found.value is None or found.p is None:
        return "unknown"
    change = found.value - 1 if found.kind == "ratio" else found.value
    if not found.significant or abs(change) < LEAST or better not in ("more", "less"):
        return "same"
    return "better" if (change > 0) == (better == "more") else "worse"
