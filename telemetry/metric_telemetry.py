"""The metrics of the record itself: published, lost, kept, read, and what counting costs.

Owns their names, types, labels and words; metric_table.py makes the one table of it. Most values
are told by the parts that know them, at a scrape.
"""

from telemetry.metric_spec import MetricSpec

RECORDS = (
    MetricSpec(
        name="iterscope_telemetry_published_total",
        type="counter",
        help="Records published, by kind.",
        labels=("kind",),
        query="telemetry_loss",
    ),
    MetricSpec(
        name="iterscope_telemetry_lost_total",
        type="counter",
        help="Records that a reader was too slow for; engine: iterations it dropped itself.",
        labels=("reader",),
        query="telemetry_loss",
    ),
    MetricSpec(
        name="iterscope_telemetry_readers",
        type="gauge",
        help="Open readers of the record; stream: telemetry streams.",
        labels=("reader",),
        query="telemetry_loss",
    ),
    MetricSpec(
        name="iterscope_metrics_fold_seconds_total",
        type="counter",
        help="CPU time that counting these metrics took.",
        unit="s",
        query="telemetry_loss",
    ),
    MetricSpec(
        name="iterscope_otlp_exports_total",
        type="counter",
        help="Exports of metrics over OTLP, by how they went; 0 without --otlp-endpoint.",
        labels=("outcome",),
        query="telemetry_loss",
    ),
)

HISTORY = (
    MetricSpec(
        name="iterscope_history_degraded",
        type="gauge",
        help="1 when history should be kept and is not.",
        query="telemetry_loss",
    ),
    MetricSpec(
        name="iterscope_history_bytes",
        type="gauge",
        help="Size of the history's files.",
        unit="bytes",
        query="telemetry_loss",
    ),
    MetricSpec(
        name="iterscope_history_rows",
        type="gauge",
        help="Rows of all tables that the history holds.",
        query="telemetry_loss",
    ),
    MetricSpec(
        name="iterscope_history_segments",
        type="gauge",
        help="Closed segment files of the history.",
        query="telemetry_loss",
    ),
    MetricSpec(
        name="iterscope_history_lag_seconds",
        type="gauge",
        help="For how long a published record has not been written; 0 when all are.",
        unit="s",
        query="telemetry_loss",
    ),
    MetricSpec(
        name="iterscope_history_rotation_age_seconds",
        type="gauge",
        help="Time since the last rotation: the live file alone holds what came since.",
        unit="s",
        query="telemetry_loss",
    ),
    MetricSpec(
        name="iterscope_history_lost_total",
        type="counter",
        help="Records of this run that its history does not hold.",
        query="telemetry_loss",
    ),
)
