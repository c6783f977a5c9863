"""FAULTS: one for each alert, and what is nearly one, in figures a minute.

Owns the figures and the sentences; tests/alert_cases.py has the healthy server that they depart
from, tests/test_alerts.py plays them. Each is arithmetic that a reader can do: 200 of 600 is 33 %.
"""

from tests.alert_cases import ENGINE, HEALTHY, INSTANCE, PAGE, TICKET, Fault

_GONE = dict.fromkeys(HEALTHY)
_ENDED = 'iterscope_requests_ended_total{finish="%s"}'
_REFUSED = 'iterscope_requests_rejected_total{reason="%s"}'
_PART = 'iterscope_step_part_seconds_total{part="%s"}'
_LOST = 'iterscope_telemetry_lost_total{reader="%s"}'
_TOKENS = 'iterscope_scheduled_tokens_total{kind="%s"}'
_SLO = 'iterscope_slo_requests_total{class="default",outcome="%s"}'
_GRAPH = 'iterscope_graph_steps_total{outcome="%s"}'
_WAITING = 'iterscope_requests{state="waiting"}'
_FOR_KV = 'iterscope_waiting_seconds_total{reason="kv"}'
_DAYS = 24 * 60
_SLO_LABELS = {"job": "iterscope", "model_name": "llama", "class": "default"}


def _late(percent: float) -> dict[str, float]:
    """Of 600 requests judged a minute so many percent were late, one in ten of them dropped."""
    return {
        _SLO % "met": 600 - 6 * percent,
        _SLO % "missed": 5.4 * percent,
        _SLO % "dropped": 0.6 * percent,
    }


def _host(wait: float, host: float) -> dict[str, float]:
    """Seconds a minute that steps waited for the device, and that the host took."""
    launch = {_PART % "launch": 1.0, _PART % "wait": wait - 1}
    return launch | {_PART % part: host / 3 for part in ("plan", "commit", "gap")}


_SERVING = (
    Fault(
        alert="IterscopeSloBurn",
        labels=_SLO_LABELS | PAGE | {"window": "1h"},
        says="30% of the requests to llama (objective default) missed their objective in the last "
        "1h, and 5m go on like it: 1% may.",
        sick=_late(30),
        near=(_late(12.96),),
        minutes=60,
        before=8 * 60,
        every=5,
    ),
    Fault(
        alert="IterscopeSloBurn",
        labels=_SLO_LABELS | PAGE | {"window": "6h"},
        says="7% of the requests to llama (objective default) missed their objective in the last "
        "6h, and 30m go on like it: 1% may.",
        sick=_late(7),
        near=(_late(5.4),),
        minutes=6 * 60,
        before=3 * _DAYS,
        clears_within=45,
        every=15,
    ),
    Fault(
        alert="IterscopeSloBurn",
        labels=_SLO_LABELS | TICKET | {"window": "3d"},
        says="1.3% of the requests to llama (objective default) missed their objective in the last "
        "3d, and 6h go on like it: 1% may.",
        sick=_late(1.3),
        near=(_late(0.9),),
        minutes=3 * _DAYS,
        before=60,
        clears_within=6 * 60,
        every=30,
    ),
    Fault(
        alert="IterscopeServerDown",
        labels=INSTANCE | PAGE,
        says="a:8000 does not answer Prometheus' scrapes.",
        sick=_GONE | {"up": 0},
        near=(_GONE | {"up": 0},),
        near_minutes=1,
    ),
    Fault(
        alert="IterscopeNotScraped",
        labels={"job": "iterscope"} | PAGE,
        says="Prometheus scrapes no server under the job iterscope: every other alert is blind.",
        sick=_GONE,
        other=_GONE,
        near=(_GONE,),
        near_minutes=4,
    ),
    Fault(
        alert="IterscopeEngineDown",
        labels=ENGINE | PAGE,
        says="The server a:8000 answers, but has had no ready engine for llama for 5 minutes.",
        sick={"iterscope_engine_up": 0},
        near=({"iterscope_engine_up": 0},),
        near_minutes=4,
    ),
    Fault(
        alert="IterscopeEngineStalled",
        labels=ENGINE | PAGE,
        says="The engine of a:8000 has work and has not moved for 42s.",
        sick={"iterscope_engine_stalled_seconds": 42},
        near=(
            {"iterscope_engine_stalled_seconds": 13.5},
            {"iterscope_engine_stalled_seconds": 300, "iterscope_engine_up": 0},  # it is loaded
        ),
        minutes=1,
    ),
    Fault(
        alert="IterscopeEngineRestarting",
        labels=ENGINE | PAGE,
        says="The engine of a:8000 was started again 2 times within 30 minutes; each time every "
        "request in flight was lost.",
        sick={"iterscope_engine_starts_total": 1, "iterscope_faults_total": 1},
        also=("IterscopeFaults",),
        minutes=2,
        near=({"iterscope_engine_starts_total": 1},),
        near_minutes=1,
        before=40,
        clears_within=40,
    ),
    Fault(
        alert="IterscopeServerRestarting",
        labels=ENGINE | PAGE,
        says="The server a:8000 was started 3 times within 30 minutes.",
        sick={"iterscope_start_time_seconds": (1_790_000_600.0, 1_790_000_700.0, 1_790_000_800.0)},
        minutes=3,
        near=({"iterscope_start_time_seconds": (1_790_000_600.0,)},),
        near_minutes=1,
        clears_within=40,
    ),
    Fault(
        alert="IterscopeRequestErrors",
        labels=ENGINE | PAGE,
        says="25% of the requests that ended on a:8000 ended with an error.",
        sick={_ENDED % "stop": 278, _ENDED % "length": 172 - 28, _ENDED % "error": 150},
        near=(
            {_ENDED % "stop": 373, _ENDED % "error": 27},
            # Half of them, but that is two in five minutes.
            {_ENDED % finish: 0 for finish in ("stop", "length")}
            | {_ENDED % "cancelled": 0.4, _ENDED % "error": 0.4}
            | {"iterscope_requests_accepted_total": 0.8, _REFUSED % "tenant_limit": 0},
        ),
    ),
    Fault(
        alert="IterscopeRequestsRefused",
        labels=ENGINE | TICKET,
        says="a:8000 refuses 25% of what it is asked, since its queue or a tenant's share of it is "
        "full.",
        sick={_REFUSED % "queue_full": 194},
        near=({_REFUSED % "queue_full": 22.27}, {_REFUSED % "infeasible": 600}),
    ),
)

_SCHEDULING = (
    Fault(
        alert="IterscopeQueueGrowing",
        labels=ENGINE | TICKET,
        says="33.33% of what arrived at a:8000 in 10 minutes has not ended, and the queue is never "
        "empty: arrivals outrun completions.",
        sick={_ENDED % "stop": 200, _WAITING: 300},
        near=(
            {_ENDED % "stop": 346, _WAITING: 300},
            {_ENDED % "stop": 200, _WAITING: 4.5},
            {"iterscope_requests_accepted_total": 0, _REFUSED % "tenant_limit": 0, _WAITING: 300},
        ),
    ),
    Fault(
        alert="IterscopeStarvation",
        labels=ENGINE | TICKET,
        says="A request on a:8000 has waited 1m 35s while later ones were admitted.",
        sick={"iterscope_overtaken_wait_seconds": 95},
        near=({"iterscope_overtaken_wait_seconds": 27},),
    ),
    Fault(
        alert="IterscopeKvPressure",
        labels=ENGINE | TICKET,
        says="97% of the KV blocks of a:8000 are held, and requests wait for more.",
        sick={"iterscope_kv_usage_ratio": 0.97, _FOR_KV: 240},
        near=(
            {"iterscope_kv_usage_ratio": 0.81, _FOR_KV: 240},
            {"iterscope_kv_usage_ratio": 1.0, _FOR_KV: 27},
        ),
    ),
    Fault(
        alert="IterscopePreemptionThrash",
        labels=ENGINE | TICKET,
        says="a:8000 throws away 25% of the tokens it computes, by preemption.",
        sick={
            'iterscope_preemptions_total{cause="kv"}': 20,
            "iterscope_preempted_tokens_total": 30_000,
        },
        near=(
            {"iterscope_preempted_tokens_total": 10_800},
            {
                'iterscope_preemptions_total{cause="kv"}': 0.4,
                "iterscope_preempted_tokens_total": 30_000,
            },
        ),
    ),
    Fault(
        alert="IterscopePaddingWaste",
        labels=ENGINE | TICKET,
        says="33.33% of the rows that a:8000 computes are padding, or idle rows of a fixed batch.",
        sick={_TOKENS % "padding": 50_000, _TOKENS % "idle": 10_000},
        near=(
            {_TOKENS % "padding": 34_838},
            {_TOKENS % "padding": 200_000} | _host(wait=5, host=0.3),
        ),
    ),
    Fault(
        alert="IterscopeGraphMisses",
        labels=ENGINE | TICKET,
        says="20% of the decode steps of a:8000 find no captured graph and run eagerly.",
        sick={_GRAPH % "hit": 2_400, _GRAPH % "miss": 600},
        near=(
            {_GRAPH % "hit": 2_865, _GRAPH % "miss": 135},
            {_GRAPH % "hit": 240, _GRAPH % "miss": 60} | _host(wait=5, host=0.3),
        ),
    ),
    Fault(
        alert="IterscopeSchedulerCpu",
        labels=ENGINE | TICKET,
        says="Planning, committing and the gap between steps take 40% of the step on a:8000: the "
        "device waits for the host.",
        sick=_host(wait=30, host=20),
        near=(_host(wait=41, host=9), _host(wait=16.2, host=10.8)),
    ),
    Fault(
        alert="IterscopeSlowClients",
        labels=ENGINE | TICKET,
        says="40% of the time of requests on a:8000 is spent on clients that do not read.",
        sick={"iterscope_output_stall_seconds_total": 800, "iterscope_output_stalls_total": 20},
        near=(
            {"iterscope_output_stall_seconds_total": 180, "iterscope_output_stalls_total": 20},
            {
                "iterscope_output_stall_seconds_total": 800,
                "iterscope_output_stalls_total": 0.13,  # two in 15 minutes
            },
        ),
        before=30,
        clears_within=20,
    ),
)

_RECORD = (
    Fault(
        alert="IterscopeTelemetryLoss",
        labels=ENGINE | TICKET,
        says="Records that a:8000 lost within 10 minutes: 100. Explanations of that time have "
        "holes.",
        sick={_LOST % "engine": 10},
        near=({_LOST % "stream": 500},),
    ),
    Fault(
        alert="IterscopeHistoryNotWritten",
        labels=ENGINE | TICKET,
        says="a:8000 does not write its history: it is degraded, loses records, or is more than a "
        "minute behind.",
        sick={"iterscope_history_degraded": 1},
        near=({"iterscope_history_lag_seconds": 54},),
    ),
    Fault(
        alert="IterscopeHistoryNotWritten",
        labels=ENGINE | TICKET,
        says="a:8000 does not write its history: it is degraded, loses records, or is more than a "
        "minute behind.",
        sick={"iterscope_history_lag_seconds": 400, "iterscope_history_lost_total": 7},
    ),
    Fault(
        alert="IterscopeFaults",
        labels=ENGINE | TICKET,
        says="Faults on record of a:8000 within 30 minutes: 1.",
        sick={"iterscope_faults_total": 1},
        minutes=1,
        near=({_ENDED % "cancelled": 28, _REFUSED % "infeasible": 500},),
        clears_within=40,
    ),
)

FAULTS = (*_SERVING, *_SCHEDULING, *_RECORD)
