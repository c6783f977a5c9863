"""When requests come: so many in so many seconds, by chance, in bursts, over a day, or as recorded.

Owns the arrival processes, each a function of a seed; bench/lab/make.py calls it. Every process is
taken given its count, so that each run offers exactly the rate it says: of a Poisson process with a
known count the instants are independent and even (Ross, Stochastic Processes, 1996, theorem 2.3.1).
Must never depend on anything but its arguments.
"""

import math
import random
from collections.abc import Sequence

DAY_LOW = 0.25
"""What of its mean the rate of a day falls to at night; at noon it rises by as much above."""


def poisson(count: int, seconds: float, seed: int) -> list[float]:
    """Return instants that have no memory."""
    pick = random.Random(f"poisson-{seed}")
    return sorted(pick.random() * seconds for _ in range(count))


def bursts(count: int, seconds: float, seed: int, size: int = 8) -> list[float]:
    """Return instants of bursts that come by chance, `size` requests at one instant each."""
    starts = poisson(math.ceil(count / size), seconds, seed)
    return sorted(starts[number // size] for number in range(count))


def diurnal(count: int, seconds: float, seed: int) -> list[float]:
    """Return instants whose rate goes once through night, noon and night again.

    rate(t) is proportional to 1 - (1 - DAY_LOW) cos(2 pi t / seconds); an even draw is carried
    over by the inverse of its integral, found by bisection.
    """
    depth = 1 - DAY_LOW

    def instant(share: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            below = middle - depth * math.sin(2 * math.pi * middle) / (2 * math.pi) < share
            low, high = (middle, high) if below else (low, middle)
        return low * seconds

    return [instant(share) for share in poisson(count, 1.0, seed)]


def replayed(instants: Sequence[float], seconds: float) -> list[float]:
    """Return recorded instants stretched or squeezed to fill so many seconds.

    The last is followed by a mean gap, so that n instants have the rate n / seconds.
    """
    span = instants[-1] - instants[0]
    whole = span * len(instants) / max(1, len(instants) - 1) or 1.0
    return [(at - instants[0]) / whole * seconds for at in instants]
