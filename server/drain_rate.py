"""How fast work leaves the engine: what Retry-After rests on.

Owns the tokens that live sequences may still cost, and the rate at which they go, while others wait
and while none does. server/queue.py feeds it from the records. Work is counted in tokens that an
answer may have: one that stops before its limit has done the rest of it too. Must cost an iteration
only a few additions.
"""

import math

WINDOW_NS = 20_000_000_000
"""Sums that span more are halved: the rate follows a change within some ten seconds."""
MEASURED_NS_MIN = 100_000_000
GUESS_TOKENS_PER_S = 100.0
"""Assumed while nothing was ever measured: the very first burst on a fresh server."""


class Rate:
    """Tokens per time, recent ones weighing more."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self.time_ns = 0.0

    def add(self, tokens: int, time_ns: int) -> None:
        """Take note of tokens done and of the time they took."""
        self.tokens += tokens
        self.time_ns += time_ns
        if self.time_ns > WINDOW_NS:
            self.tokens /= 2
            self.time_ns /= 2

    @property
    def tokens_per_s(self) -> float | None:
        """The rate, None until there is something to tell."""
        known = self.tokens > 0 and self.time_ns >= MEASURED_NS_MIN
        return self.tokens / self.time_ns * 1e9 if known else None


class DrainRate:
    """The limits of live sequences, and how fast the engine works them off."""

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}
        self._full, self._light = Rate(), Rate()
        self._rows, self._steps = 0, 0
        self._latest = self._light

    def began(self, request: int, max_tokens: int) -> None:
        """Take note of a sequence that was admitted."""
        self._limits[request] = max_tokens

    def stepped(self, *, rows: int, waiting: int, tokens: int, time_ns: int) -> None:
        """Take note of an iteration: its rows, who waited, the tokens decoded, and its time."""
        if waiting:
            self._latest = self._full
        else:
            self._latest = self._light
            self._rows, self._steps = self._rows + rows, self._steps + 1
        self._latest.add(tokens, time_ns)

    def ended(self, request: int, output_tokens: int) -> None:
        """Take note of an end; harmless for a sequence that never ran."""
        limit = self._limits.pop(request, None)
        if limit is not None:
            self._latest.add(max(0, limit - output_tokens), 0)

    def clear(self) -> None:
        """Forget who lives: their engine is gone."""
        self._limits.clear()

    def tokens_per_s(self, slots: int) -> float:
        """Return the rate of a full engine; while it never was full, an estimate.

        A batch of n is between 1 and n times as fast as one row: the estimate lies between them.
        """
        full, light = self._full.tokens_per_s, self._light.tokens_per_s
        if full is not None:
            return full
        if light is None:
            return GUESS_TOKENS_PER_S
        rows = max(1.0, self._rows / max(1, self._steps))
        return light * math.sqrt(max(1.0, slots / rows))
