"""What follows the history row by row: the calls that its writer makes, and nothing else.

Owns the protocol between the history and whoever answers SQL from a copy of the newest rows. The
history calls; a tail never calls back, never blocks, and must bound what it holds: one that cannot
keep up starts anew from the live file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

Rows = Mapping[str, Sequence[tuple[object, ...]]]
"""Table to rows in the order of its columns."""


class Tail(Protocol):
    """A follower of one history."""

    def feed(self, rows: Rows) -> None:
        """Take a batch that is committed; called on the history's writer thread."""
        ...

    def rotate(self, segments: Sequence[Path], covered: Mapping[str, int]) -> None:
        """Learn which segments there are now, and through which seq of each run they reach.

        Called on the history's upkeep thread, after segments came, merged or went.
        """
        ...
