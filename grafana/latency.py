"""The dashboard of latency and objectives: what clients waited for, and whether it was promised.

Owns that board's panels; generate.py writes it. Exemplars lead from a slow value to its request.
Must never average what should be ranked.
"""

from grafana.board import Board, Row
from grafana.expressions import cells, mean, quantiles, rate, rate_by
from grafana.panel import BAD, FAIR, Panel, Query

SLO = "iterscope_slo_requests_total"


def _missed(window: str) -> Query:
    """Return the share of requests that missed their objective, a class a series."""
    part, whole = (
        f"sum by (class) (rate({SLO}{{{more}$only}}[{window}]))" for more in ('outcome!="met",', "")
    )
    return Query(expr=f"{part} / ({whole} > 0)", legend=f"{{{{class}}}}, {window}")


OBJECTIVES = Row(
    title="Is the promise kept?",
    panels=(
        Panel(
            title="The objective of requests that bring none",
            kind="number",
            unit="s",
            width=4,
            queries=(
                Query(
                    expr="max by (part) (iterscope_slo_objective_seconds{$only})",
                    legend="{{part}}",
                ),
            ),
        ),
        Panel(
            title="How many requests miss it?",
            unit="percentunit",
            width=10,
            queries=tuple(_missed(window) for window in ("5m", "1h", "6h")),
            why="A budget of 1 %: above it for long, the promise of the month is not kept.",
            limits=((0.01, FAIR), (0.144, BAD)),
            runbook="IterscopeSloBurn",
        ),
        Panel(
            title="How do they fare?",
            kind="stacked",
            unit="reqps",
            width=10,
            queries=rate_by(SLO, "class, outcome"),
            why="Goodput in requests: those that are `met`.",
        ),
        Panel(
            title="Goodput in tokens",
            kind="stacked",
            unit="tokens/s",
            width=12,
            queries=rate_by("iterscope_slo_tokens_total", "outcome"),
        ),
        Panel(
            title="Where does the time of requests go?",
            kind="stacked",
            unit="s",
            width=12,
            queries=rate_by("iterscope_cause_seconds_total", "cause"),
            why="Request-seconds a second, of requests that are over.",
        ),
    ),
)

FELT = Row(
    title="What do clients feel?",
    panels=(
        Panel(
            title="Time to first byte",
            unit="s",
            queries=quantiles("iterscope_time_to_first_token_seconds", exemplars=True),
            query="slowest_requests",
        ),
        Panel(
            title="Time between tokens",
            unit="s",
            queries=quantiles("iterscope_inter_token_latency_seconds", exemplars=True),
            query="longest_gaps",
        ),
        Panel(
            title="From receipt to last byte",
            unit="s",
            queries=quantiles("iterscope_e2e_request_latency_seconds", exemplars=True),
            query="slowest_requests",
        ),
        Panel(
            title="Time to first byte, every value",
            kind="heatmap",
            unit="s",
            queries=cells("iterscope_time_to_first_token_seconds"),
            query="slowest_requests",
        ),
        Panel(
            title="Time between tokens, every value",
            kind="heatmap",
            unit="s",
            queries=cells("iterscope_inter_token_latency_seconds"),
            query="longest_gaps",
        ),
        Panel(
            title="Mean time per token of each request",
            unit="s",
            queries=quantiles("iterscope_request_time_per_output_token_seconds"),
        ),
    ),
)

PHASES = Row(
    title="In which phase?",
    panels=(
        Panel(
            title="Queued",
            unit="s",
            queries=quantiles("iterscope_request_queue_time_seconds"),
            query="longest_waits",
        ),
        Panel(
            title="Reading the prompt",
            unit="s",
            queries=quantiles("iterscope_request_prefill_time_seconds"),
        ),
        Panel(
            title="Writing the answer",
            unit="s",
            queries=quantiles("iterscope_request_decode_time_seconds"),
        ),
        Panel(
            title="Mean of each phase",
            kind="stacked",
            unit="s",
            queries=tuple(
                mean(f"iterscope_request_{phase}_time_seconds", word)
                for phase, word in (
                    ("queue", "queued"),
                    ("prefill", "prompt"),
                    ("decode", "answer"),
                )
            ),
        ),
        Panel(
            title="From the engine to the client",
            unit="s",
            queries=quantiles("iterscope_delivery_lag_seconds"),
            why="What the server adds to a first token.",
        ),
        Panel(
            title="How many writes wait for their client?",
            queries=(rate("iterscope_output_stall_seconds_total", "waiting, on average"),),
            runbook="IterscopeSlowClients",
        ),
    ),
)

ASKED = Row(
    title="What do they ask for?",
    panels=(
        Panel(
            title="Prompt tokens",
            kind="heatmap",
            unit="tokens",
            width=6,
            queries=cells("iterscope_request_prompt_tokens"),
        ),
        Panel(
            title="Output tokens",
            kind="heatmap",
            unit="tokens",
            width=6,
            queries=cells("iterscope_request_generation_tokens"),
        ),
        Panel(
            title="Who leaves early?",
            kind="stacked",
            unit="reqps",
            width=6,
            queries=rate_by("iterscope_requests_cancelled_total", "cause"),
        ),
        Panel(
            title="What was computed for nobody?",
            kind="stacked",
            unit="tokens/s",
            width=6,
            queries=rate_by("iterscope_wasted_tokens_total", "cause"),
        ),
    ),
)

BOARD = Board(
    uid="iterscope-latency",
    title="Latency and objectives",
    about="What clients wait for, in which phase, and whether objectives are met.",
    rows=(OBJECTIVES, FELT, PHASES, ASKED),
)
