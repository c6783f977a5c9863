"""The counters of every live sequence, one row of a matrix each.

Owns the numbers that a step changes for every row of its batch, side by side, so that plan and
commit read and write each once whatever the batch's size. A Request reads and writes its own slot
through its cells; engine/draft.py reserves whole batches and engine/roster.py takes their results
in. Decides nothing.
"""

from collections.abc import Sequence

import numpy as np

from engine.rows import (
    COLUMNS,
    COMPUTED,
    KNOWN,
    PROMPT,
    READ,
    Landing,
    Matrix,
    Outlook,
    Reservation,
    Rows,
    Vector,
    fastest,
)

SLOTS_MIN = 64
NEVER = 2**62
"""A number of tokens that nobody reaches."""


class Table:
    """Int64 columns by name, and the slots that nobody uses; doubles when it is full.

    A slot's counters lie side by side, so that a step reads and writes each row's once.

    `known`, `planned`, `computed`, `highest`, `prompt`, `flights`, `iterations` and `epoch` are
    those of engine/request.py. `read` counts tokens whose ids the host has; `limit` is the most
    that may be computed, 0 once the finish is known, which `decided` says; `room` tokens fit its
    blocks; at `nameable` computed tokens its next block is full; `last` is the id of its last
    known token; `ids` is the address of the int32 ids of those read, with room for all to come.
    """

    def __init__(self, block_tokens: int, rows: Rows | None = None) -> None:
        self._block_tokens = block_tokens
        self._rows = rows or fastest()
        self._free: list[int] = []
        self._set(np.zeros((0, len(COLUMNS)), dtype=np.int64))
        self._grow()

    def _set(self, values: Matrix) -> None:
        """Point every column, and the cells that Python reads one by one, into `values`."""
        self._values = values
        columns = values.T
        self.cells = {name: memoryview(row) for name, row in zip(COLUMNS, columns, strict=True)}
        self.known, self.read, self.computed = columns[KNOWN], columns[READ], columns[COMPUTED]
        self.prompt = columns[PROMPT]

    def _grow(self) -> None:
        slots = len(self._values)
        more = max(SLOTS_MIN, slots)
        self._set(np.pad(self._values, ((0, more), (0, 0))))
        self._free.extend(range(slots + more - 1, slots - 1, -1))

    @property
    def slots_used(self) -> int:
        """Slots that sequences hold."""
        return len(self._values) - len(self._free)

    def take(self, *, prompt: int, limit: int, last: int) -> int:
        """Return the slot of a new sequence with `prompt` tokens, all read."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._values[slot] = 0
        cells = self.cells
        cells["known"][slot] = cells["read"][slot] = cells["prompt"][slot] = prompt
        cells["limit"][slot] = limit
        cells["last"][slot] = last
        cells["nameable"][slot] = NEVER
        return slot

    def give_back(self, slot: int) -> None:
        """Let another sequence have a slot of which no step is in flight."""
        assert self.cells["flights"][slot] == 0, "a late result would count for another sequence"
        self._free.append(slot)

    def outlook(self, slots: Vector) -> Outlook:
        """Return Request.pending of each, and who wants one token or more."""
        return self._rows.outlook(self._values, slots)

    def reserve(self, slots: Vector, counts: Vector | None) -> Reservation:
        """Take `counts` tokens of each in flight, None for one; the last known one samples.

        One whose tokens outgrow its room has been given one block more.
        """
        return self._rows.reserve(self._values, slots, counts, self._block_tokens)

    def land(self, step: Reservation, tokens: Sequence[int], stops: Vector) -> Landing:
        """Count a step's tokens as computed; `stops` are ids that may end a sequence."""
        return self._rows.land(self._values, step, tokens, stops)
