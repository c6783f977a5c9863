"""Running sums over batch rows: what each live request's rows cost it so far, for all at once.

Owns one line of integers a request (`slot`) and the rows not yet divided. explain_fold.py adds the
rows of each iteration, and `flush` divides a few thousand of them in one go: some 0.3 us a row.
Must never depend on how rows fall into flushes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from telemetry.explain import SPLIT, Batch, Floats, Ints, Model, Parts, shares, split
from telemetry.records import Iteration

SLOTS_MIN = 256
NOBODY = 0
"""Slot of rows whose request's start was lost: they weigh, and nobody is told of them."""

COLUMNS = (*SPLIT, "device_ns", "kv_block_ns", "counted", "rows")
DEVICE, KV, COUNTED_ROWS, ROWS = range(len(SPLIT), len(COLUMNS))


class Step:
    """An iteration that was folded: its place, the model in force, and what its rows weigh.

    `covered` is the wall time of all tiles before it; `certain` says that none is missing there.
    """

    __slots__ = ("certain", "covered", "index", "model", "record", "totals")

    def __init__(
        self, record: Iteration, index: int, model: Model, covered: int, *, certain: bool
    ) -> None:
        self.record = record
        self.index = index
        self.model = model
        self.covered = covered
        self.certain = certain
        self.totals: Floats | None = None


class Cut(NamedTuple):
    """A row that accounted for `was` ns and should for `now`: its request ended, or came, there."""

    step: Step
    row: int
    prompt: int
    lost: int
    was: int
    now: int


class RowSums:
    """Sums by slot. Slots are given out and taken back; everything in between adds up."""

    def __init__(self) -> None:
        self._sums = np.zeros((SLOTS_MIN, len(COLUMNS)), dtype=np.int64)
        self._prompts = np.zeros(SLOTS_MIN, dtype=np.int64)
        self._blocks = np.zeros(SLOTS_MIN, dtype=np.int64)
        self._free = list(range(SLOTS_MIN - 1, NOBODY, -1))
        self._clear()

    def _clear(self) -> None:
        self._steps: list[Step] = []
        self._slots: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._held: list[int] = []
        self._lost: list[int] = []
        self._lengths: dict[int, int] = {}

    @property
    def pending(self) -> int:
        """Rows that wait for the next flush."""
        return len(self._slots)

    def open(self, prompt_tokens: int) -> int:
        """Return a slot for a request."""
        if not self._free:
            grown = len(self._prompts)
            self._sums = np.concatenate([self._sums, np.zeros_like(self._sums)])
            self._prompts = np.concatenate([self._prompts, np.zeros_like(self._prompts)])
            self._blocks = np.concatenate([self._blocks, np.zeros_like(self._blocks)])
            self._free = list(range(2 * grown - 1, grown - 1, -1))
        slot = self._free.pop()
        self._prompts[slot] = prompt_tokens
        return slot

    def close(self, slot: int) -> None:
        """Take a slot back; nothing of it may be pending."""
        self._sums[slot] = 0
        self._blocks[slot] = 0
        self._free.append(slot)

    def read(self, slot: int) -> list[int]:
        """Return the sums of a slot in the order of COLUMNS; flush first."""
        values: list[int] = self._sums[slot].tolist()
        return values

    def blocks(self, slot: int) -> int:
        """Return how many KV blocks the request's last row held."""
        return int(self._blocks[slot])

    def add(self, step: Step, slots: Sequence[int], lost: Sequence[int] | None) -> None:
        """Take in an iteration's rows: their slots, and the tokens each lost to preemptions."""
        record = step.record
        self._steps.append(step)
        self._slots += slots
        self._starts += record.start_positions
        self._counts += record.token_counts
        self._held += record.kv_block_counts
        self._lost += lost or [0] * len(slots)

    def shorten(self, row: int, length_ns: int) -> None:
        """Let a row of the iteration added last account for less than its whole tile."""
        place = len(self._slots) - len(self._steps[-1].record.requests) + row
        self._lengths[place] = length_ns

    def flush(self) -> None:
        """Divide all pending rows."""
        if not self._steps:
            return
        records = [step.record for step in self._steps]
        slots = np.array(self._slots, dtype=np.int64)
        batch = Batch(
            steps=np.repeat(np.arange(len(records)), [len(one.requests) for one in records]),
            starts=np.array(self._starts, dtype=np.int64),
            counts=np.array(self._counts, dtype=np.int64),
            prompts=self._prompts[slots],
            device_ns=np.array([one.device_ns for one in records], dtype=np.int64),
            spare=np.array([one.padding_tokens + one.idle_rows for one in records], dtype=np.int64),
            models=np.array([step.model for step in self._steps], dtype=np.float64),
        )
        totals = batch.totals()
        for step, row in zip(self._steps, totals, strict=True):
            step.totals = row
        lengths = np.array([r.end_at_ns - r.begin_at_ns for r in records], dtype=np.int64)
        lengths = lengths[batch.steps]
        for place, length_ns in self._lengths.items():
            lengths[place] = length_ns
        held = np.array(self._held, dtype=np.int64)
        values = np.empty((len(slots), len(COLUMNS)), dtype=np.int64)
        values[:, : len(SPLIT)] = split(
            Parts(
                starts=batch.starts,
                counts=batch.counts,
                prompts=batch.prompts,
                lost=np.array(self._lost, dtype=np.int64),
                lengths=lengths,
                device_ns=batch.device_ns[batch.steps],
                models=batch.models[batch.steps],
                totals=totals[batch.steps],
            )
        )
        values[:, DEVICE] = shares(batch)
        values[:, KV] = held * lengths
        values[:, COUNTED_ROWS] = batch.models[batch.steps, 4] == 0
        values[:, ROWS] = 1
        for column in range(len(COLUMNS)):
            added = np.bincount(slots, values[:, column], len(self._prompts))
            self._sums[:, column] += added.astype(np.int64)
        self._blocks[slots] = held
        self._clear()


def recount(cuts: Sequence[Cut]) -> Ints:
    """Return what shortening these rows changes, [cuts, 7] ns by cause; their steps are flushed."""
    if not cuts:
        return np.zeros((0, len(SPLIT)), dtype=np.int64)
    records = [cut.step.record for cut in cuts]

    def column(values: Sequence[int]) -> Ints:
        return np.array([*values, *values], dtype=np.int64)

    parts = split(
        Parts(
            starts=column([r.start_positions[c.row] for r, c in zip(records, cuts, strict=True)]),
            counts=column([r.token_counts[c.row] for r, c in zip(records, cuts, strict=True)]),
            prompts=column([cut.prompt for cut in cuts]),
            lost=column([cut.lost for cut in cuts]),
            lengths=np.array([*(c.was for c in cuts), *(c.now for c in cuts)], dtype=np.int64),
            device_ns=column([record.device_ns for record in records]),
            models=np.array([c.step.model for c in cuts] * 2, dtype=np.float64),
            totals=np.array([c.step.totals for c in cuts] * 2, dtype=np.float64),
        )
    )
    return np.asarray(parts[len(cuts) :] - parts[: len(cuts)])
