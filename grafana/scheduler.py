"""The dashboard of the scheduler and its batches: control, admission, shapes, and who pays.

Owns that board's panels; generate.py writes it. Rows follow the first, third and fifth of the six
questions that Iterscope answers. Must never mix what was planned with what was computed.
"""

from grafana.board import Board, Row
from grafana.expressions import cells, mean, quantiles, rate, rate_by, share
from grafana.panel import BAD, FAIR, Panel, Query

STEPS = "iterscope_iterations_total{$only}"
PARTS = "iterscope_step_part_seconds_total"

CONTROL = Row(
    title="How often does the scheduler regain control?",
    panels=(
        Panel(
            title="Iterations a second",
            unit="cps",
            queries=(rate("iterscope_iterations_total", "iterations"),),
            query="step_intervals",
        ),
        Panel(
            title="What is an average step made of?",
            kind="stacked",
            unit="s",
            queries=(
                Query(
                    expr=f"sum by (part) (rate({PARTS}{{$only}}[$window]))"
                    f" / on () group_left () (sum(rate({STEPS}[$window])) > 0)",
                    legend="{{part}}",
                ),
            ),
            why="The parts sum to the wall time of a step.",
        ),
        Panel(
            title="How much of the step is the host's?",
            unit="percentunit",
            queries=(
                share(f'{PARTS}{{part=~"plan|commit|gap",$only}}', f"{PARTS}{{$only}}", "host"),
                Query(expr="avg(iterscope_device_busy_ratio{$only})", legend="device busy"),
            ),
            why="Planning, committing and the gap between steps. The scheduler's budget is a few"
            " percent of a step.",
            limits=((0.2, BAD),),
            high=1.0,
            runbook="IterscopeSchedulerCpu",
        ),
    ),
)

ADMISSION = Row(
    title="What keeps requests out?",
    panels=(
        Panel(
            title="What ended admission?",
            kind="stacked",
            unit="cps",
            queries=rate_by("iterscope_admission_stops_total", "reason"),
            why="Iterations by the check that refused the first in line.",
        ),
        Panel(
            title="What do requests wait for?",
            kind="stacked",
            queries=rate_by("iterscope_waiting_seconds_total", "reason"),
            why="The mean number of sequences that wait.",
        ),
        Panel(
            title="Do arrivals outrun completions?",
            unit="reqps",
            queries=(
                rate("iterscope_requests_accepted_total", "accepted"),
                rate("iterscope_requests_ended_total", "ended"),
            ),
            why="While the upper line is `accepted` the queue grows.",
            runbook="IterscopeQueueGrowing",
        ),
        Panel(
            title="How old is the oldest that waits?",
            unit="s",
            width=12,
            queries=(
                Query(expr="max(iterscope_queue_oldest_seconds{$only})", legend="oldest"),
                Query(expr="max(iterscope_overtaken_wait_seconds{$only})", legend="and overtaken"),
            ),
            why="A long queue alone is overload; being overtaken for long is starvation.",
            limits=((30, BAD),),
            runbook="IterscopeStarvation",
        ),
        Panel(
            title="What do neighbours cost?",
            kind="stacked",
            unit="percentunit",
            width=12,
            queries=rate_by("iterscope_neighbour_stall_seconds_total", "kind"),
            why="Request-seconds a second that requests spent on others' tokens in their batch.",
        ),
    ),
)

BATCH = Row(
    title="What is in the batch?",
    panels=(
        Panel(
            title="How many rows has a step?",
            kind="heatmap",
            queries=cells("iterscope_batch_requests"),
        ),
        Panel(
            title="How many tokens has a step?",
            kind="heatmap",
            queries=cells("iterscope_step_tokens"),
        ),
        Panel(
            title="How many rows on average?",
            queries=(
                mean("iterscope_batch_requests", "rows a step"),
                Query(expr='sum(iterscope_requests{state="running",$only})', legend="running"),
            ),
            why="The effective batch size; below what runs, sequences are passed over.",
        ),
        Panel(
            title="What is computed?",
            kind="stacked",
            unit="tokens/s",
            queries=rate_by("iterscope_scheduled_tokens_total", "kind"),
        ),
        Panel(
            title="How much context does a step read?",
            unit="tokens",
            queries=quantiles("iterscope_batch_context_tokens"),
        ),
        Panel(
            title="How long is its longest context?",
            unit="tokens",
            queries=quantiles("iterscope_batch_longest_context_tokens"),
        ),
    ),
)

SHAPES = Row(
    title="How does the device carry changing shapes?",
    panels=(
        Panel(
            title="How much is padding?",
            unit="percentunit",
            queries=(
                share(
                    'iterscope_scheduled_tokens_total{kind=~"padding|idle",$only}',
                    "iterscope_scheduled_tokens_total{$only}",
                    "padding and idle rows",
                ),
            ),
            limits=((0.25, FAIR),),
            high=1.0,
            runbook="IterscopePaddingWaste",
        ),
        Panel(
            title="Do decodes find a captured graph?",
            unit="percentunit",
            queries=(
                share(
                    'iterscope_graph_steps_total{outcome="miss",$only}',
                    "iterscope_graph_steps_total{$only}",
                    "misses",
                ),
            ),
            limits=((0.05, FAIR),),
            high=1.0,
            runbook="IterscopeGraphMisses",
        ),
        Panel(
            title="Which buckets are used?",
            kind="stacked",
            unit="cps",
            queries=rate_by("iterscope_steps_total", "bucket, graph"),
        ),
    ),
)

CAUSES = Row(
    title="Where does the time of requests go?",
    height=9,
    panels=(
        Panel(
            title="Causes of all requests that are over",
            kind="stacked",
            unit="s",
            width=24,
            queries=rate_by("iterscope_cause_seconds_total", "cause"),
            why="Request-seconds a second; every millisecond of a request has one cause.",
        ),
    ),
)

BOARD = Board(
    uid="iterscope-scheduler",
    title="Scheduler and batch",
    about="How often the scheduler decides, whom it lets in, and what it puts into a batch.",
    rows=(CONTROL, ADMISSION, BATCH, SHAPES, CAUSES),
)
