"""What a scrape says and under which names: all of the table, vLLM's names and edges, two formats.

Owns the proofs of telemetry/metric_table.py, metric_vllm.py and exposition.py. prometheus_client's
parsers and promtool, which Prometheus' own authors wrote, read the text.
"""

import subprocess

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from telemetry.bus import Bus
from telemetry.histogram import Histogram
from telemetry.metric_device import GPUS
from telemetry.metric_spec import BASE_LABELS, MetricSpec
from telemetry.metric_table import METRICS
from telemetry.metrics import Metrics, Outside, Told
from telemetry.records import (
    ADMISSION_STOPS,
    CANCEL_CAUSES,
    CAUSES,
    FINISHES,
    PREEMPTION_CAUSES,
    REJECTION_REASONS,
)
from tests import samples
from tests.test_metrics import Scrape, metered


def everything() -> dict[str, Told]:
    """What the other parts of a server tell, as 0."""
    names = ("start_time_seconds", "engine_up", "engine_stalled_seconds", "requests_invalid_total")
    history = ("degraded", "bytes", "rows", "segments", "lag_seconds", "lost_total")
    more = ("history_rotation_age_seconds", *(f"history_{name}" for name in history))
    gpus = {spec.name: {("0", *spec.labels[1:]): 0.0} for spec in GPUS}
    return {f"iterscope_{name}": 0.0 for name in (*names, *more)} | gpus


def test_every_metric_of_the_table_is_there_before_the_first_event() -> None:
    bus, _ = metered()
    told = everything() | {"iterscope_history_bytes": 5.0}
    metrics = Metrics(bus=bus, model_name="tiny", outside=Outside(tell=lambda: told))
    bus.publish(samples.run())
    scrape = Scrape(metrics)
    seen: dict[str, list[set[str]]] = {}
    for own, pairs in scrape.values:
        seen.setdefault(own, []).append({*dict(pairs)})
    for spec in METRICS:
        for name in (spec.name, *spec.aliases):
            assert f"# TYPE {name} {spec.type}" in scrape.text
            series = seen.get(name + ("_count" if spec.type == "histogram" else ""))
            assert series, name
            assert all(labels == {*BASE_LABELS, *spec.labels} for labels in series), name
    for finish in ("stop", "length", "abort", "error"):
        assert scrape("vllm:request_success_total", finished_reason=finish) == 0
    for name, label, values in (
        ("iterscope_requests", "state", ("running", "waiting")),
        ("iterscope_requests_ended_total", "finish", (*FINISHES, "unknown")),
        ("iterscope_admission_stops_total", "reason", ADMISSION_STOPS),
        ("iterscope_waiting_seconds_total", "reason", ADMISSION_STOPS),
        ("iterscope_requests_rejected_total", "reason", REJECTION_REASONS),
        ("iterscope_requests_cancelled_total", "cause", CANCEL_CAUSES),
        ("iterscope_wasted_tokens_total", "cause", (*CANCEL_CAUSES, "error", "served")),
        ("iterscope_preemptions_total", "cause", PREEMPTION_CAUSES),
        ("iterscope_cause_seconds_total", "cause", CAUSES),
        ("iterscope_neighbour_stall_seconds_total", "kind", ("prefill", "decode")),
        ("iterscope_slo_requests_total", "class", ("default", "tighter", "looser")),
        ("iterscope_slo_requests_total", "outcome", ("met", "missed", "dropped")),
        ("iterscope_slo_tokens_total", "outcome", ("met", "missed")),
        ("iterscope_graph_steps_total", "outcome", ("hit", "miss")),
        ("iterscope_otlp_exports_total", "outcome", ("sent", "failed")),
        ("iterscope_telemetry_lost_total", "reader", ("engine", "history", "metrics", "stream")),
    ):
        assert all(scrape(name, **{label: value}) == 0 for value in values), name
    assert scrape("iterscope_telemetry_published_total", kind="run") == 1
    assert scrape("iterscope_telemetry_published_total") == 1
    assert scrape("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert scrape("iterscope_history_bytes") == 5


def test_vllm_reads_what_ours_say() -> None:
    """Aliases have the same figures; those of another shape come to the same sums."""
    bus, metrics = metered()
    bus.publish(samples.run())
    for request in (1, 2, 3):
        bus.publish(samples.start(request))
    bus.publish(
        samples.iteration(1, [1], admitted=[1], waiting=2, admission_stop="kv", kv_blocks_used=40)
    )
    bus.publish(samples.end(1, finish="stop", cached_tokens=3))
    bus.publish(samples.delivery(1))
    scrape = Scrape(metrics)
    for spec in METRICS:
        for alias in spec.aliases:
            ours = {key: value for key, value in scrape.values.items() if key[0] == spec.name}
            theirs = {key: value for key, value in scrape.values.items() if key[0] == alias}
            if spec.type != "histogram":
                assert {key[1]: value for key, value in ours.items()} == {
                    key[1]: value for key, value in theirs.items()
                }
            for part in ("_count", "_sum", "_bucket") if spec.type == "histogram" else ():
                assert scrape(spec.name + part) == scrape(alias + part)
    assert scrape("vllm:num_requests_waiting") == 2
    assert scrape("vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert scrape("vllm:num_requests_waiting_by_reason", reason="deferred") == 0
    assert scrape("vllm:prompt_tokens_by_source_total", source="local_compute") == 5
    assert scrape("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 3
    assert scrape("vllm:request_success_total", finished_reason="stop") == 1
    bus.publish(samples.iteration(2, [], waiting=2, admission_stop="dependency"))
    scrape = Scrape(metrics)
    assert scrape("vllm:num_requests_waiting_by_reason", reason="deferred") == 2


VLLM_EDGES = {
    "time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
        *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ),
    "inter_token_latency_seconds": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
        *(10.0, 20.0, 40.0, 80.0),
    ),
    "e2e_request_latency_seconds": (
        *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
        *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
    ),
    "iteration_tokens_total": (1, *(2.0**power for power in range(3, 15))),
    "time_per_prefill_token_request_seconds": (
        *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    ),
    "request_params_n": (1, 2, 5, 10, 20),
    "request_prompt_tokens": (1, 2, 5, 10, 20, 50, 100, 1000, 10_000, 100_000),
}


def test_vllms_edges_are_there_and_finer_ones_below() -> None:
    known = {alias: spec for spec in METRICS for alias in spec.aliases}
    for name, edges in VLLM_EDGES.items():
        assert {*edges} <= {*known[f"vllm:{name}"].buckets}, name
    for phase in ("queue", "prefill", "decode", "inference"):
        edges = known[f"vllm:request_{phase}_time_seconds"].buckets
        assert {*VLLM_EDGES["e2e_request_latency_seconds"]} <= {*edges}
        assert sum(edge < 0.3 for edge in edges) >= 5
    gaps = known["vllm:inter_token_latency_seconds"].buckets
    assert {*VLLM_EDGES["inter_token_latency_seconds"]} <= {*gaps}
    assert sum(edge < 0.01 for edge in gaps) >= 5


def test_without_aliases_our_own_names_stay() -> None:
    bus = Bus(run_id="r", capacity=10)
    scrape = Scrape(Metrics(bus=bus, model_name="tiny", vllm_aliases=False))
    assert "vllm:" not in scrape.text
    with_aliases = Scrape(Metrics(bus=bus, model_name="tiny"))
    ours = {key for key in with_aliases.values if not key[0].startswith("vllm:")}
    assert scrape.values.keys() == ours
    assert len(with_aliases.values) > len(ours)


def test_openmetrics_is_given_to_who_asks() -> None:
    _, metrics = metered()
    body, content_type = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    assert b"\nvllm:num_requests_running{" in body
    assert metrics.exposition("text/html")[1].startswith("text/plain; version=0.0.4")


NASTY = 'a "quoted" \\ name\nof two lines'


def test_other_programs_read_the_plain_text() -> None:
    bus = Bus(run_id="r", capacity=100)
    metrics = Metrics(bus=bus, model_name=NASTY, outside=Outside(tell=everything))
    bus.publish(samples.run())
    bus.publish(samples.start(1))
    bus.publish(samples.end(1, tenant='te"nant\\'))
    families = {one.name: one for one in plain_families(metrics.exposition()[0].decode())}
    for spec in METRICS:
        family = families[spec.name.removesuffix("_total") if spec.type == "counter" else spec.name]
        assert (family.type, family.documentation) == (spec.type, spec.help)
        assert {sample.labels["model_name"] for sample in family.samples} == {NASTY}
        if spec.type == "histogram":
            check_histogram(spec, family)
    tenants = families["iterscope_tenant_requests"].samples
    assert {sample.labels["tenant"] for sample in tenants} == {"other", 'te"nant\\'}


def check_histogram(spec: MetricSpec, family: Metric) -> None:
    """Buckets are those of the table, rise, and the last is the count."""
    buckets = [s for s in family.samples if s.name.endswith("_bucket")]
    edges = [float(sample.labels["le"]) for sample in buckets]
    assert edges == [*spec.buckets, float("inf")]
    values = [sample.value for sample in buckets]
    assert values == sorted(values)
    (count,) = (s.value for s in family.samples if s.name.endswith("_count"))
    assert count == values[-1]


@pytest.mark.parametrize("aliases", [False, True])
def test_promtool_accepts_the_text(aliases: bool) -> None:
    """Of ours it has nothing to say; of vLLM's names, that they have colons and odd endings."""
    bus = Bus(run_id="r", capacity=100)
    metrics = Metrics(
        bus=bus, model_name=NASTY, vllm_aliases=aliases, outside=Outside(tell=everything)
    )
    bus.publish(samples.run())
    bus.publish(samples.end(1))
    ran = subprocess.run(
        ["promtool", "check", "metrics"],
        input=metrics.exposition()[0],
        capture_output=True,
        check=False,
    )
    said = (ran.stdout + ran.stderr).decode().splitlines()
    assert ran.returncode == (3 if aliases else 0), said
    assert all(line.startswith("vllm:") for line in said), said
    assert bool(said) == aliases


def test_openmetrics_carries_the_request_of_each_latency() -> None:
    second = 1_000_000_000
    bus = Bus(run_id="r", capacity=100)
    metrics = Metrics(bus=bus, model_name="tiny")
    bus.publish(samples.run(started_unix_us=2_000_000_000_000_000))
    for request, took in ((1, second // 10), (2, 3 * second), (3, 3 * second + 1)):
        bus.publish(samples.start(request))
        times = {"received_at_ns": 0, "first_write_at_ns": took, "last_write_at_ns": took}
        bus.publish(samples.end(request))
        bus.publish(samples.delivery(request, **times))
    body, _ = metrics.exposition("application/openmetrics-text")
    families = {one.name: one for one in open_families(body.decode())}
    for name in ("iterscope_time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
        marked = {
            sample.exemplar.labels["request_id"]: (sample.labels["le"], sample.exemplar)
            for sample in families[name].samples
            if sample.exemplar
        }
        assert marked.keys() == {"req-1", "req-3"}, "the last of each bucket"
        edge, exemplar = marked["req-3"]
        assert edge == "5.0"
        assert exemplar.value == 3.000000001
        assert float(exemplar.timestamp) == 2_000_000_003.0
    assert b"#" not in metrics.exposition()[0].replace(b"# HELP", b"").replace(b"# TYPE", b"")


def test_an_exemplar_never_goes_back_in_time() -> None:
    """Prometheus drops one that does, and warns at every scrape until a newer one comes."""
    histogram = Histogram((1.0,))
    for request, at_ns in (("late", 30), ("told last", 20)):
        histogram.observe_of(request, 0.5, at_ns)
    assert histogram.marks == [("late", 0.5, 30), None]
    assert histogram.counts == [2, 0]
