"""The first dashboard to look at: whether it serves, what clients get, what is in the way.

Owns that board's panels; generate.py writes it. Each row goes on in a board of its own. Must never
hold a panel that does not help to decide where to look next.
"""

from grafana.board import Board, Row
from grafana.expressions import mean, quantiles, rate, rate_by
from grafana.panel import BAD, FAIR, GOOD, Panel, Query

SERVING = Row(
    title="Is it serving?",
    height=4,
    panels=(
        Panel(
            title="Every engine up?",
            kind="number",
            width=3,
            queries=(Query(expr="min(iterscope_engine_up{$only})"),),
            words=(("0", "DOWN", BAD), ("1", "up", GOOD)),
            query="faults",
            runbook="IterscopeEngineDown",
        ),
        Panel(
            title="Alerts firing",
            kind="number",
            width=3,
            queries=(
                Query(
                    expr='count(ALERTS{alertname=~"Iterscope.*",alertstate="firing"}) or vector(0)'
                ),
            ),
            why="Alerts of Iterscope's rules; each names its runbook.",
            limits=((1, BAD),),
        ),
        Panel(
            title="Running",
            kind="number",
            width=3,
            queries=(Query(expr='sum(iterscope_requests{state="running",$only})'),),
        ),
        Panel(
            title="Waiting",
            kind="number",
            width=3,
            queries=(Query(expr='sum(iterscope_requests{state="waiting",$only})'),),
            limits=((1, FAIR), (100, BAD)),
            runbook="IterscopeQueueGrowing",
        ),
        Panel(
            title="Oldest waits since",
            kind="number",
            unit="s",
            width=3,
            queries=(Query(expr="max(iterscope_queue_oldest_seconds{$only})"),),
            limits=((5, FAIR), (30, BAD)),
            runbook="IterscopeStarvation",
        ),
        Panel(
            title="KV cache used",
            kind="number",
            unit="percentunit",
            width=3,
            queries=(Query(expr="max(iterscope_kv_usage_ratio{$only})"),),
            limits=((0.8, FAIR), (0.95, BAD)),
            runbook="IterscopeKvPressure",
        ),
        Panel(
            title="Objectives met",
            kind="number",
            unit="percentunit",
            width=3,
            queries=(
                Query(
                    expr='sum(rate(iterscope_slo_requests_total{outcome="met",$only}[5m]))'
                    " / (sum(rate(iterscope_slo_requests_total{$only}[5m])) > 0)"
                ),
            ),
            why="Of the last five minutes.",
            below=BAD,
            limits=((0.95, FAIR), (0.99, GOOD)),
            runbook="IterscopeSloBurn",
        ),
        Panel(
            title="Device busy",
            kind="number",
            unit="percentunit",
            width=3,
            queries=(Query(expr="avg(iterscope_device_busy_ratio{$only})"),),
        ),
    ),
)

CLIENTS = Row(
    title="What do clients get?",
    panels=(
        Panel(
            title="How long until the first byte?",
            unit="s",
            queries=quantiles("iterscope_time_to_first_token_seconds", exemplars=True),
            query="slowest_requests",
        ),
        Panel(
            title="How long between tokens?",
            unit="s",
            queries=quantiles("iterscope_inter_token_latency_seconds"),
            query="longest_gaps",
        ),
        Panel(
            title="How do requests end?",
            kind="stacked",
            unit="reqps",
            queries=(
                *rate_by("iterscope_requests_ended_total", "finish"),
                rate("iterscope_requests_rejected_total", "rejected"),
            ),
            why="Errors and rejections should be a thin line on top, or none.",
            runbook="IterscopeRequestErrors",
        ),
    ),
)

ENGINE = Row(
    title="What does the engine do?",
    panels=(
        Panel(
            title="How many tokens a second?",
            unit="tokens/s",
            queries=(
                rate("iterscope_generation_tokens_total", "output"),
                rate("iterscope_prompt_tokens_total", "prompt"),
            ),
        ),
        Panel(
            title="How full are its batches?",
            queries=(
                mean("iterscope_batch_requests", "rows a step"),
                Query(expr='sum(iterscope_requests{state="running",$only})', legend="running"),
                Query(expr='sum(iterscope_requests{state="waiting",$only})', legend="waiting"),
            ),
            why="Rows well under what runs: sequences are passed over. A queue while rows are few:"
            " something else than the device is the limit.",
        ),
        Panel(
            title="Where does its time go?",
            kind="stacked",
            unit="percentunit",
            queries=rate_by("iterscope_step_part_seconds_total", "part"),
            why="Of each second of the wall clock, summed over engines; what is missing to one an"
            " engine is idle time. `wait` is the device.",
            runbook="IterscopeSchedulerCpu",
        ),
    ),
)

IN_THE_WAY = Row(
    title="What is in the way?",
    panels=(
        Panel(
            title="What do requests wait for?",
            kind="stacked",
            queries=rate_by("iterscope_waiting_seconds_total", "reason"),
            why="The mean number of sequences that wait, by the check that keeps the queue's head"
            " out.",
        ),
        Panel(
            title="Who is thrown out?",
            kind="stacked",
            unit="cps",
            queries=rate_by("iterscope_preemptions_total", "cause"),
            runbook="IterscopePreemptionThrash",
        ),
        Panel(
            title="Who is refused?",
            kind="stacked",
            unit="reqps",
            queries=(
                *rate_by("iterscope_requests_rejected_total", "reason"),
                rate("iterscope_requests_invalid_total", "malformed"),
            ),
            runbook="IterscopeRequestsRefused",
        ),
    ),
)

RUNNING = Row(
    title="What is running?",
    height=6,
    panels=(
        Panel(
            title="Engines and their settings",
            kind="table",
            width=24,
            queries=(Query(expr="iterscope_info{$only}", legend="is"),),
        ),
    ),
)

BOARD = Board(
    uid="iterscope-overview",
    title="Overview",
    about="Whether Iterscope serves, what clients get, and what is in the way.",
    rows=(SERVING, CLIENTS, ENGINE, IN_THE_WAY, RUNNING),
)
