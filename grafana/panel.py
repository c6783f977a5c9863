"""A panel as data: the question it answers, its queries, unit, limits, and what it reads.

Owns Panel and Query; the boards are tuples of panels, looks.py gives each its look and board.py
its place. Descriptions are the help of the metrics that a panel reads: they cannot disagree. Must
never read a metric that METRICS does not have.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from telemetry.metric_spec import MetricSpec
from telemetry.metric_table import METRICS
from telemetry.named import catalogue

Kind = Literal["lines", "stacked", "number", "heatmap", "table"]

ONLY = 'model_name=~"$model",engine=~"$engine",instance=~"$instance"'
"""What `$only` stands for in an expression: the series that the dashboard's variables choose."""

WINDOW = "$__rate_interval"
"""What `$window` stands for: Grafana's own, at least four scrapes long."""

METRIC = re.compile(r"\b(?:iterscope_|vllm:)\w+")
SUFFIXES = ("_bucket", "_sum", "_count")
GOOD, FAIR, BAD = "green", "yellow", "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression, with `$only` and `$window`, and what its series are called."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `title` is what it answers, `why` what to read from it, `limits` value and colour.

    `width` is of 24. `query` is the named query to ask next, without it the first metric's own;
    `runbook` the page of docs/runbooks/ for when it is bad.
    """

    title: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    unit: str = "short"
    why: str = ""
    width: int = 8
    limits: tuple[tuple[float, str], ...] = ()
    below: str = GOOD
    """The colour of what is below the first limit."""
    low: float | None = 0.0
    high: float | None = None
    query: str = ""
    runbook: str = ""
    words: tuple[tuple[str, str, str], ...] = ()
    """Of a number: a value, the word that stands for it, and its colour."""


def expression(text: str) -> str:
    """Return an expression as Grafana has it."""
    return text.replace("$only", ONLY).replace("$window", WINDOW)


@lru_cache(maxsize=1)
def _specs() -> dict[str, MetricSpec]:
    return {spec.name: spec for spec in METRICS}


def metrics_of(panel: Panel) -> list[MetricSpec]:
    """Return the metrics that a panel reads, in order; raises KeyError for one that is not ours."""
    found: dict[str, MetricSpec] = {}
    for query in panel.queries:
        for name in METRIC.findall(query.expr):
            found.setdefault(name, _spec(name))
    return list(dict.fromkeys(found.values()))


def _spec(name: str) -> MetricSpec:
    specs = _specs()
    for suffix in ("", *SUFFIXES):
        base = name.removesuffix(suffix)
        if base in specs and (not suffix or specs[base].type == "histogram"):
            return specs[base]
    raise KeyError(f"{name} is not in METRICS")


def described(panel: Panel) -> str:
    """Return a panel's description: what to read from it, then what its metrics mean."""
    lines = [panel.why] if panel.why else []
    lines += [f"`{spec.name}`: {spec.help}" for spec in metrics_of(panel)]
    if panel.runbook:
        lines.append(f"Runbook: docs/runbooks/{panel.runbook}.md")
    return "\n\n".join(lines)


def question_of(panel: Panel) -> str:
    """Return the named query that tells the requests behind a panel, or nothing."""
    if panel.query:
        return panel.query
    names = [spec.query for spec in metrics_of(panel)]
    return next((name for name in names if name in catalogue()), "")
