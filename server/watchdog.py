"""Whether the engine makes progress: its pulse is looked at twice a second, and a hang is ended.

Owns the seconds for which work was pending and nothing moved; server/life.py runs it, /health reads
it. Counts only time in which it looked itself: a server that was stopped, or a machine that was
frozen, says nothing about the engine. Must never end an engine that moves, however slowly.
"""

import asyncio
import time
from typing import Protocol

PERIOD_S = 0.5
LOAD_HANG_S = 600.0
"""How long a load may show nothing: imports and the reading of one layer from a slow disk."""


class Watched(Protocol):
    """The engine as the watchdog sees it: server/engine_client.py."""

    @property
    def state(self) -> str:
        """Loading, ready or down."""
        ...

    @property
    def pulse(self) -> tuple[int, int] | None:
        """What moves while there is progress; None while none is due."""
        ...

    async def end_hung(self, pulse: tuple[int, int], stalled_s: float) -> None:
        """End it and start another, unless it has moved since."""
        ...


class Watchdog:
    """Counts `stalled_s`; at hang_s the engine is ended."""

    def __init__(self, engine: Watched, *, hang_s: float) -> None:
        self.stalled_s = 0.0
        self._engine = engine
        self._hang_s = hang_s
        self._pulse: tuple[int, int] | None = None
        self._looked_at_s = time.monotonic()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.look(time.monotonic())
            loading = self._engine.state == "loading"
            limit_s = max(self._hang_s, LOAD_HANG_S) if loading else self._hang_s
            if self._pulse is not None and self.stalled_s >= limit_s:
                await self._engine.end_hung(self._pulse, self.stalled_s)

    def look(self, now_s: float) -> None:
        """Take the pulse; what passed since the last look counts if it has not moved."""
        pulse = self._engine.pulse
        awake_s = min(now_s - self._looked_at_s, 2 * PERIOD_S)
        moved = pulse is None or pulse != self._pulse
        self.stalled_s = 0.0 if moved else self.stalled_s + awake_s
        self._pulse, self._looked_at_s = pulse, now_s
