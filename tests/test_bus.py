"""The bus loses exactly what it says: arithmetic by property, then with real threads.

Owns the proofs of telemetry/bus.py: received + lost = published for every reader, snapshots that
fit their place, and a publisher that does the same work for any number of readers.
"""

import random
import sys
import threading
from collections import Counter
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.bus import KIND_NAMES, Bus, Entry, Reader
from telemetry.records import Record, RequestEnd, RequestStart, Run
from tests import samples


def published(bus: Bus, count: int) -> None:
    for _ in range(count):
        bus.publish(samples.iteration(bus.head + 1))


class Account:
    """What one reader has been given and told, against what was published."""

    def __init__(self, bus: Bus, after_seq: int) -> None:
        self.bus = bus
        self.start = after_seq
        self.reader: Reader = bus.reader(after_seq)
        self.received: list[int] = []
        self.lost: list[range] = []

    def take(self, limit: int) -> None:
        batch = self.reader.take(limit)
        assert len(batch.entries) <= limit
        if batch.lost:
            self.lost.append(range(batch.lost_from, batch.lost_to + 1))
            assert len(self.lost[-1]) == batch.lost
        for entry in batch.entries:
            assert entry.seq == entry.record.step  # type: ignore[union-attr]
            self.received.append(entry.seq)

    def settle(self) -> None:
        while self.reader.seq < self.bus.head:
            self.take(1000)
        seen = [*self.received, *(seq for gap in self.lost for seq in gap)]
        assert sorted(seen) == list(range(self.start + 1, self.bus.head + 1))
        assert self.received == sorted(self.received)
        assert self.reader.lost_total == sum(len(gap) for gap in self.lost)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 40)),
        st.tuples(st.just("open"), st.integers(0, 40)),
        st.tuples(st.just("take"), st.integers(1, 40)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(capacity=st.integers(1, 16), script=steps, order=st.randoms())
def test_received_and_lost_are_what_was_published(
    capacity: int, script: list[tuple[str, int]], order: random.Random
) -> None:
    bus = Bus(run_id="r", capacity=capacity)
    accounts: list[Account] = []
    for what, number in script:
        if what == "publish":
            published(bus, number)
        elif what == "open":
            accounts.append(Account(bus, min(number, bus.head)))
        elif accounts:
            order.choice(accounts).take(number)
    for account in accounts:
        account.settle()


records = st.lists(
    st.one_of(
        st.integers(1, 5).map(samples.start),
        st.integers(1, 5).map(samples.end),
        st.just(samples.run()),
        st.just(samples.iteration(1)),
        st.just(samples.rejection()),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(capacity=st.integers(1, 12), back=st.integers(0, 20), script=records)
def test_snapshots_of_the_rings_ends_and_within_it_fit_their_place(
    capacity: int, back: int, script: list[Record]
) -> None:
    bus = Bus(run_id="r", capacity=capacity)
    for record in script:
        bus.publish(record)
    for snapshot in (bus.snapshot(), bus.tail_snapshot(), bus.past_snapshot(back)):
        live, run, generation = {}, None, 0
        for record in script[: snapshot.seq]:
            if isinstance(record, RequestStart):
                live[record.request] = record
            elif isinstance(record, RequestEnd):
                live.pop(record.request, None)
            elif isinstance(record, Run):
                run, generation = record, generation + 1
        assert snapshot.live == list(live.values())
        assert (snapshot.run, snapshot.generation) == (run, generation)
    assert bus.snapshot().seq == len(script)
    assert bus.tail_snapshot().seq == max(0, len(script) - capacity)
    within = min(back, capacity * 3 // 4)
    assert bus.past_snapshot(back).seq == max(0, len(script) - within)


@settings(deadline=None)
@given(capacity=st.integers(1, 12), early=records, late=records)
def test_a_loss_is_told_by_kind(capacity: int, early: list[Record], late: list[Record]) -> None:
    bus = Bus(run_id="r", capacity=capacity)
    for record in early:
        bus.publish(record)
    reader = bus.reader(bus.head)
    for record in late:
        bus.publish(record)
    batch = reader.take(100)
    assert batch.lost == max(0, len(late) - capacity)
    if batch.lost:
        gone = late[: batch.lost]
        want = Counter(kind_of(record) for record in gone)
        assert batch.lost_by_kind == dict(want)
    else:
        assert batch.lost_by_kind is None


def kind_of(record: Record) -> str:
    return KIND_NAMES[type(record)]


def test_a_place_outside_the_ring_gives_a_loss_of_unknown_kinds() -> None:
    bus = Bus(run_id="r", capacity=4)
    published(bus, 10)
    batch = bus.reader(2).take(100)
    assert (batch.lost, batch.lost_from, batch.lost_to) == (4, 3, 6)
    assert batch.lost_by_kind is None
    assert [entry.seq for entry in batch.entries] == [7, 8, 9, 10]
    assert bus.holds(6)
    assert not bus.holds(5)


def test_readers_in_threads_lose_exactly_what_they_are_told() -> None:
    bus = Bus(run_id="r", capacity=8)
    done = threading.Event()
    accounts = [Account(bus, 0) for _ in range(3)]

    def read(account: Account, limit: int) -> None:
        while not done.is_set():
            account.take(limit)

    threads = [
        threading.Thread(target=read, args=(account, limit))
        for account, limit in zip(accounts, (1, 3, 100), strict=True)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # change threads as often as can be
    try:
        for thread in threads:
            thread.start()
        published(bus, 20_000)
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    for account in accounts:
        account.settle()
        assert account.received
    assert any(account.lost for account in accounts), "the test never overran the ring"


def test_a_snapshot_from_another_thread_is_of_one_moment() -> None:
    bus = Bus(run_id="r", capacity=4)
    done = threading.Event()
    torn: list[object] = []
    looked = 0

    def look() -> None:
        nonlocal looked
        while not done.is_set():
            for snapshot in (bus.snapshot(), bus.tail_snapshot()):
                # Odd records start request seq, even ones end the one before.
                want = [snapshot.seq] if snapshot.seq % 2 else []
                if [start.request for start in snapshot.live] != want:
                    torn.append(snapshot)
                looked += 1

    thread = threading.Thread(target=look)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for seq in range(1, 6001, 2):
            bus.publish(samples.start(seq))
            bus.publish(samples.end(seq))
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert looked
    assert not torn


def operations_of_a_publish(readers: int) -> int:
    """Count the calls, Python's and C's, that publishing 50 records makes."""
    bus = Bus(run_id="r", capacity=16)
    published(bus, 20)
    opened = [bus.reader(bus.head) for _ in range(readers)]
    record = samples.iteration(1, [1, 2, 3])
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(50):
            bus.publish(record)
    finally:
        sys.setprofile(None)
    assert len(opened) == readers
    return calls


def test_readers_cost_the_publisher_nothing() -> None:
    assert operations_of_a_publish(200) == operations_of_a_publish(0) > 50


def test_a_record_that_cannot_be_encoded_changes_nothing() -> None:
    bus = Bus(run_id="r", capacity=4)
    bus.publish(samples.run())
    with pytest.raises(UnicodeEncodeError):
        bus.publish(samples.start(1, request_id="\ud800"))
    assert bus.head == 1
    assert bus.snapshot().live == []
    bus.publish(samples.start(1))
    assert [entry.kind for entry in bus.reader(0).take(9).entries] == ["run", "request_start"]


def test_each_run_begins_a_generation() -> None:
    bus = Bus(run_id="r", capacity=8)
    bus.publish(samples.fault())
    bus.publish(samples.run(device="cpu"))
    bus.publish(samples.start(1))
    bus.publish(samples.run(device="cuda"))
    entries: list[Entry] = bus.reader(0).take(9).entries
    assert [entry.generation for entry in entries] == [0, 1, 1, 2]
    assert bus.generation == 2
    assert bus.snapshot().run.device == "cuda"  # type: ignore[union-attr]


def test_readers_and_their_losses_are_counted_by_label() -> None:
    bus = Bus(run_id="r", capacity=2)
    with bus.reader(0, label="stream") as reader:
        published(bus, 5)
        reader.take(10)
        assert bus.readers() == {"stream": 1}
        assert bus.losses() == {"stream": 3}
    reader.close()
    assert bus.readers() == {"stream": 0}
    assert bus.losses() == {"stream": 3}, "a loss stays counted after its reader left"


def test_the_payload_is_the_bytes_that_were_given() -> None:
    bus = Bus(run_id="r", capacity=2)
    bus.publish(samples.iteration(1), b'{"step":1}')
    bus.publish(samples.step_model(error=float("nan")))
    first, second = bus.reader(0).take(2).entries
    assert first.payload == b'{"step":1}'
    assert b'"error":null' in second.payload, "JSON has no NaN"
