"""The sums of steps and requests come to what was published, by hand-made records.

Owns the proofs of telemetry/fold_steps.py, fold_requests.py and the document of the table.
"""

from pathlib import Path

import pytest

from telemetry import metrics_document
from telemetry.bus import Bus
from telemetry.metric_spec import EXPLAIN
from telemetry.metric_table import METRICS
from telemetry.metrics import Metrics, Outside
from telemetry.named import catalogue
from telemetry.records import RequestCause
from tests import samples
from tests.test_metrics import Scrape

ROOT = Path(__file__).resolve().parent.parent
MS = 1_000_000


def metered() -> tuple[Bus, Metrics]:
    bus = Bus(run_id="r", capacity=10_000)
    bus.publish(samples.run())
    return bus, Metrics(bus=bus, model_name="tiny")


def test_the_document_is_current_and_names_queries_that_exist() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == metrics_document.document() + "\n"
    known = catalogue().keys()
    assert {spec.query for spec in METRICS} <= known | {EXPLAIN}
    names = [name for spec in METRICS for name in (spec.name, *spec.aliases)]
    assert len({*names}) == len(names)
    assert all(name.startswith(("iterscope_", "vllm:")) for name in names)
    for spec in METRICS:
        assert (spec.type == "histogram") == bool(spec.buckets)
        assert tuple(sorted(set(spec.buckets))) == spec.buckets


def test_gaps_between_tokens_count_each_token_after_the_first() -> None:
    bus, metrics = metered()
    steps = (
        # rows, first positions, tokens of each, prefill tokens, end in ms
        ([1], [0], [8], 8, 10),
        ([1, 2], [8, 0], [1, 8], 8, 30),
        ([1, 2], [9, 8], [1, 1], 0, 40),
        ([1, 2], [10, 9], [1, 1], 0, 50),
        ([1], [11], [1], 0, 60),  # 2 was preempted,
        ([1, 2], [12, 0], [1, 6], 6, 70),  # and computes again what it lost
        ([1, 2], [13, 6], [1, 5], 4, 80),
    )
    for request in (1, 2):
        bus.publish(samples.start(request, prompt_tokens=8))
    for step, (rows, starts, counts, prefill, end_ms) in enumerate(steps, 1):
        bus.publish(
            samples.iteration(
                step,
                rows,
                start_positions=starts,
                token_counts=counts,
                prefill_tokens=prefill,
                decode_tokens=sum(counts) - prefill,
                end_at_ns=end_ms * MS,
            )
        )
    scrape = Scrape(metrics)
    assert scrape("vllm:inter_token_latency_seconds_count") == 9
    # of 1: 20, 10, 10, 10, 10, 10; of 2: 10, 10, 30
    assert scrape("vllm:inter_token_latency_seconds_sum") == pytest.approx(0.120)
    assert scrape("vllm:iteration_tokens_total_sum") == 35
    assert scrape("iterscope_batch_requests_sum") == 12


def test_steps_add_up_by_part_reason_cause_and_shape() -> None:
    bus, metrics = metered()
    for step in (1, 2):
        bus.publish(
            samples.iteration(
                step,
                [1, 2],
                admission_stop="kv",
                waiting=3,
                begin_at_ns=step * MS,
                end_at_ns=(step + 1) * MS,
                padding_tokens=2,
                bucket=4,
                graph=step == 2,
                allocation_failures=1,
                preempted=[9],
                preempted_causes=["kv"],
                preempted_blocks=[2],
                preempted_lost_tokens=[20],
                preempted_beneficiaries=[1],
                plan_ns=100_000,
                device_ns=500_000,
            )
        )
    scrape = Scrape(metrics)
    assert scrape("iterscope_waiting_seconds_total", reason="kv") == pytest.approx(0.006)
    assert scrape("iterscope_step_part_seconds_total", part="plan") == pytest.approx(0.0002)
    assert scrape("iterscope_device_seconds_total") == pytest.approx(0.001)
    assert scrape("iterscope_steps_total", bucket="4", graph="true") == 1
    assert scrape("iterscope_steps_total", bucket="4", graph="false") == 1
    assert scrape("iterscope_preemptions_total", cause="kv") == 2
    assert scrape("iterscope_preempted_tokens_total") == 40
    assert scrape("iterscope_scheduled_tokens_total", kind="padding") == 4
    assert scrape("iterscope_allocation_failures_total") == 2


def test_requests_add_up_by_phase_cause_and_end() -> None:
    bus, metrics = metered()
    bus.publish(samples.start(1))
    bus.publish(
        samples.end(
            1,
            arrived_at_ns=0,
            admitted_at_ns=100 * MS,
            first_token_at_ns=300 * MS,
            decided_at_ns=600 * MS,
            cached_tokens=4,
            output_tokens=4,
            wasted_tokens=1,
        )
    )
    bus.publish(samples.delivery(1, first_write_at_ns=303 * MS, stall_ns=50 * MS))
    bus.publish(RequestCause(request=1, cause="own_decode", ns=7 * MS, rule="counted"))
    bus.publish(samples.start(2))
    unborn = {"admitted_at_ns": None, "first_token_at_ns": None, "output_tokens": 0}
    bus.publish(samples.end(2, finish="cancelled", cancel_cause="client", **unborn))
    scrape = Scrape(metrics)
    for phase, seconds in (("queue", 0.1), ("prefill", 0.2), ("decode", 0.3), ("inference", 0.5)):
        assert scrape(f"vllm:request_{phase}_time_seconds_count") == 1
        assert scrape(f"vllm:request_{phase}_time_seconds_sum") == pytest.approx(seconds)
    assert scrape("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert scrape("iterscope_delivery_lag_seconds_sum") == pytest.approx(0.003)
    assert scrape("iterscope_output_stall_seconds_total") == pytest.approx(0.05)
    assert scrape("iterscope_cause_seconds_total", cause="own_decode") == pytest.approx(0.007)
    assert scrape("iterscope_requests_cancelled_total", cause="client") == 1
    assert scrape("iterscope_requests_cancelled_total", cause="deadline") == 0
    assert scrape("vllm:prefix_cache_queries_total") == 8
    assert scrape("vllm:prefix_cache_hits_total") == 4
    assert scrape("iterscope_wasted_tokens_total") == 1
    assert scrape("iterscope_wasted_tokens_total", cause="served") == 1
    assert scrape("iterscope_output_stalls_total") == 1


def test_the_device_is_busy_by_the_clock_and_not_by_the_last_step() -> None:
    second = 1_000_000_000
    now = [0]
    bus = Bus(run_id="r", capacity=100)
    metrics = Metrics(bus=bus, model_name="tiny", outside=Outside(now_ns=lambda: now[0]))
    bus.publish(samples.run())
    for step in range(1, 11):
        bus.publish(
            samples.iteration(
                step, [1], end_at_ns=step * second + second // 2, device_ns=second // 4
            )
        )
    for at_s, ratio in ((11, 0.25), (16, 0.125), (30, 0)):
        now[0] = at_s * second
        assert Scrape(metrics)("iterscope_device_busy_ratio") == pytest.approx(ratio)


def test_graphs_miss_only_where_the_engine_replays_any() -> None:
    bus, metrics = metered()
    bus.publish(samples.run())
    bus.publish(samples.iteration(1, [1], bucket=4))
    bus.publish(samples.iteration(2, [1], bucket=4, graph=True))
    bus.publish(samples.iteration(3, [1, 2], graph=False))
    bus.publish(samples.iteration(4, [1, 2], graph=False, prefill_tokens=8))
    scrape = Scrape(metrics)
    assert scrape("iterscope_graph_steps_total", outcome="hit") == 1
    assert scrape("iterscope_graph_steps_total", outcome="miss") == 1
    assert scrape("iterscope_steps_total", bucket="4", graph="false") == 1


def test_n_is_counted_once_all_its_sequences_have_ended() -> None:
    bus, metrics = metered()
    for request in (1, 2, 3):
        bus.publish(samples.start(request, parent_id="cmpl-x"))
    bus.publish(samples.start(4))
    for request, tokens in ((2, 7), (1, 30), (4, 5)):
        parent = None if request == 4 else "cmpl-x"
        bus.publish(samples.end(request, parent_id=parent, output_tokens=tokens))
    assert Scrape(metrics)("iterscope_request_params_n_sum") == 1
    bus.publish(samples.end(3, parent_id="cmpl-x", output_tokens=2))
    scrape = Scrape(metrics)
    assert scrape("iterscope_request_params_n_count") == 2
    assert scrape("iterscope_request_params_n_sum") == 4
    assert scrape("iterscope_request_max_num_generation_tokens_sum") == 35
    assert scrape("iterscope_request_generation_tokens_count") == 4
