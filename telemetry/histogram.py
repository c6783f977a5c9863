"""The values of metrics: a histogram of plain counts, and label values with what stands under them.

Owns the shapes that the folds fill and the exposition shows. Imports nothing but the standard
library. Must never be slower than a bisection and two additions an observation.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

LabelValues = tuple[str, ...]
Mark = tuple[str, float, int]
"""An exemplar: a request's id, the value that it had, and when, ns since the server's start."""


class Histogram:
    """Counts by upper edge, the last one open, the sum, and the last request of each bucket."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.marks: list[Mark | None] = [None] * (len(self.edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one value, or the same one several times."""
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times

    def observe_of(self, request_id: str, value: float, at_ns: int, times: int = 1) -> None:
        """Count a value and remember whose it was, and when."""
        index = bisect_left(self.edges, value)
        self.counts[index] += times
        self.sum += value * times
        # Ends are told in their own order, not in that of what they tell of; an exemplar that went
        # back in time would be dropped by Prometheus, with a warning at every scrape.
        mark = self.marks[index]
        if mark is None or at_ns >= mark[2]:
            self.marks[index] = (request_id, value, at_ns)


Value = float | Histogram
Values = Mapping[LabelValues, Value]


def labelled(counts: Mapping[str, float], scale: float = 1) -> dict[LabelValues, Value]:
    """Return counts by one label."""
    return {(label,): count * scale for label, count in counts.items()}
