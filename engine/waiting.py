"""The line of sequences that wait, new and preempted alike, ordered by their frozen rank.

Owns one sorted line a group. Who arrives or leaves in the middle moves a few kilobytes of pointers
between two steps, so that a step finds each group's first at once and touches only what it admits.
engine/roster.py is the one writer. Never decides who may run.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from engine.request import Request

Entry = tuple[tuple[int, ...], int, Request]
Ranks = npt.NDArray[np.float64]

GAP_MAX = 64
"""Places of those who went that are kept at the front of a line, and as many as it has others."""
NOBODY = cast(Entry, ((), 0, None))
"""What stands in such a place."""


class Line:
    """Sequences of one group, first to last; places before `_first` are empty."""

    __slots__ = ("_entries", "_first")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._first = 0

    def __len__(self) -> int:
        return len(self._entries) - self._first

    def first(self) -> Entry:
        """Return the first entry; there must be one."""
        return self._entries[self._first]

    def push(self, request: Request) -> None:
        """Put a sequence at its place."""
        insort(self._entries, (request.rank, request.number, request), lo=self._first)

    def remove(self, request: Request) -> None:
        """Take a sequence out."""
        entries, first = self._entries, self._first
        # Without the request itself the key sorts just before its entry.
        key: tuple[object, ...] = (request.rank, request.number)
        place = first if entries[first][2] is request else bisect_left(entries, key, lo=first)
        assert entries[place][2] is request, "it stands in another line"
        if place != first:
            del entries[place]
            return
        entries[first] = NOBODY
        self._first += 1
        if self._first > GAP_MAX + len(self):
            del entries[: self._first]
            self._first = 0

    def requests(self) -> list[Request]:
        """Return all, in order."""
        return [entry[2] for entry in self._entries[self._first :]]


class WaitingLine:
    """Everybody who waits, by (rank, number) in the line of its group; holds nobody else."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._groups: tuple[str, ...] = ()  # the lines' keys, one object until they change
        self._count = 0
        self._ranks: Ranks | None = None  # of _groups, as last told, and the groups that are first
        self._least: list[str] = []

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        """Put a waiting or preempted sequence in its group's line."""
        line = self._lines.get(request.group)
        if line is None:
            line = self._lines[request.group] = Line()
            self._name_groups()
        line.push(request)
        self._count += 1

    def remove(self, request: Request) -> None:
        """Take a sequence out, wherever in its line it stands."""
        line = self._lines[request.group]
        line.remove(request)
        self._count -= 1
        if not len(line):
            del self._lines[request.group]
            self._name_groups()

    def head(
        self,
        group_ranks: Callable[[tuple[str, ...]], Ranks] | None = None,
        skip: Collection[str] = (),
    ) -> Request | None:
        """Return the first in line, None when nobody waits outside the skipped groups.

        Groups compare by group_ranks first, their heads by rank; without it by rank alone.
        """
        groups, lines = self._first_groups(group_ranks, skip), self._lines
        if len(groups) == 1:
            return lines[groups[0]].first()[2]
        return min((lines[group].first() for group in groups), default=NOBODY)[2]

    def _first_groups(
        self, group_ranks: Callable[[tuple[str, ...]], Ranks] | None, skip: Collection[str]
    ) -> Sequence[str]:
        """Return the groups of least rank that are not skipped."""
        groups = self._groups
        if group_ranks is None or len(groups) < 2:
            return [group for group in groups if group not in skip] if skip else groups
        ranks = group_ranks(groups)
        if skip:
            return _least(groups, np.where([group in skip for group in groups], np.inf, ranks))
        if ranks is not self._ranks:
            self._ranks, self._least = ranks, _least(groups, ranks)
        return self._least

    def _name_groups(self) -> None:
        self._groups, self._ranks = tuple(self._lines), None

    def requests(self) -> list[Request]:
        """Return everybody in line, in no order."""
        return [request for line in self._lines.values() for request in line.requests()]


def _least(groups: tuple[str, ...], ranks: Ranks) -> list[str]:
    """Return the groups of least rank; infinite is out."""
    least = ranks.min()
    if least == np.inf:
        return []
    return [groups[place] for place in (ranks == least).nonzero()[0].tolist()]
