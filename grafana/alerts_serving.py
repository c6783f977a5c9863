"""Alerts of what clients notice: objectives missed, requests refused or failed, nobody there.

Owns the groups `objectives` and `availability`; alerts.py puts them beside the others. Each judges
what was served, never how: a cause without an effect is no reason to wake anybody. Must be silent
while nobody asks for anything, and when a server was replaced on purpose.
"""

from grafana.alert_spec import Alert, Group, Severity

OBJECTIVE = 0.99
"""Share of requests whose every token is to come in time."""
BUDGET = 1 - OBJECTIVE
MISSED_MIN = 5
"""Requests that must have missed it: one slow request of a quiet night is no trend."""


def _burn(long: str, short: str, times: float, severity: Severity, for_s: int) -> Alert:
    limit = round(times * BUDGET, 6)
    return Alert(
        name="IterscopeSloBurn",
        severity=severity,
        value=f"iterscope:slo_missed:ratio{long}",
        above=limit,
        where=(
            f"iterscope:slo_missed:ratio{short} > {limit:g}",
            f"iterscope:slo_missed:increase{long} >= {MISSED_MIN}",
        ),
        for_s=for_s,
        shown="percent",
        summary=f"{{value}} of the requests to {{model_name}} (objective {{class}}) missed their "
        f"objective in the last {long}, and {short} go on like it: 1% may.",
        query="goodput",
        last_s=3600,
        labels=(("window", long),),
        fires_on=f"more than {limit:.1%} of requests late or dropped over {long} and over {short}, "
        f"at least {MISSED_MIN} of them",
        silent_on="a burst that is over; a few late requests; clients that leave in time",
    )


_OBJECTIVES = (
    _burn("1h", "5m", 14.4, "page", 120),
    _burn("6h", "30m", 6, "page", 900),
    _burn("3d", "6h", 1, "ticket", 3600),
)

_AVAILABILITY = (
    Alert(
        name="IterscopeServerDown",
        severity="page",
        value='1 - up{job="iterscope"}',
        above=0,
        for_s=60,
        shown="count",
        summary="{instance} does not answer Prometheus' scrapes.",
        query="runs",
        last_s=None,
        fires_on="every scrape of a known server fails for a minute",
        silent_on="one or two failed scrapes; a server that is replaced within a minute",
    ),
    Alert(
        name="IterscopeNotScraped",
        severity="page",
        value='absent(up{job="iterscope"})',
        above=0,
        for_s=300,
        shown="count",
        summary="Prometheus scrapes no server under the job iterscope: every other alert is blind.",
        query="runs",
        last_s=None,
        fires_on="no target with the job iterscope for 5 minutes",
        silent_on="any server that is known, even one that is down",
    ),
    Alert(
        name="IterscopeEngineDown",
        severity="page",
        value="1 - iterscope_engine_up",
        above=0,
        for_s=300,
        shown="count",
        summary="The server {instance} answers, but has had no ready engine for {model_name} for "
        "5 minutes.",
        query="faults",
        fires_on="a server whose engine is loading or dead for 5 minutes on end",
        silent_on="a start or a restart that takes less",
    ),
    Alert(
        name="IterscopeEngineStalled",
        severity="page",
        value="iterscope_engine_stalled_seconds",
        above=15,
        where=("iterscope_engine_up > 0",),  # one that loads from a slow disk has no requests yet
        for_s=0,
        shown="duration",
        summary="The engine of {instance} has work and has not moved for {value}.",
        query="slowest_steps",
        fires_on="work pending and no sign of progress for 15 s (the limit of /health)",
        silent_on="an idle engine; one that is loaded; a long step, which beats at each layer",
    ),
    Alert(
        name="IterscopeEngineRestarting",
        severity="page",
        # Less the first: a new server's counter begins at none, so that it adds nothing here.
        value="increase((iterscope_engine_starts_total - 1)[30m:15s])",
        above=1.5,
        for_s=0,
        shown="count",
        summary="The engine of {instance} was started again {value} times within 30 minutes; each "
        "time every request in flight was lost.",
        query="faults",
        last_s=1800,
        fires_on="two engines or more that died under one server within 30 minutes",
        silent_on="a single death (IterscopeFaults tells); a server that is started anew",
    ),
    Alert(
        name="IterscopeServerRestarting",
        severity="page",
        value="changes(iterscope_start_time_seconds[30m])",
        above=2.5,
        for_s=0,
        shown="count",
        summary="The server {instance} was started {value} times within 30 minutes.",
        query="runs",
        last_s=None,
        fires_on="three starts of a server within 30 minutes",
        silent_on="a deployment, also one that is taken back",
    ),
    Alert(
        name="IterscopeRequestErrors",
        severity="page",
        value="iterscope:errors:ratio5m",
        above=0.05,
        where=("iterscope:errors:increase5m > 2.5",),
        for_s=120,
        shown="percent",
        summary="{value} of the requests that ended on {instance} ended with an error.",
        query="faults",
        fires_on="more than 5% of ends are errors for 2 minutes, at least 3 in 5 minutes",
        silent_on="one bad request; clients that cancel; bodies that are refused as malformed",
    ),
    Alert(
        name="IterscopeRequestsRefused",
        severity="ticket",
        value="iterscope:refused:ratio5m",
        above=0.05,
        for_s=300,
        shown="percent",
        summary="{instance} refuses {value} of what it is asked, since its queue or a tenant's "
        "share of it is full.",
        query="rejections",
        fires_on="more than 5% of requests answered with 429 for 5 minutes",
        silent_on="prompts that can never fit, a server that drains: no capacity would help",
    ),
)

SERVING = (
    Group(name="iterscope-objectives", alerts=_OBJECTIVES),
    Group(name="iterscope-availability", alerts=_AVAILABILITY),
)
