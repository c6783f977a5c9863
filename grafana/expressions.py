"""The few shapes of PromQL that boards use again and again: quantiles, rates by a label, means.

Owns those shapes as queries of a panel; boards call them by the metric's name. Series of several
engines are summed before they are divided or ranked. Must never pool quantiles.
"""

from grafana.panel import Query


def quantiles(metric: str, *, exemplars: bool = False) -> tuple[Query, ...]:
    """Return median, p90 and p99 of a histogram; exemplars come with the last."""
    cells = f"sum by (le) (rate({metric}_bucket{{$only}}[$window]))"
    return tuple(
        Query(
            expr=f"histogram_quantile({share}, {cells})",
            legend=f"p{100 * share:g}",
            exemplars=exemplars and share == 0.99,
        )
        for share in (0.5, 0.9, 0.99)
    )


def mean(metric: str, legend: str = "mean") -> Query:
    """Return the mean of a histogram's values."""
    total, count = (f"sum(rate({metric}_{part}{{$only}}[$window]))" for part in ("sum", "count"))
    return Query(expr=f"{total} / ({count} > 0)", legend=legend)


def cells(metric: str) -> tuple[Query, ...]:
    """Return a histogram as the cells of a heatmap."""
    return (
        Query(expr=f"sum by (le) (increase({metric}_bucket{{$only}}[$window]))", legend="{{le}}"),
    )


def rate(metric: str, legend: str, matching: str = "") -> Query:
    """Return how fast a counter grows, all engines together."""
    return Query(expr=f"sum(rate({metric}{{{_and(matching)}$only}}[$window]))", legend=legend)


def rate_by(metric: str, label: str, matching: str = "") -> tuple[Query, ...]:
    """Return how fast a counter grows, a series a value of the label."""
    counter = f"{metric}{{{_and(matching)}$only}}"
    return (Query(expr=f"sum by ({label}) (rate({counter}[$window]))", legend=f"{{{{{label}}}}}"),)


def share(part: str, whole: str, legend: str) -> Query:
    """Return one selector's rate over another's; nothing while the whole stands still."""
    return Query(
        expr=f"sum(rate({part}[$window])) / (sum(rate({whole}[$window])) > 0)", legend=legend
    )


def _and(matching: str) -> str:
    return f"{matching}," if matching else ""
