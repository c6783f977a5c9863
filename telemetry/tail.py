"""What follows the history row by row: the calls that its writer makes, and nothing else.

Owns the protocol between the history and whoever answers SQL from a copy of the newest rows. The
history calls; a tail never calls back, never blocks, and must bound what it holds: one that cannot
keep up starts anew from the live file.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

Rows = Mapping[str, Sequence[tuple[object, ...]]]
"""Table to rows in the order of its columns."""

LiveRows = Callable[[], Generator[Rows, None, None]]
"""What a follower calls, on a thread of its own, to begin anew: the live file's rows in pieces.

All pieces are of one instant, that of the first `next`. Raises HistoryUnavailable.
"""


class Tail(Protocol):
    """A follower of one history."""

    def feed(self, rows: Rows) -> None:
        """Take a batch that is committed; called on the history's writer thread.

        Whoever waits in `flush` is told only after this: a query finds what was fed before it.
        """
        ...

    def rotate(self, segments: Sequence[Path], covered: Mapping[str, int]) -> None:
        """Learn which segments there are now, and through which seq of each run they reach.

        Called on the history's upkeep thread when segments came, merged or went: once at start,
        then always before the rows they cover are deleted from the live file. A follower that
        reads the live file first and this list second thus misses no row; rows that it has twice
        are the covered ones.
        """
        ...
