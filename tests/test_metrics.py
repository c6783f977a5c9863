"""Metrics agree with the record: identities at every scrape, gauges that return to idle.

Owns the proofs of telemetry/metrics.py and fold.py. Scrapes are parsed as Prometheus reads them.
"""

import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.bus import Bus
from telemetry.metric_spec import PHASE_EDGES_S, TTFT_EDGES_S
from telemetry.metrics import Metrics, Outside
from telemetry.records import FINISHES
from tests import samples

PAIR = re.compile(r'(\w+)="([^"]*)"')
Sample = tuple[str, frozenset[tuple[str, str]]]


class Scrape:
    """One scrape, parsed."""

    def __init__(self, of: Metrics | str) -> None:
        self.text = of if isinstance(of, str) else of.exposition()[0].decode()
        self.values: dict[Sample, float] = {}
        self._named: dict[str, list[Sample]] = {}
        for line in self.text.splitlines():
            if not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name, _, labels = series.removesuffix("}").partition("{")
                pairs = frozenset(PAIR.findall(labels))
                assert pairs, line
                self.values[name, pairs] = float(value)
                self._named.setdefault(name, []).append((name, pairs))

    def __call__(self, name: str, **labels: str) -> float:
        found = [
            self.values[own, pairs]
            for own, pairs in self._named.get(name, ())
            if labels.items() <= pairs
        ]
        assert found, f"no {name} {labels}"
        return sum(found)

    def check(self) -> None:
        accepted = self("iterscope_requests_accepted_total")
        running = self("iterscope_requests", state="running")
        waiting = self("iterscope_requests", state="waiting")
        assert accepted == self("iterscope_requests_ended_total") + running + waiting
        assert min(running, waiting, accepted) >= 0
        assert 0 <= self("iterscope_kv_usage_ratio") <= 1
        parts = [
            self("iterscope_kv_blocks", state=state)
            for state in ("used", "cached", "free", "total")
        ]
        assert min(parts) >= 0
        assert sum(parts[:3]) == parts[3]


def metered(capacity: int = 1000, *, aliases: bool = True) -> tuple[Bus, Metrics]:
    bus = Bus(run_id="r", capacity=capacity)
    return bus, Metrics(bus=bus, model_name="tiny", vllm_aliases=aliases)


def test_a_request_lives_through_the_gauges() -> None:
    bus, metrics = metered()
    bus.publish(samples.run(kv_blocks_total=10))
    bus.publish(samples.start(1))
    bus.publish(samples.start(2))
    assert (Scrape(metrics)("vllm:num_requests_waiting")) == 2
    bus.publish(samples.iteration(1, [1], admitted=[1], waiting=1, kv_blocks_used=4))
    scrape = Scrape(metrics)
    assert scrape("vllm:num_requests_running") == 1
    assert scrape("vllm:num_requests_waiting") == 1
    assert scrape("vllm:kv_cache_usage_perc") == 0.4
    bus.publish(
        samples.iteration(
            2,
            [2],
            admitted=[2],
            waiting=1,
            preempted=[1],
            preempted_causes=["kv"],
            preempted_blocks=[4],
            preempted_lost_tokens=[8],
            preempted_beneficiaries=[2],
        )
    )
    scrape = Scrape(metrics)
    assert scrape("vllm:num_preemptions_total") == 1
    assert scrape("vllm:num_requests_running") == 1
    bus.publish(samples.iteration(3, [2], running=0, waiting=1, finished=[2], kv_blocks_used=0))
    Scrape(metrics).check()
    bus.publish(samples.end(2, finish="length"))
    scrape = Scrape(metrics)
    scrape.check()
    assert scrape("vllm:num_requests_running") == 0
    assert scrape("vllm:num_requests_waiting") == 1
    assert scrape("vllm:request_success_total", finished_reason="length") == 1
    assert scrape("iterscope_requests_ended_total", finish="length") == 1


def test_gauges_return_to_idle_when_everything_is_cancelled() -> None:
    bus, metrics = metered()
    bus.publish(samples.run(kv_blocks_total=100))
    for request in range(40):
        bus.publish(samples.start(request))
    bus.publish(samples.iteration(1, list(range(40)), admitted=list(range(40)), kv_blocks_used=99))
    assert Scrape(metrics)("vllm:kv_cache_usage_perc") == 0.99
    for request in range(40):
        bus.publish(samples.end(request, finish="cancelled", cancel_cause="client"))
    scrape = Scrape(metrics)
    scrape.check()
    assert scrape("vllm:num_requests_running") == scrape("vllm:num_requests_waiting") == 0
    assert scrape("vllm:kv_cache_usage_perc") == 0
    assert scrape("vllm:request_success_total", finished_reason="abort") == 40


def test_gauges_return_to_idle_when_the_engine_dies() -> None:
    bus, metrics = metered()
    bus.publish(samples.run())
    for request in (1, 2, 3):
        bus.publish(samples.start(request))
    bus.publish(samples.iteration(1, [1, 2], admitted=[1, 2], waiting=1, kv_blocks_used=50))
    bus.publish(samples.fault())
    for request in (1, 2, 3):
        bus.publish(samples.end(request, finish="error", error="the engine died"))
    scrape = Scrape(metrics)
    scrape.check()
    assert scrape("vllm:num_requests_running") == scrape("vllm:num_requests_waiting") == 0
    assert scrape("vllm:kv_cache_usage_perc") == 0
    assert scrape("iterscope_faults_total") == 1
    bus.publish(samples.run())
    bus.publish(samples.start(4))
    scrape = Scrape(metrics)
    scrape.check()
    assert scrape("vllm:kv_cache_usage_perc") == 0, "the dead engine's last figure is forgotten"
    assert scrape("vllm:num_requests_waiting") == 1


def test_latencies_are_counted_once_for_what_happened() -> None:
    bus, metrics = metered()
    bus.publish(samples.run())
    second = 1_000_000_000
    for request, finish, first, last in (
        (1, "stop", second // 5, second),
        (2, "length", second // 5, 2 * second),
        (3, "cancelled", second // 5, second),
        (4, "cancelled", None, None),
        (5, "stop", None, None),
    ):
        bus.publish(samples.start(request))
        end = samples.end(request, finish=finish, received_at_ns=0, released_at_ns=3 * second)
        delivery = samples.delivery(
            request, received_at_ns=0, first_write_at_ns=first, last_write_at_ns=last
        )
        for record in (end, delivery) if request % 2 else (delivery, end):
            bus.publish(record)
    scrape = Scrape(metrics)
    assert scrape("vllm:time_to_first_token_seconds_count") == 3
    assert scrape("vllm:time_to_first_token_seconds_sum") == pytest.approx(0.6)
    assert scrape("vllm:e2e_request_latency_seconds_count") == 3
    assert scrape("vllm:e2e_request_latency_seconds_sum") == pytest.approx(1 + 2 + 3)
    for edge, count in ((0.1, 0), (0.15, 0), (0.2, 3)):
        assert scrape("vllm:time_to_first_token_seconds_bucket", le=str(edge)) == count
    assert scrape("vllm:e2e_request_latency_seconds_bucket", le="1.0") == 1
    assert scrape("vllm:e2e_request_latency_seconds_bucket", le="+Inf") == 3
    assert tuple(sorted(TTFT_EDGES_S)) == TTFT_EDGES_S
    assert tuple(sorted(PHASE_EDGES_S)) == PHASE_EDGES_S


def test_tokens_are_live_while_running_and_exact_at_the_end() -> None:
    bus, metrics = metered()
    bus.publish(samples.run())
    bus.publish(samples.start(1, prompt_tokens=10))
    seen: list[tuple[float, float]] = []

    def look() -> None:
        scrape = Scrape(metrics)
        seen.append((scrape("vllm:prompt_tokens_total"), scrape("vllm:generation_tokens_total")))

    def step(number: int, start: int, count: int, **changed: object) -> None:
        bus.publish(
            samples.iteration(number, [1], start_positions=[start], token_counts=[count], **changed)
        )
        look()

    step(1, 0, 6, admitted=[1])
    step(2, 6, 4)  # the prompt is done: one token sampled
    step(3, 10, 1)
    step(4, 11, 1)
    preempted = samples.iteration(
        5,
        [],
        running=0,
        waiting=1,
        preempted=[1],
        preempted_causes=["kv"],
        preempted_blocks=[1],
        preempted_lost_tokens=[12],
        preempted_beneficiaries=[1],
    )
    bus.publish(preempted)
    look()
    step(6, 0, 5, admitted=[1])
    step(7, 5, 8)
    bus.publish(samples.end(1, prompt_tokens=10, output_tokens=4))
    look()
    assert seen == [(0, 0), (10, 0), (10, 1), (10, 2), (10, 2), (10, 2), (10, 3), (10, 4)]


def test_what_the_ring_lost_is_counted_and_the_identity_still_holds() -> None:
    bus, metrics = metered(capacity=8)
    bus.publish(samples.run())
    Scrape(metrics).check()
    for request in range(1, 21):
        bus.publish(samples.start(request))
    for request in range(1, 16):
        bus.publish(samples.end(request))
    scrape = Scrape(metrics)
    scrape.check()
    assert scrape("iterscope_requests_accepted_total") == 20
    assert scrape("iterscope_requests_ended_total") == 15
    assert scrape("iterscope_requests_ended_total", finish="unknown") == 7
    assert scrape("vllm:num_requests_waiting") == 5
    assert scrape("iterscope_telemetry_lost_total", reader="metrics") == 27


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), capacity=st.sampled_from([4, 16, 500]), burst=st.integers(1, 30))
def test_identities_hold_at_every_scrape_of_random_traffic(
    seed: int, capacity: int, burst: int
) -> None:
    bus, metrics = metered(capacity, aliases=False)
    traffic, counters = random.Random(seed), {"accepted": 0, "ended": 0}
    live: list[int] = []
    running: set[int] = set()
    for number in range(60):
        what = traffic.random()
        if what < 0.05:
            for request in live:
                bus.publish(samples.end(request, finish="error"))
            counters["ended"] += len(live)
            live, running = [], set()
            bus.publish(samples.run())
        elif what < 0.4:
            counters["accepted"] += 1
            live.append(counters["accepted"])
            bus.publish(samples.start(live[-1]))
        elif what < 0.8:
            admitted = [request for request in live if request not in running][:2]
            running.update(admitted)
            rows = sorted(running)
            bus.publish(samples.iteration(number + 1, rows, admitted=admitted, kv_blocks_used=150))
        elif live:
            gone = live.pop(traffic.randrange(len(live)))
            running.discard(gone)
            counters["ended"] += 1
            bus.publish(samples.end(gone, finish=traffic.choice(FINISHES)))
        if number % burst == 0:
            Scrape(metrics).check()
    scrape = Scrape(metrics)
    scrape.check()
    assert scrape("iterscope_requests_accepted_total") == counters["accepted"]
    assert scrape("iterscope_requests_ended_total") == counters["ended"]
    if capacity == 500:
        assert scrape("iterscope_telemetry_lost_total") == 0
        assert scrape("iterscope_requests", state="waiting") == len(live) - len(running)


def test_the_thread_folds_without_a_scrape() -> None:
    bus, metrics = metered(capacity=64)
    metrics.start()
    try:
        for total in (40, 80, 120, 160):
            for step in range(1, 41):
                bus.publish(samples.iteration(step))
            deadline = time.monotonic() + 10
            while metrics._fold.iterations < total:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        metrics.stop()
    scrape = Scrape(metrics)
    assert scrape("iterscope_telemetry_lost_total", reader="metrics") == 0
    assert scrape("iterscope_iterations_total") == 160


def test_channel_losses_and_streams_are_counted() -> None:
    bus, metrics = metered(capacity=4)
    bus.publish(samples.iteration(1))
    bus.publish(samples.iteration(9, lost_before=7))
    with bus.reader(0, label="stream") as reader:
        Scrape(metrics)
        for step in range(10, 20):
            bus.publish(samples.iteration(step))
        reader.take(100)
        scrape = Scrape(metrics)
        assert scrape("iterscope_telemetry_readers", reader="stream") == 1
    assert scrape("iterscope_telemetry_lost_total", reader="engine") == 7
    assert scrape("iterscope_telemetry_lost_total", reader="stream") == 8
    assert Scrape(metrics)("iterscope_telemetry_readers", reader="stream") == 0


def test_rejections_and_admission_stops_are_counted_by_reason() -> None:
    bus, metrics = metered()
    bus.publish(samples.rejection(reason="queue_full"))
    bus.publish(samples.rejection(reason="infeasible"))
    bus.publish(samples.iteration(1, admission_stop="kv"))
    scrape = Scrape(metrics)
    assert scrape("iterscope_requests_rejected_total") == 2
    assert scrape("iterscope_requests_rejected_total", reason="queue_full") == 1
    assert scrape("iterscope_admission_stops_total", reason="kv") == 1


def test_the_oldest_of_the_queue_and_whether_it_is_overtaken() -> None:
    second = 1_000_000_000
    now = [0]
    bus = Bus(run_id="r", capacity=100)
    metrics = Metrics(bus=bus, model_name="tiny", outside=Outside(now_ns=lambda: now[0]))

    def look(at_s: float) -> tuple[float, float]:
        now[0] = round(at_s * second)
        scrape = Scrape(metrics)
        return (
            scrape("iterscope_queue_oldest_seconds"),
            scrape("iterscope_overtaken_wait_seconds"),
        )

    bus.publish(samples.run())
    assert look(1) == (0, 0)
    for request in (1, 2, 3):
        bus.publish(samples.start(request, arrived_at_ns=request * second))
    assert look(5) == (4, 0)
    bus.publish(samples.iteration(1, [1], admitted=[1], waiting=2, end_at_ns=5 * second))
    assert look(6) == (4, 0), "2 waits since 2 s; nobody later was admitted"
    bus.publish(samples.iteration(2, [1, 3], admitted=[3], waiting=1, end_at_ns=7 * second))
    assert look(8) == (6, 6), "3 was admitted before 2"
    lost = {"preempted_causes": ["kv"], "preempted_blocks": [1], "preempted_lost_tokens": [9]}
    bus.publish(
        samples.iteration(
            3,
            [3, 2],
            admitted=[2],
            preempted=[1],
            preempted_beneficiaries=[3],
            waiting=1,
            end_at_ns=10 * second,
            **lost,
        )
    )
    assert look(12) == (2, 2), "1 waits since it was preempted, and 2 came later than it"
    bus.publish(samples.iteration(4, [3, 2, 1], admitted=[1], end_at_ns=13 * second))
    assert look(20) == (0, 0)
