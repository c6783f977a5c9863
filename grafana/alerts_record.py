"""Alerts of the record itself: what was lost, what is not kept, what broke and went on.

Owns the group `record`; alerts.py puts it beside the others. Serving goes on while they fire, so
they are tickets; but a question about that time will find a hole. Must not fire for a stream's
reader that was too slow: that loss is the reader's, which is told of it.
"""

from grafana.alert_spec import Alert, Group

_RECORD = (
    Alert(
        name="IterscopeTelemetryLoss",
        severity="ticket",
        value="iterscope:telemetry_lost:increase10m",
        above=0,
        for_s=0,
        shown="count",
        summary="Records that {instance} lost within 10 minutes: {value}. Explanations of that "
        "time have holes.",
        query="telemetry_loss",
        fires_on="any record that the engine dropped, or that history, metrics or explanations "
        "were too slow for",
        silent_on="a page or a stream that was too slow for itself",
    ),
    Alert(
        name="IterscopeHistoryNotWritten",
        severity="ticket",
        value="iterscope:history_unwritten:ways",
        above=0,
        for_s=60,
        shown="count",
        summary="{instance} does not write its history: it is degraded, loses records, or is more "
        "than a minute behind.",
        query="telemetry_loss",
        fires_on="a history that is degraded, loses records, or lags by more than 60 s, for a "
        "minute",
        silent_on="a server that keeps none on purpose; an idle one, which has nothing to write",
    ),
    Alert(
        name="IterscopeFaults",
        severity="ticket",
        value="increase(iterscope_faults_total[30m])",
        above=0,
        for_s=0,
        shown="count",
        summary="Faults on record of {instance} within 30 minutes: {value}.",
        query="faults",
        last_s=1800,
        fires_on="any fault: a step that raised, an engine that died",
        silent_on="requests that are refused, cancelled or malformed",
    ),
)

RECORD = (Group(name="iterscope-record", alerts=_RECORD),)
