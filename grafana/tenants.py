"""The dashboard of tenants: who asks for how much, who gets it, and who is refused.

Owns that board's panels; generate.py writes it. Labels are bounded: the largest tenants by name,
all others as `other`. Must never count on a tenant being there.
"""

from grafana.board import Board, Row
from grafana.expressions import rate_by
from grafana.panel import Panel, Query

NAME = "iterscope_tenant"


def _total(what: str, legend: str) -> Query:
    counter = f"{NAME}_{what}_total{{$only}}"
    return Query(expr=f"sum by (tenant) (increase({counter}[$__range]))", legend=legend)


LEDGER = Row(
    title="Who got how much, in the time shown?",
    height=9,
    panels=(
        Panel(
            title="Tenants",
            kind="table",
            width=24,
            queries=(
                _total("requests", "requests"),
                _total("prompt_tokens", "prompt tokens"),
                _total("output_tokens", "output tokens"),
                _total("device_seconds", "device s"),
                _total("rejections", "rejected"),
            ),
        ),
    ),
)

RATES = Row(
    title="How does it change?",
    panels=(
        Panel(
            title="Requests",
            kind="stacked",
            unit="reqps",
            queries=rate_by(f"{NAME}_requests_total", "tenant"),
        ),
        Panel(
            title="Output tokens",
            kind="stacked",
            unit="tokens/s",
            queries=rate_by(f"{NAME}_output_tokens_total", "tenant"),
        ),
        Panel(
            title="Prompt tokens",
            kind="stacked",
            unit="tokens/s",
            queries=rate_by(f"{NAME}_prompt_tokens_total", "tenant"),
        ),
        Panel(
            title="Whose is the device?",
            kind="stacked",
            unit="percentunit",
            width=12,
            queries=rate_by(f"{NAME}_device_seconds_total", "tenant"),
            why="Of each second of the wall clock.",
        ),
        Panel(
            title="Who is refused?",
            kind="stacked",
            unit="reqps",
            width=12,
            queries=rate_by(f"{NAME}_rejections_total", "tenant"),
            runbook="IterscopeRequestsRefused",
        ),
    ),
)

BOARD = Board(
    uid="iterscope-tenants",
    title="Tenants",
    about="What each tenant asks for, gets and costs.",
    rows=(LEDGER, RATES),
)
