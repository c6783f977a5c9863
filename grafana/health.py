"""The dashboard of telemetry's own health: whether the other dashboards can be believed.

Owns that board's panels; generate.py writes it. Must never take silence for health: what should be
there and is not shows as no data.
"""

from grafana.board import Board, Row
from grafana.expressions import rate_by
from grafana.panel import BAD, FAIR, GOOD, Panel, Query

NOW = Row(
    title="Can the record be believed?",
    height=4,
    panels=(
        Panel(
            title="Records lost",
            kind="number",
            width=4,
            queries=(Query(expr="sum(increase(iterscope_telemetry_lost_total{$only}[$__range]))"),),
            why="In the time shown.",
            limits=((1, BAD),),
            runbook="IterscopeTelemetryLoss",
        ),
        Panel(
            title="Missing in the history",
            kind="number",
            width=4,
            queries=(Query(expr="sum(iterscope_history_lost_total{$only})"),),
            limits=((1, BAD),),
            runbook="IterscopeHistoryNotWritten",
        ),
        Panel(
            title="Is history kept?",
            kind="number",
            width=4,
            queries=(Query(expr="max(iterscope_history_degraded{$only})"),),
            words=(("0", "as asked", GOOD), ("1", "NO", BAD)),
            runbook="IterscopeHistoryNotWritten",
        ),
        Panel(
            title="Not written since",
            kind="number",
            unit="s",
            width=4,
            queries=(Query(expr="max(iterscope_history_lag_seconds{$only})"),),
            limits=((5, FAIR), (60, BAD)),
            runbook="IterscopeHistoryNotWritten",
        ),
        Panel(
            title="Faults",
            kind="number",
            width=4,
            queries=(Query(expr="sum(increase(iterscope_faults_total{$only}[$__range]))"),),
            why="In the time shown.",
            limits=((1, BAD),),
            runbook="IterscopeFaults",
        ),
        Panel(
            title="Server up since",
            kind="number",
            unit="s",
            width=4,
            queries=(Query(expr="time() - max(iterscope_start_time_seconds{$only})"),),
            runbook="IterscopeServerRestarting",
        ),
    ),
)

STREAM = Row(
    title="What is published, and who reads it?",
    panels=(
        Panel(
            title="Records a second",
            kind="stacked",
            unit="cps",
            queries=rate_by("iterscope_telemetry_published_total", "kind"),
        ),
        Panel(
            title="Who is too slow?",
            unit="cps",
            queries=rate_by("iterscope_telemetry_lost_total", "reader"),
            why="Records that a reader lost, a second; `engine` drops its own when the server is"
            " slow.",
            runbook="IterscopeTelemetryLoss",
        ),
        Panel(
            title="Readers",
            kind="stacked",
            queries=(
                Query(
                    expr="sum by (reader) (iterscope_telemetry_readers{$only})",
                    legend="{{reader}}",
                ),
            ),
        ),
    ),
)

HISTORY = Row(
    title="How is the history?",
    panels=(
        Panel(
            title="Bytes",
            unit="bytes",
            width=6,
            queries=(Query(expr="sum(iterscope_history_bytes{$only})", legend="on disk"),),
        ),
        Panel(
            title="Rows",
            width=6,
            queries=(Query(expr="sum(iterscope_history_rows{$only})", legend="rows"),),
        ),
        Panel(
            title="Segments",
            width=6,
            queries=(Query(expr="sum(iterscope_history_segments{$only})", legend="segments"),),
            why="Files; minutes are merged to hours, hours to days.",
        ),
        Panel(
            title="How far behind?",
            width=6,
            unit="s",
            queries=(
                Query(expr="max(iterscope_history_lag_seconds{$only})", legend="oldest unwritten"),
                Query(
                    expr="max(iterscope_history_rotation_age_seconds{$only})",
                    legend="since the last rotation",
                ),
            ),
            runbook="IterscopeHistoryNotWritten",
        ),
    ),
)

COST = Row(
    title="What does it cost?",
    panels=(
        Panel(
            title="Counting metrics, a step",
            unit="s",
            queries=(
                Query(
                    expr="sum(rate(iterscope_metrics_fold_seconds_total{$only}[$window]))"
                    " / (sum(rate(iterscope_iterations_total{$only}[$window])) > 0)",
                    legend="CPU an iteration",
                ),
            ),
        ),
        Panel(
            title="Scraping",
            unit="s",
            queries=(
                Query(
                    expr='scrape_duration_seconds{job="iterscope",instance=~"$instance"}',
                    legend="{{instance}}",
                ),
            ),
            why="How long Prometheus waited for /metrics.",
            runbook="IterscopeNotScraped",
        ),
        Panel(
            title="Series",
            queries=(
                Query(
                    expr='scrape_samples_scraped{job="iterscope",instance=~"$instance"}',
                    legend="{{instance}}",
                ),
            ),
            why="Bounded: tenants beyond the largest are one series.",
        ),
        Panel(
            title="Engines started",
            queries=(Query(expr="iterscope_engine_starts_total{$only}", legend="{{instance}}"),),
            runbook="IterscopeEngineRestarting",
        ),
        Panel(
            title="Work is there and nothing moves, for how long?",
            unit="s",
            queries=(Query(expr="iterscope_engine_stalled_seconds{$only}", legend="{{instance}}"),),
            runbook="IterscopeEngineStalled",
        ),
        Panel(
            title="OpenTelemetry exports",
            unit="cps",
            queries=rate_by("iterscope_otlp_exports_total", "outcome"),
        ),
    ),
)

BOARD = Board(
    uid="iterscope-health",
    title="Telemetry health",
    about="Whether what the other dashboards show can be believed, and what it costs.",
    rows=(NOW, STREAM, HISTORY, COST),
)
