"""What servers look like to Prometheus, minute by minute: healthy, sick in one way, and nearly so.

Owns a healthy server's series and, for each alert, a fault as an operator would see it in figures,
with the sentence that is to be told; tests/test_alerts.py plays them to promtool. Written without a
look at the alerts' expressions: a rate is so many a minute, a level is what it is. `None` is a
series that has gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Value = float | None
Values = Mapping[str, Value | tuple[float, ...]]
"""By series: a counter's growth a minute, a gauge's level, or its levels one after the other."""

HEALTHY: Mapping[str, float] = {
    "up": 1,
    "iterscope_start_time_seconds": 1_790_000_000,
    "iterscope_engine_up": 1,
    "iterscope_engine_starts_total": 0,  # grows by nothing: it is 1 from the start
    "iterscope_engine_stalled_seconds": 0,
    "iterscope_faults_total": 0,
    "iterscope_requests_accepted_total": 600,
    'iterscope_requests_ended_total{finish="stop"}': 400,
    'iterscope_requests_ended_total{finish="length"}': 172,
    'iterscope_requests_ended_total{finish="cancelled"}': 28,
    'iterscope_requests_ended_total{finish="error"}': 0,
    'iterscope_requests_rejected_total{reason="queue_full"}': 0,
    'iterscope_requests_rejected_total{reason="tenant_limit"}': 6,
    'iterscope_requests_rejected_total{reason="infeasible"}': 3,
    'iterscope_requests{state="running"}': 40,
    'iterscope_requests{state="waiting"}': 2,
    "iterscope_overtaken_wait_seconds": 0,
    'iterscope_waiting_seconds_total{reason="seqs"}': 100,
    'iterscope_waiting_seconds_total{reason="kv"}': 6,
    "iterscope_kv_usage_ratio": 0.7,
    'iterscope_preemptions_total{cause="kv"}': 1,
    'iterscope_preemptions_total{cause="policy"}': 0,
    "iterscope_preempted_tokens_total": 200,
    'iterscope_scheduled_tokens_total{kind="prefill"}': 60_000,
    'iterscope_scheduled_tokens_total{kind="decode"}': 60_000,
    'iterscope_scheduled_tokens_total{kind="padding"}': 9_000,
    'iterscope_scheduled_tokens_total{kind="idle"}': 0,
    'iterscope_graph_steps_total{outcome="hit"}': 2_900,
    'iterscope_graph_steps_total{outcome="miss"}': 60,
    'iterscope_step_part_seconds_total{part="plan"}': 0.6,
    'iterscope_step_part_seconds_total{part="launch"}': 1,
    'iterscope_step_part_seconds_total{part="wait"}': 45,
    'iterscope_step_part_seconds_total{part="commit"}': 0.5,
    'iterscope_step_part_seconds_total{part="gap"}': 0.9,
    "iterscope_output_stalls_total": 0.1,
    "iterscope_output_stall_seconds_total": 0.1,
    'iterscope_cause_seconds_total{cause="own_decode"}': 1_999.9,
    'iterscope_cause_seconds_total{cause="client_stall"}': 0.1,
    'iterscope_telemetry_lost_total{reader="engine"}': 0,
    'iterscope_telemetry_lost_total{reader="history"}': 0,
    'iterscope_telemetry_lost_total{reader="stream"}': 5,
    "iterscope_history_degraded": 0,
    "iterscope_history_lost_total": 0,
    "iterscope_history_lag_seconds": 0.3,
    'iterscope_slo_requests_total{class="default",outcome="met"}': 598.2,
    'iterscope_slo_requests_total{class="default",outcome="missed"}': 1.8,
    'iterscope_slo_requests_total{class="default",outcome="dropped"}': 0,
}
"""A server that is used well: ten requests a second, the device busy most of the time."""

IDLE: Mapping[str, float] = {
    name: 0.0 if "_total" in name or name.startswith("iterscope_requests{") else level
    for name, level in HEALTHY.items()
} | {"iterscope_kv_usage_ratio": 0.0}
"""The same server when nobody asks for anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong with one of two engines, for some minutes, and is over then."""

    alert: str
    says: str
    """The alert's sentence, as people get it."""
    sick: Values
    near: tuple[Values, ...] = ()
    """Nearly so: at 90 % of the limit, or with what makes it a fault missing."""
    minutes: int = 22
    near_minutes: int | None = None
    clears_within: int = 12
    """Minutes after its end."""
    every: int = 1
    """Minutes between samples."""
    before: int = 15
    labels: Mapping[str, str]
    other: Values | None = None
    """What the other engine does meanwhile, if it is not healthy."""
    also: tuple[str, ...] = ()
    """Alerts that rightly fire too."""


INSTANCE = {"job": "iterscope", "instance": "a:8000"}
ENGINE = INSTANCE | {"model_name": "llama", "engine": "0"}
PAGE = {"severity": "page"}
TICKET = {"severity": "ticket"}
