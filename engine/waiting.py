"""The line of sequences that wait, new and preempted alike, ordered by their frozen rank.

Owns one heap a group, with lazy removal: a sequence that left otherwise (aborted) stays in its heap
until it surfaces or the heap is rebuilt, so a step touches only what it admits. The scheduler is
the one writer. Never decides who may run.
"""

import heapq
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from engine.request import Request

REBUILD_SLACK = 64

Ranks = npt.NDArray[np.float64]


class WaitingLine:
    """Heaps of (rank, number, request); bounded by the live requests plus as many stale entries."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[tuple[int, ...], int, Request]]] = {}
        self._groups: tuple[str, ...] = ()  # the heaps' keys, one object until they change
        self._stale = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        """Put a waiting or preempted sequence in its group's line."""
        heap = self._heaps.get(request.group)
        if heap is None:
            heap = self._heaps[request.group] = []
            self._groups = tuple(self._heaps)
        heapq.heappush(heap, (request.rank, request.number, request))
        self._count += 1

    def head(
        self,
        group_ranks: Callable[[tuple[str, ...]], Ranks] | None = None,
        skip: Collection[str] = (),
    ) -> Request | None:
        """Return the first in line, None when nobody waits outside the skipped groups.

        Groups compare by group_ranks first, their heads by rank; without it by rank alone.
        """
        while groups := self._first_groups(group_ranks, skip):
            gone = [group for group in groups if self._is_gone(group)]
            if not gone:
                return min(self._heaps[group][0] for group in groups)[2]
        return None

    def _first_groups(
        self, group_ranks: Callable[[tuple[str, ...]], Ranks] | None, skip: Collection[str]
    ) -> Sequence[str]:
        """Return the groups of least rank that are not skipped."""
        groups = self._groups
        if group_ranks is None or len(groups) < 2:
            return [group for group in groups if group not in skip] if skip else groups
        ranks = group_ranks(groups)
        if skip:
            ranks = np.where([group in skip for group in groups], np.inf, ranks)
        least = ranks.min()
        if least == np.inf:
            return ()
        return [groups[place] for place in (ranks == least).nonzero()[0].tolist()]

    def _is_gone(self, group: str) -> bool:
        """Drop finished entries from the top of a group's heap; True if the whole heap went."""
        heap = self._heaps[group]
        while heap and heap[0][2].state == "finished":
            heapq.heappop(heap)
            self._stale -= 1
        if not heap:
            self._drop(group)
        return not heap

    def _drop(self, group: str) -> None:
        del self._heaps[group]
        self._groups = tuple(self._heaps)

    def pop(self, request: Request) -> None:
        """Take out the sequence that `head` returned."""
        entry = heapq.heappop(self._heaps[request.group])
        assert entry[2] is request, "only a head leaves its line"
        self._count -= 1

    def abandon(self) -> None:
        """Note that one sequence in line has finished; its entry goes when it surfaces."""
        self._count -= 1
        self._stale += 1
        if self._stale > self._count + REBUILD_SLACK:
            self._rebuild()

    def requests(self) -> list[Request]:
        """Return everybody in line, in no order."""
        entries = (entry for heap in self._heaps.values() for entry in heap)
        return [entry[2] for entry in entries if entry[2].state != "finished"]

    def _rebuild(self) -> None:
        for group in list(self._heaps):
            alive = [entry for entry in self._heaps[group] if entry[2].state != "finished"]
            heapq.heapify(alive)
            if alive:
                self._heaps[group] = alive
            else:
                self._drop(group)
        self._stale = 0
