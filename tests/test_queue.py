"""The bounded queue by itself: who may join, and what the others are told about coming back.

Retry-After is held to what an engine then really does: a small model of one (slots, steps whose
time grows with their rows, answers that stop early) works off the queue while clients come back.
"""

import heapq
import math
import random
from dataclasses import dataclass, field

import pytest

from server.queue import Asked, Queue, QueueFull, QueueLimits, Waiting
from tests import samples

SECOND = 1_000_000_000


@dataclass
class Clock:
    ns: int = 0

    def now_ns(self) -> int:
        return self.ns


def refusal(queue: Queue, *, sequences: int = 1, tokens: int = 1, tenant: str = "a") -> QueueFull:
    with pytest.raises(QueueFull) as found:
        queue.check(Asked(tenant=tenant, sequences=sequences, tokens=tokens), slots=1, slots_free=0)
    return found.value


def admits(queue: Queue, *, tokens: int = 1, tenant: str = "a", slots_free: int = 0) -> bool:
    asked = Asked(tenant=tenant, sequences=1, tokens=tokens)
    queue.check(asked, slots=1, slots_free=slots_free)
    return True


# ---- who may join


def test_bounds_in_requests_and_tokens() -> None:
    queue = Queue(QueueLimits(requests_max=2, tokens_max=100), Clock().now_ns)
    assert admits(queue, tokens=5000)
    queue.joined(1, Waiting("a", 60, 10))
    assert admits(queue, tokens=40)
    assert refusal(queue, tokens=41).reason == "queue_tokens"
    queue.joined(2, Waiting("a", 40, 10))
    assert refusal(queue).reason == "queue_full"
    assert admits(queue, tokens=0, slots_free=1)
    queue.ended(1, 0, "cancelled")
    queue.ended(1, 0, "cancelled")
    assert (len(queue), queue.tokens) == (1, 40)
    queue.clear()
    assert (len(queue), queue.tokens) == (0, 0)


def test_a_tenant_has_bounds_of_its_own_and_takes_nothing_from_others() -> None:
    limits = QueueLimits(
        requests_max=10, tokens_max=1000, tenant_requests_max=2, tenant_tokens_max=50
    )
    queue = Queue(limits, Clock().now_ns)
    queue.joined(1, Waiting("a", 30, 10))
    assert refusal(queue, tokens=21).reason == "tenant_limit"
    assert admits(queue, tokens=20)
    queue.joined(2, Waiting("a", 20, 10))
    assert refusal(queue, tokens=0).reason == "tenant_limit"
    assert admits(queue, tokens=0, slots_free=1)
    assert admits(queue, tenant="b", tokens=500)
    queue.ended(1, 0, "cancelled")
    assert admits(queue, tokens=1)
    answer = refusal(queue, sequences=2, tokens=1).answer()
    assert (answer.status, answer.code) == (429, "tenant_limit")


def test_a_refusal_says_when_in_seconds_and_for_openai_in_milliseconds() -> None:
    answer = QueueFull("queue_full", 2.2).answer()
    assert dict(answer.headers) == {"Retry-After": "3", "retry-after-ms": "2200"}
    assert QueueFull("queue_bytes", 0.001).answer().headers["Retry-After"] == "1"


# ---- when to come back


def test_before_anything_is_known_a_retry_is_still_within_bounds() -> None:
    queue = Queue(QueueLimits(requests_max=4, tokens_max=10**9), Clock().now_ns)
    for number in range(4):
        queue.joined(number, Waiting("a", 1, 10**9))
    for _ in range(10_000):
        assert 0 < refusal(queue).retry_after_s <= 120


@dataclass
class Engine:
    """Works off a queue: each step gives every running sequence one token."""

    queue: Queue
    clock: Clock
    slots: int
    step_s: float
    row_s: float
    line: list[int] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, tuple[int, int]] = field(default_factory=dict)

    def submit(self, number: int, max_tokens: int, length: int) -> None:
        """Ask the queue, then join it; raises QueueFull."""
        asked = Asked(tenant="a", sequences=1, tokens=8)
        free = self.slots - len(self.running)
        self.queue.check(asked, slots=self.slots, slots_free=free)
        self.queue.joined(number, Waiting("a", 8, max_tokens))
        self.line.append(number)
        self.lengths[number] = (max_tokens, length)

    def step(self) -> None:
        admitted = self.line[: self.slots - len(self.running)]
        self.line = self.line[len(admitted) :]
        for number in admitted:
            self.running[number] = self.lengths[number][1]
        rows = len(self.running)
        begin_ns = self.clock.ns
        self.clock.ns += int((self.step_s + self.row_s * rows) * SECOND)
        iteration = samples.iteration(
            1,
            begin_at_ns=begin_ns,
            end_at_ns=self.clock.ns,
            running=rows,
            waiting=len(self.line),
            decode_tokens=rows,
            admitted=admitted,
        )
        self.queue.stepped(iteration)
        for number in list(self.running):
            self.running[number] -= 1
            if not self.running[number]:
                del self.running[number]
                self.queue.ended(number, self.lengths[number][1], "stop")


@pytest.mark.parametrize("early", [1.0, 0.3], ids=["whole answers", "answers that stop early"])
@pytest.mark.parametrize("over", [0.5, 1.0, 3.0], ids=lambda over: f"{over:g} x too many")
def test_those_who_come_back_find_room_and_waited_no_longer_than_twice_the_drain(
    early: float, over: float
) -> None:
    """A burst on a server that has been busy: the refused come back once, when they were told."""
    pick = random.Random(7)
    clock = Clock()
    slots, places = 8, 64
    queue = Queue(QueueLimits(requests_max=places, tokens_max=10**9), clock.now_ns)
    engine = Engine(queue, clock, slots, step_s=0.02, row_s=0.002)

    def submit(number: int) -> None:
        max_tokens = pick.randrange(50, 400)
        engine.submit(number, max_tokens, max(1, int(max_tokens * early * pick.uniform(0.5, 1))))

    for number in range(3 * slots):
        submit(number)
    while engine.line or engine.running:
        engine.step()
    clock.ns += 60 * SECOND
    begun_ns = clock.ns
    back: list[tuple[int, int]] = []
    told_s: list[float] = []
    for number in range(1000, 1000 + slots + places + int(over * places)):
        try:
            submit(number)
        except QueueFull as full:
            told_s.append(math.ceil(full.retry_after_s))
            heapq.heappush(back, (clock.ns + math.ceil(full.retry_after_s) * SECOND, number))
    assert len(told_s) == int(over * places)
    first, drained_s = set(engine.line), 0.0
    at_once = 0
    while engine.line or engine.running or back:
        while back and back[0][0] <= clock.ns:
            try:
                submit(heapq.heappop(back)[1])
                at_once += 1
            except QueueFull:
                pass
        engine.step()
        if not drained_s and not first & set(engine.line):
            drained_s = (clock.ns - begun_ns) / SECOND
    assert max(told_s) <= 2 * drained_s
    if over <= 1:
        assert at_once >= 0.8 * len(told_s)
    else:
        # More than the queue can ever hold: as many as it holds find room, and no herd forms.
        assert at_once >= 0.8 * places
        assert max(told_s.count(second) for second in told_s) < len(told_s) / 4


def test_a_steady_overload_is_worked_off_by_those_who_obey() -> None:
    """Twice the load that is possible for a minute; then everybody is served within twice that."""
    pick = random.Random(3)
    clock = Clock()
    queue = Queue(QueueLimits(requests_max=32, tokens_max=10**9), clock.now_ns)
    engine = Engine(queue, clock, slots=8, step_s=0.01, row_s=0.002)
    per_s = 2 * 8 / (75 * (0.01 + 8 * 0.002))
    arrivals = [(int(pick.uniform(0, 60) * SECOND), number) for number in range(int(per_s * 60))]
    heapq.heapify(arrivals)
    tries = 0
    count = len(arrivals)
    while arrivals or engine.line or engine.running:
        if not engine.line and not engine.running:
            clock.ns = max(clock.ns, arrivals[0][0])
        while arrivals and arrivals[0][0] <= clock.ns:
            _, number = heapq.heappop(arrivals)
            tries += 1
            try:
                engine.submit(number, 100, pick.randrange(50, 100))
            except QueueFull as full:
                due_ns = clock.ns + math.ceil(full.retry_after_s) * SECOND
                heapq.heappush(arrivals, (due_ns, number))
        engine.step()
    assert clock.ns < 150 * SECOND, "the engine was kept busy all the time"
    assert tries < 12 * count


def test_impatient_clients_do_not_push_the_others_away() -> None:
    """A thousand refusals a second of clients that do not wait change little for those who do."""
    clock = Clock()
    queue = Queue(QueueLimits(requests_max=16, tokens_max=10**9), clock.now_ns)
    engine = Engine(queue, clock, slots=4, step_s=0.02, row_s=0.0)
    for number in range(20):
        engine.submit(number, 100, 100)
    for _ in range(50):
        engine.step()
    alone_s = refusal(queue).retry_after_s
    storm_s = [refusal(queue).retry_after_s for _ in range(3000)]
    drain_s = 16 / 4 * 100 * 0.02
    assert alone_s <= drain_s
    assert max(storm_s) <= 2 * drain_s


def test_answers_that_were_cut_do_not_make_the_others_look_short() -> None:
    clock = Clock()
    queue = Queue(QueueLimits(requests_max=4, tokens_max=10**9), clock.now_ns)
    engine = Engine(queue, clock, slots=4, step_s=0.02, row_s=0.0)
    for number in range(8):
        engine.submit(number, 100, 100)
    for _ in range(50):
        engine.step()
    before_s = refusal(queue).retry_after_s
    for number in range(4):
        queue.ended(number, 50, "cancelled")
    clock.ns += 120 * SECOND  # nobody who was told to come back is awaited any more
    assert refusal(queue).retry_after_s == pytest.approx(before_s)
