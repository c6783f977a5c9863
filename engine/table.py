"""The counters of every live sequence as columns, one slot a sequence.

Owns the numbers that a step changes for every row of its batch, so that plan and commit are a few
vector operations whatever the batch's size. A Request reads and writes its own slot through its
cells; engine/draft.py reserves whole batches and engine/roster.py takes their results in. Decides
nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

COLUMNS = (
    *("epoch", "known", "read", "planned", "computed", "highest", "limit", "prompt"),
    *("room", "nameable", "flights", "iterations", "last", "decided"),
)
SLOTS_MIN = 64
NEVER = 2**62
"""A number of tokens that nobody reaches."""
PLACEHOLDER = -1
"""Token id of a sampled token that the host has not read yet; the device has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a step has taken in flight, one entry a row: read again when its results come.

    `last` is the id of each one's last known token before the step.
    """

    slots: Vector
    epochs: Vector
    starts: Vector
    counts: Vector
    samples: Mask
    output_indices: Vector
    last: Vector
    decode_tokens: int


class Table:
    """Int64 columns by name, and the slots that nobody uses; doubles when it is full.

    `known`, `planned`, `computed`, `highest`, `prompt`, `flights`, `iterations` and `epoch` are
    those of engine/request.py. `read` counts tokens whose ids the host has; `limit` is the most
    that may be computed, 0 once the finish is known, which `decided` says; `room` tokens fit its
    blocks; at `nameable` computed tokens its next block is full; `last` is the id of its last
    known token.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._set(np.zeros((len(COLUMNS), 0), dtype=np.int64))
        self._grow()

    def _set(self, values: npt.NDArray[np.int64]) -> None:
        """Point every column, and the cells that Python reads one by one, into `values`."""
        self._values = values
        self.cells = {name: memoryview(row) for name, row in zip(COLUMNS, values, strict=True)}
        (self.epoch, self.known, self.read, self.planned, self.computed) = values[:5]
        (self.highest, self.limit, self.prompt, self.room, self.nameable) = values[5:10]
        (self.flights, self.iterations, self.last, self.decided) = values[10:]

    def _grow(self) -> None:
        slots = self._values.shape[1]
        more = max(SLOTS_MIN, slots)
        self._set(np.pad(self._values, ((0, 0), (0, more))))
        self._free.extend(range(slots + more - 1, slots - 1, -1))

    @property
    def slots_used(self) -> int:
        """Slots that sequences hold."""
        slots: int = self._values.shape[1]
        return slots - len(self._free)

    def take(self, *, prompt: int, limit: int, last: int) -> int:
        """Return the slot of a new sequence with `prompt` tokens, all read."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._values[:, slot] = 0
        self.known[slot] = self.read[slot] = self.prompt[slot] = prompt
        self.limit[slot] = limit
        self.last[slot] = last
        self.nameable[slot] = NEVER
        return slot

    def give_back(self, slot: int) -> None:
        """Let another sequence have a slot of which no step is in flight."""
        assert self.flights[slot] == 0, "a late result would count for another sequence"
        self._free.append(slot)

    def pending(self, slots: Vector) -> Vector:
        """Return how many tokens of each the next step may compute: Request.pending."""
        pending: Vector = np.minimum(self.known[slots], self.limit[slots]) - self.planned[slots]
        return pending

    def reserve(self, slots: Vector, counts: Vector) -> Reservation:
        """Take `counts` tokens of each in flight; whoever reaches its last known token samples."""
        starts, known, last = self.planned[slots], self.known[slots], self.last[slots]
        ends = starts + counts
        samples = ends == known
        # By position: below the highest computed is recompute, below the prompt's end prefill,
        # else decode; one row may hold more than one kind.
        decode_from = np.maximum(self.highest[slots], self.prompt[slots])
        decodes = np.maximum(np.minimum(ends - decode_from, counts), 0)
        self.planned[slots] = ends
        self.known[slots] = known + samples
        self.last[slots] = np.where(samples, PLACEHOLDER, last)
        self.flights[slots] = self.flights[slots] + 1
        self.iterations[slots] = self.iterations[slots] + 1
        return Reservation(
            slots=slots,
            epochs=self.epoch[slots],
            starts=starts,
            counts=counts,
            samples=samples,
            output_indices=known - self.prompt[slots],
            last=last,
            decode_tokens=int(decodes.sum()),
        )

    def land(self, step: Reservation) -> int:
        """Count a step's tokens as computed and return how many.

        A row of a sequence that was preempted or ended since then does not count.
        """
        slots, counts = step.slots, step.counts
        self.flights[slots] = self.flights[slots] - 1
        computed = self.computed[slots]
        valid = (self.epoch[slots] == step.epochs) & (self.planned[slots] > computed)
        if np.count_nonzero(valid) < len(slots):
            slots, counts, computed = slots[valid], counts[valid], computed[valid]
        computed += counts
        self.computed[slots] = computed
        self.highest[slots] = np.maximum(self.highest[slots], computed)
        return int(counts.sum())

    def learn(self, slots: Vector, tokens: Vector) -> Vector:
        """Note the ids of one sampled token of each; return how many each has read now."""
        read: Vector = self.read[slots] + 1
        self.read[slots] = read
        self.last[slots] = np.where(read == self.known[slots], tokens, PLACEHOLDER)
        return read
