"""How fast a watched server goes: rates over the last seconds, percentiles over the last values.

Owns the two windows and their bounds. server/watch.py adds what iterations tell; server/
top_picture.py reads. Instants are the server's nanoseconds. Must never grow with time.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

WINDOW_NS = 10 * 10**9
SPAN_MIN_NS = 10**9
TILES_MAX = 4096
GAPS_MAX = 4096
FIRSTS_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one iteration counts for."""

    begin_at_ns: int
    end_at_ns: int
    prefill_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the last seconds were like; `step_ms` is None when no step ended in them."""

    iterations_per_s: float
    prefill_tokens_per_s: float
    output_tokens_per_s: float
    busy_share: float
    step_ms: float | None
    over_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of the newest `count` values, in ms."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    count: int


class Pace:
    """The newest tiles, token gaps and times to a first token of one life of a server."""

    def __init__(self) -> None:
        self._tiles: deque[Tile] = deque(maxlen=TILES_MAX)
        self._known_from_ns: int | None = None
        self.gaps_ns: deque[int] = deque(maxlen=GAPS_MAX)
        self.firsts_ns: deque[int] = deque(maxlen=FIRSTS_MAX)

    def add(self, tile: Tile) -> None:
        """Count one iteration."""
        if self._known_from_ns is None:
            self._known_from_ns = tile.begin_at_ns
        self._tiles.append(tile)

    def rates(self, now_ns: int) -> Rates:
        """Return the rates over the last seconds that are known."""
        known_ns = now_ns - (self._known_from_ns if self._known_from_ns is not None else now_ns)
        span_ns = min(WINDOW_NS, max(SPAN_MIN_NS, known_ns))
        if len(self._tiles) == TILES_MAX:
            span_ns = min(span_ns, max(SPAN_MIN_NS, now_ns - self._tiles[0].begin_at_ns))
        since_ns = now_ns - span_ns
        tiles = [tile for tile in self._tiles if tile.end_at_ns > since_ns]
        busy_ns = sum(tile.end_at_ns - max(since_ns, tile.begin_at_ns) for tile in tiles)
        walls_ns = sum(tile.end_at_ns - tile.begin_at_ns for tile in tiles)
        span_s = span_ns / 1e9
        return Rates(
            iterations_per_s=len(tiles) / span_s,
            prefill_tokens_per_s=sum(tile.prefill_tokens for tile in tiles) / span_s,
            output_tokens_per_s=sum(tile.output_tokens for tile in tiles) / span_s,
            busy_share=min(1.0, busy_ns / span_ns),
            step_ms=walls_ns / len(tiles) / 1e6 if tiles else None,
            over_s=span_s,
        )


def percentiles(values_ns: Collection[int]) -> Percentiles | None:
    """Return the nearest-rank percentiles of values in ns; None without any."""
    if not values_ns:
        return None
    ordered = sorted(values_ns)
    p50, p90, p99 = (
        ordered[min(len(ordered) - 1, share * len(ordered) // 100)] / 1e6 for share in (50, 90, 99)
    )
    return Percentiles(p50_ms=p50, p90_ms=p90, p99_ms=p99, count=len(ordered))
