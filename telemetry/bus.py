"""The bus: one bounded ring of records between a single publisher and any number of readers.

Owns sequence numbers, generations, the live set and the exact arithmetic of loss. The server's
event loop publishes; SSE, history and metrics read, each at its own pace, from any thread.
Must never make the publisher wait or work for a reader: no locks, no callbacks, no queues on the
publish path. A reader that falls behind loses the oldest records and is told how many.
"""

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from telemetry.records import KINDS, Record, RequestEnd, RequestStart, Run

KIND_NAMES: dict[type[Record], str] = {kind: name for name, kind in KINDS.items()}
"""Record class to the name that tables and SSE events carry."""

_KIND_INDEX = {kind: index for index, kind in enumerate(KINDS.values())}

Tally = tuple[int, ...]
"""Records published so far, by kind, in the order of KINDS."""


class Entry(NamedTuple):
    """A record in its place: `seq` counts from 1 in a run, `payload` is the record's JSON.

    `tally` counts what was published up to and including this entry.
    """

    seq: int
    generation: int
    kind: str
    record: Record
    payload: bytes
    tally: Tally


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after record `seq`: what a new reader must know before it reads on.

    `live` holds the requests that started and have not ended, in order of arrival; `run` is None
    until the first engine was ready, `generation` then 0.
    """

    seq: int
    generation: int
    run: Run | None
    live: list[RequestStart]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one `take` brought. The lost records, if any, come before the entries.

    lost == lost_to - lost_from + 1, or 0 with both ends 0. `lost_by_kind` is None where the reader
    began at a place that the ring no longer held.
    """

    entries: list[Entry]
    lost: int
    lost_from: int
    lost_to: int
    lost_by_kind: dict[str, int] | None


class _State:
    """Run and live requests as of one sequence number, advanced record by record."""

    __slots__ = ("generation", "live", "run", "seq")

    def __init__(self) -> None:
        self.seq = 0
        self.generation = 0
        self.run: Run | None = None
        self.live: dict[int, RequestStart] = {}

    def advance(self, record: Record, seq: int) -> None:
        if isinstance(record, RequestStart):
            self.live[record.request] = record
        elif isinstance(record, RequestEnd):
            self.live.pop(record.request, None)
        elif isinstance(record, Run):
            self.run = record
            self.generation += 1
        self.seq = seq


class Bus:
    """A ring of `capacity` records. One thread publishes; everything else may be called by any."""

    def __init__(self, *, run_id: str, capacity: int) -> None:
        assert capacity >= 1
        self.run_id = run_id
        self.capacity = capacity
        self._ring: list[Entry | None] = [None] * capacity
        self._head = _State()  # as of the newest record
        self._tail = _State()  # as of the newest record that was overwritten
        self._counts = [0] * len(KINDS)
        self._begun = 0  # the record being published; equals the head's seq between publishes
        self._readers: dict[str, int] = {}
        self._lost: dict[str, int] = {}
        self._readers_lock = threading.Lock()

    @property
    def head(self) -> int:
        """Return the sequence number of the newest record, 0 when there is none."""
        return self._head.seq

    @property
    def generation(self) -> int:
        """Return how many engines this run has had."""
        return self._head.generation

    def publish(self, record: Record, payload: bytes | None = None) -> int:
        """Append a record and return its sequence number; encodes it when no payload is given.

        The same work whatever reads: one slot is replaced, and the record that leaves the ring is
        folded into the tail's state, so that a reader that lost records can start again there.
        """
        if payload is None:
            payload = msgspec.json.encode(record)
        seq = self._head.seq + 1
        self._begun = seq
        slot = seq % self.capacity
        leaving = self._ring[slot]
        if leaving is not None:
            self._tail.advance(leaving.record, leaving.seq)
        # The head's seq moves last, and only after the slot is filled: a reader on another thread
        # never looks for an entry that is not there yet.
        kind = type(record)
        self._counts[_KIND_INDEX[kind]] += 1
        generation = self._head.generation + (kind is Run)
        self._ring[slot] = Entry(
            seq, generation, KIND_NAMES[kind], record, payload, tuple(self._counts)
        )
        self._head.advance(record, seq)
        return seq

    def snapshot(self) -> Snapshot:
        """Return the state after the newest record."""
        return self._copy(self._head)

    def tail_snapshot(self) -> Snapshot:
        """Return the state after the newest record that left the ring.

        On the publishing thread its seq equals `lost_to` of a loss that `take` just reported.
        """
        return self._copy(self._tail)

    def past_snapshot(self, records: int) -> Snapshot:
        """Return the state as it was `records` records ago, or as far back as the ring may tell.

        A quarter of the ring is left free, so that a reader from there has time to begin before
        it loses anything. On the publishing thread alone.
        """
        head, tail = self.head, self._tail
        first = max(tail.seq, head - min(records, self.capacity * 3 // 4))
        state = _State()
        state.seq, state.generation, state.run = tail.seq, tail.generation, tail.run
        state.live = tail.live.copy()
        for entry in self._window(tail.seq + 1, first - tail.seq):
            assert entry is not None
            state.advance(entry.record, entry.seq)
        return self._copy(state)

    def reader(self, after_seq: int, *, label: str = "other") -> "Reader":
        """Return a reader of the records after `after_seq` (0..head); `label` is for counting."""
        assert 0 <= after_seq <= self.head
        with self._readers_lock:
            self._readers[label] = self._readers.get(label, 0) + 1
            self._lost.setdefault(label, 0)
        return Reader(self, after_seq, label)

    def readers(self) -> dict[str, int]:
        """Return how many readers are open, by label."""
        with self._readers_lock:
            return self._readers.copy()

    def losses(self) -> dict[str, int]:
        """Return how many records readers lost in all, by label, closed readers included."""
        with self._readers_lock:
            return self._lost.copy()

    def holds(self, seq: int) -> bool:
        """Return whether a reader that has seen `seq` can go on without loss."""
        return self._tail.seq <= seq <= self.head

    def _count_loss(self, label: str, lost: int) -> None:
        with self._readers_lock:
            self._lost[label] += lost

    def _release(self, label: str) -> None:
        with self._readers_lock:
            self._readers[label] -= 1

    def _window(self, start: int, count: int) -> list[Entry | None]:
        """Copy `count` slots from sequence number `start`; each slice is one step of the GIL."""
        first = start % self.capacity
        window = self._ring[first : first + count]
        return window + self._ring[: count - len(window)]

    def _tally_at(self, seq: int) -> Tally | None:
        if seq == 0:
            return (0,) * len(KINDS)
        entry = self._ring[seq % self.capacity]
        return entry.tally if entry is not None and entry.seq == seq else None

    def _copy(self, state: _State) -> Snapshot:
        # A sequence lock: copy, and copy again when a publish began meanwhile. Each copy is one
        # step of the GIL, so only their agreement needs the check.
        while True:
            begun = self.head
            copied = Snapshot(state.seq, state.generation, state.run, list(state.live.values()))
            if self._begun == begun:
                return copied
            time.sleep(0)  # let the publisher's thread finish


class Reader:
    """One reader's place in the ring. Each reader belongs to one thread at a time."""

    def __init__(self, bus: Bus, after_seq: int, label: str) -> None:
        self._bus = bus
        self._label = label
        self._tally = bus._tally_at(after_seq)
        self._open = True
        self.seq = after_seq
        self.lost_total = 0

    @property
    def behind(self) -> int:
        """Return how many records were published after this reader's place."""
        return self._bus.head - self.seq

    def take(self, limit: int) -> Batch:
        """Return at most `limit` next entries, and what was lost before them. Never waits.

        received + lost counts every record from the reader's start to its place, whatever the
        publisher does meanwhile: an entry carries its own seq, so one that was overwritten during
        the copy is seen to be another.
        """
        assert limit >= 1
        bus = self._bus
        head = bus.head
        start = max(self.seq + 1, head - bus.capacity + 1)
        window = bus._window(start, min(limit, head - start + 1))
        entries: list[Entry] = []
        for seq, entry in enumerate(window, start):
            if entry is not None and entry.seq == seq:
                entries.append(entry)
            elif entries:
                break  # overwritten while copying: the next take counts it
            else:
                start = seq + 1
        return self._advance(start, entries)

    def _advance(self, start: int, entries: list[Entry]) -> Batch:
        lost = start - self.seq - 1
        batch = Batch(entries, 0, 0, 0, None)
        if lost:
            by_kind = self._lost_by_kind(entries)
            batch = Batch(entries, lost, self.seq + 1, start - 1, by_kind)
            self.lost_total += lost
            self._bus._count_loss(self._label, lost)
            self.seq = start - 1
            self._tally = None
        if entries:
            self.seq = entries[-1].seq
            self._tally = entries[-1].tally
        return batch

    def _lost_by_kind(self, entries: list[Entry]) -> dict[str, int] | None:
        if self._tally is None or not entries:
            return None
        counts = {
            name: after - before
            for name, after, before in zip(KINDS, entries[0].tally, self._tally, strict=True)
        }
        counts[entries[0].kind] -= 1  # the first entry itself was not lost
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        """Stop counting this reader; idempotent."""
        if self._open:
            self._open = False
            self._bus._release(self._label)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
