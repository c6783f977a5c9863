"""The sequences that run, in the order in which they are placed, as columns of a plan.

Owns that order: a sequence is sorted in when it joins, by a key that is constant while it runs, so
that a step need not sort; and the columns that change with the membership alone, so that a step
copies them. engine/roster.py adds and removes, scheduler and policies read. Never decides who runs.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from engine.messages import SamplingParams
from engine.plan import Plan
from engine.request import Request
from engine.rows import Vector
from engine.table import SLOTS_MIN

Item = TypeVar("Item")


class Running:
    """All lists and `slots` are aligned; `slots` is a view that the next change moves on."""

    def __init__(self, key: Callable[[Request], tuple[int, ...]]) -> None:
        self.rows: list[Request] = []
        self._key = key
        self._slots: Vector = np.zeros(SLOTS_MIN, dtype=np.int64)
        self._numbers: list[int] = []
        self._block_tables: list[list[int]] = []
        self._sampling: list[SamplingParams] = []
        self._groups: list[str] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def slots(self) -> Vector:
        """Return the slots of all rows, in order."""
        return self._slots[: len(self.rows)]

    def add(self, request: Request) -> None:
        """Let a sequence in at its place."""
        place, count = self._place(request), len(self.rows)
        if count == len(self._slots):
            self._slots = np.pad(self._slots, (0, count))
        self._slots[place + 1 : count + 1] = self._slots[place:count]
        self._slots[place] = request.slot
        self.rows.insert(place, request)
        self._numbers.insert(place, request.number)
        self._block_tables.insert(place, request.blocks)
        self._sampling.insert(place, request.sampling)
        self._groups.insert(place, request.group)

    def remove(self, request: Request) -> None:
        """Take a sequence out."""
        place, count = self._place(request), len(self.rows)
        assert self.rows[place] is request, "it does not run"
        self._slots[place : count - 1] = self._slots[place + 1 : count]
        del self.rows[place], self._numbers[place], self._block_tables[place]
        del self._sampling[place], self._groups[place]

    def copy_to(self, plan: Plan, places: Vector) -> None:
        """Append the rows at these places to the columns of a plan."""
        chosen = None if len(places) == len(self.rows) else places.tolist()
        _copy(self.rows, plan.rows, chosen)
        _copy(self._numbers, plan.requests, chosen)
        _copy(self._block_tables, plan.block_tables, chosen)
        _copy(self._sampling, plan.sampling, chosen)
        _copy(self._groups, plan.groups, chosen)

    def _place(self, request: Request) -> int:
        rows, key = self.rows, self._key
        if not rows or key(rows[-1]) < key(request):
            return len(rows)
        return bisect_left(rows, key(request), key=key)


def _copy(source: list[Item], target: list[Item], places: list[int] | None) -> None:
    """Append what stands at the places, all of it for None."""
    target.extend(source if places is None else [source[place] for place in places])
