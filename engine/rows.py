"""What a step does to the counters of its rows: read them, take tokens in flight, take results in.

Owns that arithmetic twice: in numpy, which is the specification, and in C++, which does it in one
pass a row and costs microseconds. engine/table.py holds the counters and calls whichever there is.
Decides nothing, and knows neither requests nor blocks.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.int64]
Matrix = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

COLUMNS = (
    *("epoch", "known", "read", "planned", "computed", "highest", "limit", "prompt"),
    *("room", "nameable", "last", "decided", "flights", "iterations", "ids"),
)
EPOCH, KNOWN, READ, PLANNED, COMPUTED, HIGHEST, LIMIT, PROMPT = range(8)
ROOM, NAMEABLE, LAST, DECIDED, FLIGHTS, ITERATIONS, IDS = range(8, 15)
ID_BYTES = 4
"""Token ids are int32."""
PLACEHOLDER = -1
"""Token id of a sampled token that the host has not read yet; the device has it."""


class Outlook(NamedTuple):
    """What rows may compute next: `pending` of each, and places of those that want one token.

    `lacking` are the places among `decodes` whose blocks have no room for it; `chunks` counts the
    rows that want more than one.
    """

    pending: Vector
    decodes: Vector
    lacking: Vector
    chunks: int


class Reservation(NamedTuple):
    """What a step has taken in flight: read again when its results come.

    `columns` has a row each of starts, counts, epochs, output indices, ids of the last known token
    before the step, and blocks held, with an entry for each of `slots`; `samples` says which reach
    their last known token, `sampled` how many.
    """

    slots: Vector
    columns: Matrix
    samples: Mask
    sampled: int
    decode_tokens: int

    @property
    def starts(self) -> Vector:
        """Tokens planned before the step."""
        starts: Vector = self.columns[0]
        return starts

    @property
    def counts(self) -> Vector:
        """Tokens taken."""
        counts: Vector = self.columns[1]
        return counts

    @property
    def epochs(self) -> Vector:
        """Preemptions so far."""
        epochs: Vector = self.columns[2]
        return epochs


class Landing(NamedTuple):
    """What came of a step; `computed` sums all tokens that count.

    `full`: places of rows with another full block of their prompt. `due`: places of those that have
    ended, or by their newest token, or by the number of them, begin or end. `kept`: whose sampled
    token is the sequence's next one, `kept_count` of them.
    """

    computed: int
    full: Vector
    due: Vector
    kept: Mask
    kept_count: int


class Rows(Protocol):
    """The three passes over `values`, the counters: (slots, columns) of int64."""

    def outlook(self, values: Matrix, slots: Vector) -> Outlook:
        """Return what each may compute next."""
        ...

    def reserve(
        self, values: Matrix, slots: Vector, counts: Vector | None, block_tokens: int
    ) -> Reservation:
        """Take `counts` tokens of each in flight, one each for None; the last known one samples.

        One whose tokens outgrow its room has been given one block more.
        """
        ...

    def land(
        self, values: Matrix, step: Reservation, tokens: Sequence[int], stops: Vector
    ) -> Landing:
        """Count a step's tokens as computed, and note the ids of those that it sampled.

        What a sequence that was preempted or ended since then computed does not count. A token
        sampled for one that was preempted is kept; for one that ended it is not. What is kept is
        written behind the ids that were read before, at the address that is `ids`.
        """
        ...


class NumpyRows:
    """One vector operation after the other."""

    def outlook(self, values: Matrix, slots: Vector) -> Outlook:
        """Return what each may compute next."""
        rows = values.take(slots, axis=0)
        planned = rows[:, PLANNED]
        pending = np.minimum(rows[:, KNOWN], rows[:, LIMIT]) - planned
        decodes = np.flatnonzero(pending == 1)
        lacking = decodes[(planned >= rows[:, ROOM])[decodes]]
        return Outlook(pending, decodes, lacking, int(np.count_nonzero(pending > 1)))

    def reserve(
        self, values: Matrix, slots: Vector, counts: Vector | None, block_tokens: int
    ) -> Reservation:
        """Take tokens in flight."""
        rows = values.take(slots, axis=0)
        known, planned = rows[:, KNOWN], rows[:, PLANNED]
        if counts is None:
            counts = np.ones_like(known)
        ends = planned + counts
        samples = ends == known
        # By position: below the highest computed is recompute, below the prompt's end prefill,
        # else decode; one row may hold more than one kind.
        decode_from = np.maximum(rows[:, HIGHEST], rows[:, PROMPT])
        decodes = np.maximum(np.minimum(ends - decode_from, counts), 0)
        rows[:, ROOM] += block_tokens * (ends > rows[:, ROOM])
        blocks, indices = rows[:, ROOM] // block_tokens, known - rows[:, PROMPT]
        columns = np.stack((planned, counts, rows[:, EPOCH], indices, rows[:, LAST], blocks))
        rows[:, PLANNED] = ends
        rows[:, KNOWN] = known + samples
        rows[samples, LAST] = PLACEHOLDER
        rows[:, FLIGHTS] += 1
        rows[:, ITERATIONS] += 1
        values[slots] = rows
        sampled = int(np.count_nonzero(samples))
        return Reservation(slots, columns, samples, sampled, int(decodes.sum()))

    def land(
        self, values: Matrix, step: Reservation, tokens: Sequence[int], stops: Vector
    ) -> Landing:
        """Take results in."""
        rows = values.take(step.slots, axis=0)
        computed, read = rows[:, COMPUTED], rows[:, READ]
        valid = (rows[:, EPOCH] == step.epochs) & (rows[:, PLANNED] > computed)
        counts = step.counts * valid
        computed += counts
        rows[:, HIGHEST] = np.maximum(rows[:, HIGHEST], computed)
        rows[:, FLIGHTS] -= 1
        ids = np.zeros_like(counts)
        ids[step.samples] = tokens
        ended = rows[:, DECIDED] > 0
        kept = step.samples & ~ended
        for place in np.flatnonzero(kept).tolist():
            at = int(rows[place, IDS]) + ID_BYTES * int(read[place])
            ctypes.c_int32.from_address(at).value = int(ids[place])
        read += kept
        newest = np.where(read == rows[:, KNOWN], ids, PLACEHOLDER)
        rows[:, LAST] = np.where(kept, newest, rows[:, LAST])
        values[step.slots] = rows
        border = (read > rows[:, LIMIT]) | (read == rows[:, PROMPT] + 1) | np.isin(ids, stops)
        return Landing(
            computed=int(counts.sum()),
            full=np.flatnonzero(computed >= rows[:, NAMEABLE]),
            due=np.flatnonzero((border & kept) | ended),
            kept=kept,
            kept_count=int(np.count_nonzero(kept)),
        )


class NativeRows:
    """One pass a row, in the library's rows.cpp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._found = np.zeros(4, dtype=np.int64)
        self._told = self._found.data
        self._told_at = address_of(self._found)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        for name, kinds in (
            ("rows_outlook", (*(pointer, pointer, number), *([pointer] * 4))),
            ("rows_reserve", (*([pointer] * 3), number, number, *([pointer] * 3))),
            (
                "rows_land",
                (*([pointer] * 4), number, pointer, pointer, number, *([pointer] * 4)),
            ),
        ):
            function = getattr(self._library, name)
            function.argtypes, function.restype = kinds, None

    def outlook(self, values: Matrix, slots: Vector) -> Outlook:
        """Return what each may compute next."""
        count = len(slots)
        out = np.empty((3, count), dtype=np.int64)
        at, stride = address_of(out), count * 8
        self._library.rows_outlook(
            *(address_of(values), address_of(slots), count, at, at + stride, at + 2 * stride),
            self._told_at,
        )
        decodes, lacking, chunks, _ = self._told
        return Outlook(out[0], out[1, :decodes], out[2, :lacking], chunks)

    def reserve(
        self, values: Matrix, slots: Vector, counts: Vector | None, block_tokens: int
    ) -> Reservation:
        """Take tokens in flight."""
        count = len(slots)
        columns, samples = np.empty((6, count), dtype=np.int64), np.empty(count, dtype=np.bool_)
        counts_at = None if counts is None else address_of(counts)
        self._library.rows_reserve(
            *(address_of(values), address_of(slots), counts_at, count, block_tokens),
            *(address_of(columns), address_of(samples), self._told_at),
        )
        decode_tokens, sampled, _, _ = self._told
        return Reservation(slots, columns, samples, sampled, decode_tokens)

    def land(
        self, values: Matrix, step: Reservation, tokens: Sequence[int], stops: Vector
    ) -> Landing:
        """Take results in."""
        count, ids = len(step.slots), np.array(tokens, dtype=np.int64)
        assert len(ids) == step.sampled, "a token for each row that samples"
        places, kept = np.empty((2, count), dtype=np.int64), np.empty(count, dtype=np.bool_)
        at = address_of(places)
        self._library.rows_land(
            *(address_of(values), address_of(step.slots), address_of(step.columns)),
            *(address_of(step.samples), count, address_of(ids), address_of(stops), len(stops)),
            *(address_of(kept), at, at + count * 8, self._told_at),
        )
        full, due, kept_count, computed = self._told
        return Landing(computed, places[0, :full], places[1, :due], kept, kept_count)


def address_of(array: npt.NDArray[np.int64] | npt.NDArray[np.int32] | Mask) -> int:
    """Return where its first entry lies; it must be contiguous."""
    address: int = array.__array_interface__["data"][0]
    return address


def fastest() -> Rows:
    """Return the native rows, or numpy's where there is neither library nor compiler."""
    from kernels.native import NativeError, library  # noqa: PLC0415  not for servers

    try:
        return NativeRows(library())
    except NativeError:
        return NumpyRows()
