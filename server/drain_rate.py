"""How fast the engine works: what Retry-After rests on.

Owns the tokens a second that it makes, while others wait and while none does, and the share of
their limits that answers really use. server/queue.py feeds it from the records, and asks how long
some work takes. Must cost an iteration only a few additions.
"""

import math

WINDOW_NS = 20_000_000_000
WINDOW_LIMITS_TOKENS = 100_000
"""Sums that span more are halved: they follow a change within half of it."""
MEASURED_NS_MIN = 100_000_000
GUESS_TOKENS_PER_S = 100.0
"""Assumed while nothing was ever measured: the very first burst on a fresh server."""


class Fraction:
    """A sum over another, in which what is recent weighs more."""

    def __init__(self, window: float) -> None:
        self.above = 0.0
        self.below = 0.0
        self._window = window

    def add(self, above: float, below: float) -> None:
        """Take note of a part of both."""
        self.above += above
        self.below += below
        if self.below > self._window:
            self.above /= 2
            self.below /= 2


class DrainRate:
    """How fast the engine makes tokens, and how many an answer makes of those it may."""

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}
        self._used = Fraction(WINDOW_LIMITS_TOKENS)
        self._full, self._light = Fraction(WINDOW_NS), Fraction(WINDOW_NS)
        self._rows = Fraction(WINDOW_NS)

    def began(self, request: int, max_tokens: int) -> None:
        """Take note of a sequence that was admitted."""
        self._limits[request] = max_tokens

    def stepped(self, *, rows: int, waiting: int, tokens: int, time_ns: int) -> None:
        """Take note of an iteration: its rows, who waited, the tokens decoded, and its time."""
        if waiting:
            self._full.add(tokens, time_ns)
        else:
            self._light.add(tokens, time_ns)
            self._rows.add(rows * time_ns, time_ns)

    def ended(self, request: int, output_tokens: int | None) -> None:
        """Take note of an end; harmless for a sequence that never ran.

        `output_tokens` None is for an answer that was cut: it tells nothing of how long answers
        are, and a few clients that leave at once would make the others' look short.
        """
        limit = self._limits.pop(request, None)
        if limit is not None and output_tokens is not None:
            self._used.add(output_tokens, limit)

    def clear(self) -> None:
        """Forget who lives: their engine is gone."""
        self._limits.clear()

    def seconds(self, limits_tokens: int, slots: int) -> float:
        """Return how long answers with so many tokens allowed keep an engine of so many slots."""
        used = self._used.above / self._used.below if self._used.below else 1.0
        return limits_tokens * used / self._tokens_per_s(slots)

    def _tokens_per_s(self, slots: int) -> float:
        """Return the rate of a full engine; while it never was full, an estimate.

        A batch of n is between 1 and n times as fast as one row: the estimate lies between them.
        """
        for measured, gain in ((self._full, 1.0), (self._light, self._gain(slots))):
            if measured.above > 0 and measured.below >= MEASURED_NS_MIN:
                return measured.above / measured.below * 1e9 * gain
        return GUESS_TOKENS_PER_S

    def _gain(self, slots: int) -> float:
        rows = self._rows.above / self._rows.below if self._rows.below else 1.0
        return math.sqrt(max(1.0, slots / max(1.0, rows)))
