"""How batches form: continuous, static or dynamic, on the same engine, for honest comparison.

Owns when the batch is closed to arrivals, what an admission reserves and whether rows stay until
the whole batch leaves. The scheduler asks and never looks at a mode's name. A fixed batch is never
preempted, since it reserved all it can ever need.
"""

from engine.config import EngineConfig
from engine.request import Request


class Continuous:
    """Whoever fits joins at any step and leaves at its own end."""

    fixed = False

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def opens_in_ns(self, *, running: int, waiting: int, now_ns: int) -> int | None:
        """Return 0 when arrivals may join now, ns until they may, None when that is unknown."""
        del running, waiting, now_ns
        return 0

    def formed(self) -> None:
        """Take note that a batch was admitted."""

    def reserves(self, request: Request) -> int:
        """Return the tokens that an admission allocates blocks for."""
        return request.known + 1


class Static(Continuous):
    """A batch is admitted only when nothing runs, and leaves whole."""

    fixed = True

    def opens_in_ns(self, *, running: int, waiting: int, now_ns: int) -> int | None:
        """Open when nothing runs."""
        del waiting, now_ns
        return None if running else 0

    def reserves(self, request: Request) -> int:
        """Reserve prompt and output whole: it can never lack a block later."""
        return request.computed_max + 1


class Dynamic(Static):
    """As static, formed `window_ms` after the first arrival or when max_num_seqs wait."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._window_ns = config.window_ms * 1_000_000
        self._opened_at_ns: int | None = None

    def opens_in_ns(self, *, running: int, waiting: int, now_ns: int) -> int | None:
        """Open at the window's end, or at once for a full batch; the first caller starts it."""
        if running:
            return None
        if waiting and self._opened_at_ns is None:
            self._opened_at_ns = now_ns
        if waiting >= self._config.max_num_seqs or self._opened_at_ns is None:
            return 0
        return max(0, self._opened_at_ns + self._window_ns - now_ns)

    def formed(self) -> None:
        """Close the window."""
        self._opened_at_ns = None


BATCHING: dict[str, type[Continuous]] = {
    "continuous": Continuous,
    "static": Static,
    "dynamic": Dynamic,
}
"""Modes by the name that --batching takes."""
