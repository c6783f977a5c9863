"""RECORDINGS: the figures that alerts judge, each under a name, so that a graph can show them too.

Owns their PromQL; the alerts' tables name them, alert_files.py writes them for Prometheus and puts
them in place of their names for Grafana. A ratio has no element while nothing happened: its divisor
is filtered, never zero. Labels stay those of the instance and its engine, but for the objectives,
which are the model's over all instances.
"""

import types
from collections.abc import Mapping

from grafana.alert_spec import Recording

OVERLOAD = "queue_full|queue_tokens|queue_bytes|tenant_limit"
"""Reasons of refusals that more capacity would have served."""
SLO_WINDOWS = ("5m", "30m", "1h", "6h", "3d")
SLO_COUNTED = ("1h", "6h", "3d")
SLO_LABELS = "job, model_name, class"


def _rate(metric: str, label: str, window: str) -> str:
    return f"sum without ({label}) (rate({metric}[{window}]))"


def _slo_ratio(window: str) -> Recording:
    return Recording(
        name=f"iterscope:slo_missed:ratio{window}",
        expr=f"sum by ({SLO_LABELS}) (rate({_LATE}[{window}]))\n"
        f"/ (sum by ({SLO_LABELS}) (rate(iterscope_slo_requests_total[{window}])) > 0)",
    )


def _slo_count(window: str) -> Recording:
    return Recording(
        name=f"iterscope:slo_missed:increase{window}",
        expr=f"sum by ({SLO_LABELS}) (increase({_LATE}[{window}]))",
    )


_LATE = 'iterscope_slo_requests_total{outcome!="met"}'
_ACCEPTED = "rate(iterscope_requests_accepted_total[{window}])"
_REFUSED = _rate(f'iterscope_requests_rejected_total{{reason=~"{OVERLOAD}"}}', "reason", "5m")
_ENDED = _rate("iterscope_requests_ended_total", "finish", "{window}")
_USEFUL = 'iterscope_scheduled_tokens_total{kind=~"prefill|decode"}'
_WASTED = 'iterscope_scheduled_tokens_total{kind=~"padding|idle"}'
_HOST = 'iterscope_step_part_seconds_total{part=~"plan|commit|gap"}'

RECORDINGS = (
    *(_slo_ratio(window) for window in SLO_WINDOWS),
    *(_slo_count(window) for window in SLO_COUNTED),
    Recording(
        name="iterscope:errors:ratio5m",
        expr=_rate('iterscope_requests_ended_total{finish="error"}', "finish", "5m")
        + f"\n/ ({_ENDED.format(window='5m')} > 0)",
    ),
    Recording(
        name="iterscope:errors:increase5m",
        expr='sum without (finish) (increase(iterscope_requests_ended_total{finish="error"}[5m]))',
    ),
    Recording(
        name="iterscope:refused:ratio5m",
        expr=f"{_REFUSED}\n/ ({_REFUSED}\n  + {_ACCEPTED.format(window='5m')} > 0)",
    ),
    Recording(
        name="iterscope:unfinished:ratio10m",
        expr=f"({_ACCEPTED.format(window='10m')}\n  - {_ENDED.format(window='10m')})\n"
        f"/ ({_ACCEPTED.format(window='10m')} > 0)",
    ),
    Recording(
        name="iterscope:waiting:min5m",
        expr='sum without (state) (\n  min_over_time(iterscope_requests{state="waiting"}[5m]))',
    ),
    Recording(
        name="iterscope:waiting_for_kv:mean5m",
        expr=_rate('iterscope_waiting_seconds_total{reason="kv"}', "reason", "5m"),
    ),
    Recording(name="iterscope:kv_usage:mean5m", expr="avg_over_time(iterscope_kv_usage_ratio[5m])"),
    Recording(
        name="iterscope:preempted_tokens:ratio5m",
        expr=f"rate(iterscope_preempted_tokens_total[5m])\n/ ({_rate(_USEFUL, 'kind', '5m')} > 0)",
    ),
    Recording(
        name="iterscope:preemptions:increase5m",
        expr="sum without (cause) (increase(iterscope_preemptions_total[5m]))",
    ),
    Recording(
        name="iterscope:padding:ratio5m",
        expr=f"{_rate(_WASTED, 'kind', '5m')}\n"
        f"/ ({_rate('iterscope_scheduled_tokens_total', 'kind', '5m')} > 0)",
    ),
    Recording(
        name="iterscope:graph_misses:ratio5m",
        expr=_rate('iterscope_graph_steps_total{outcome="miss"}', "outcome", "5m")
        + f"\n/ ({_rate('iterscope_graph_steps_total', 'outcome', '5m')} > 0)",
    ),
    Recording(
        name="iterscope:graph_hits:total",
        expr='sum without (outcome) (iterscope_graph_steps_total{outcome="hit"})',
    ),
    Recording(
        name="iterscope:host_time:ratio5m",
        expr=f"{_rate(_HOST, 'part', '5m')}\n"
        f"/ ({_rate('iterscope_step_part_seconds_total', 'part', '5m')} > 0)",
    ),
    Recording(
        name="iterscope:busy:ratio5m",
        expr=_rate("iterscope_step_part_seconds_total", "part", "5m"),
    ),
    Recording(
        name="iterscope:client_stall:ratio15m",
        expr="rate(iterscope_output_stall_seconds_total[15m])\n"
        f"/ ({_rate('iterscope_cause_seconds_total', 'cause', '15m')} > 0)",
    ),
    Recording(
        name="iterscope:telemetry_lost:increase10m",
        expr="sum without (reader) (\n"
        '  increase(iterscope_telemetry_lost_total{reader!~"stream|post-mortem"}[10m]))',
    ),
    Recording(
        name="iterscope:history_unwritten:ways",
        expr="iterscope_history_degraded\n"
        "+ (increase(iterscope_history_lost_total[10m]) > bool 0)\n"
        "+ (iterscope_history_lag_seconds > bool 60)",
    ),
)

BY_NAME: Mapping[str, Recording] = types.MappingProxyType({one.name: one for one in RECORDINGS})
