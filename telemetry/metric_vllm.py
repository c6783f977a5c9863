"""vLLM's metrics that ours tell in another shape, under its names and labels, and their values.

Owns what --no-vllm-aliases leaves out besides the aliases: each help names ours. metric_table.py
takes the words, metrics.py asks `vllm_values`. What vLLM only has with a feature that is not here
(LoRA, speculation, KV transfer) is 0, or absent where vLLM itself leaves it out by default.
"""

from collections.abc import Mapping
from types import MappingProxyType

from telemetry.histogram import LabelValues, Values
from telemetry.metric_spec import MetricSpec

REASONS = MappingProxyType(
    {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
)
"""Our finish to vLLM's finished_reason."""

DEFERRED = frozenset({"batch_closed", "dependency", "slo", "policy"})
"""Admission stops that are a choice; the others are capacity."""


def _same(name: str, ours: str, *labels: str, query: str, kind: str = "counter") -> MetricSpec:
    """Return the entry of a name whose figure ours has under another."""
    return MetricSpec(
        name=f"vllm:{name}",
        type="counter" if kind == "counter" else "gauge",
        help=f"{ours[0].upper()}{ours[1:]}.",
        labels=labels,
        query=query,
    )


VLLM = (
    _same(
        "num_requests_running",
        'as iterscope_requests{state="running"}',
        query="queue",
        kind="gauge",
    ),
    _same(
        "num_requests_waiting",
        'as iterscope_requests{state="waiting"}',
        query="queue",
        kind="gauge",
    ),
    _same(
        "num_requests_waiting_by_reason",
        "the same by reason: deferred while admission stops by choice, else capacity",
        "reason",
        query="why_waiting",
        kind="gauge",
    ),
    _same("num_requests_swapped", "0: nothing is swapped", query="queue", kind="gauge"),
    _same("cpu_cache_usage_perc", "0: no KV is kept on the host", query="kv", kind="gauge"),
    _same(
        "engine_sleep_state",
        "1 for awake: this engine never sleeps",
        "sleep_state",
        query="runs",
        kind="gauge",
    ),
    _same(
        "request_success_total",
        "as iterscope_requests_ended_total, in vLLM's words",
        "finished_reason",
        query="departures",
    ),
    _same(
        "num_preemptions_total",
        "as iterscope_preemptions_total, over all causes",
        query="preemptions",
    ),
    _same(
        "prompt_tokens_by_source_total",
        "prompt tokens of ended sequences: computed here, or a hit of the prefix cache",
        "source",
        query="prefix_cache",
    ),
    _same(
        "prompt_tokens_cached_total", "as iterscope_prefix_cache_hits_total", query="prefix_cache"
    ),
    _same(
        "external_prefix_cache_queries_total", "0: there is no external cache", query="prefix_cache"
    ),
    _same("external_prefix_cache_hits_total", "0: as above", query="prefix_cache"),
    _same("mm_cache_queries_total", "0: prompts are text", query="prefix_cache"),
    _same("mm_cache_hits_total", "0: as above", query="prefix_cache"),
)

ZERO = (
    "num_requests_swapped",
    "cpu_cache_usage_perc",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "mm_cache_queries_total",
    "mm_cache_hits_total",
)


def vllm_values(ours: Mapping[str, Values], admission_stop: str) -> dict[str, Values]:
    """Return vLLM's figures, made of ours; `admission_stop` is the newest step's."""

    def number(name: str, *labels: str) -> float:
        value = ours[name][labels]
        assert isinstance(value, int | float)
        return value

    waiting = number("iterscope_requests", "waiting")
    deferred = waiting if admission_stop in DEFERRED else 0
    asked = number("iterscope_prefix_cache_queries_total")
    hits = number("iterscope_prefix_cache_hits_total")
    preemptions = ours["iterscope_preemptions_total"]
    values: dict[str, dict[LabelValues, float]] = {
        "num_requests_running": {(): number("iterscope_requests", "running")},
        "num_requests_waiting": {(): waiting},
        "num_requests_waiting_by_reason": {
            ("capacity",): waiting - deferred,
            ("deferred",): deferred,
        },
        "engine_sleep_state": {("awake",): 1, ("weights_offloaded",): 0, ("discard_all",): 0},
        "request_success_total": {
            (reason,): number("iterscope_requests_ended_total", finish)
            for finish, reason in REASONS.items()
        },
        "num_preemptions_total": {
            (): sum(number("iterscope_preemptions_total", *labels) for labels in preemptions)
        },
        "prompt_tokens_by_source_total": {
            ("local_compute",): asked - hits,
            ("local_cache_hit",): hits,
            ("external_kv_transfer",): 0,
        },
        "prompt_tokens_cached_total": {(): hits},
        **{name: {(): 0} for name in ZERO},
    }
    return {f"vllm:{name}": dict(of) for name, of in values.items()}
