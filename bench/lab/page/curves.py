"""Everything against the offered rate: throughput, goodput, latencies, use of the device.

Owns which figures are drawn, with which captions; bench/lab/report.py puts the section into the
page. Two percentiles of one latency share a scale, so that what the tail adds is seen. Computes no
statistic: means and intervals are the result's.
"""

from collections.abc import Iterator
from typing import Any

from bench.lab.page.arms import (
    Result,
    counted_in_words,
    names_of,
    objective_in_words,
    place_of,
    rate_in_words,
)
from bench.lab.page.figure import Table, Told, figure, figures, key_of_arms, section
from bench.lab.page.lines import Best, Chart, Curve, Point, chart
from bench.lab.page.markup import Safe
from bench.lab.page.numbers import NOTHING, plain, ranged, sentence, valued

X_TITLE = "offered requests a second"
SINGLE = (
    ("output_tok_s", "Output tokens a second that clients got while requests were sent."),
    ("goodput_requests_s", ""),
    ("goodput_share", ""),
    (
        "unfinished_share",
        "Requests that were not over when the run was cut off. Where this is not zero, latencies "
        "are lower bounds.",
    ),
    (
        "rows_mean",
        "Rows in a mean step, idle ones included: how far each arm fills the batch on its own.",
    ),
    (
        "useful_rows_share",
        "Rows that computed a token for someone who waits. A fixed batch goes on computing the "
        "rows of those that are over.",
    ),
    ("device_busy_share", "Time in which the device computed."),
    ("step_ms_p50", "A median step, from one commit to the next."),
)
PERCENTILES = (
    ("ttft", "Time to first token", "from the scheduled instant: a late send counts"),
    ("tpot", "Time per output token", "of a request: its stream's length over its tokens"),
    ("itl", "Gap between two tokens", "of all gaps of all streams: what a reader sees stutter"),
    ("e2e", "Whole answer", "from the scheduled instant to the last byte"),
)


def curves(result: Result) -> Safe:
    """Return the section."""
    if not result.get("curves"):
        return section("rates", "Against the rate")
    drawn = [_single(result, name, caption) for name, caption in SINGLE]
    pairs = [_pair(result, *row) for row in PERCENTILES]
    return section(
        "rates",
        "Against the rate",
        key_of_arms(list(enumerate(names_of(result)))),
        figures([*drawn[:3], drawn[3], *pairs[:3], *drawn[4:], pairs[3]]),
    )


def _single(result: Result, name: str, caption: str) -> Safe:
    told = _told(result, name, caption or _caption(result, name))
    of = _chart(result, told, name)
    if of is None:
        return Safe("")
    return figure(told, [chart(of)], _numbers(result, [name]))


def _pair(result: Result, stem: str, title: str, what: str) -> Safe:
    names = [f"{stem}_p50_ms", f"{stem}_p99_ms"]
    caption = (
        f"{title}, {what}. Left the median, right the 99th percentile, on one scale; bands and "
        "whiskers are 95 % intervals of the mean over repeats, dots the repeats."
    )
    told = Told(name=stem, title=title, unit="ms", caption=caption)
    values = [value for name in names for value in _heights(result, name)]
    found = [
        _chart(result, told, name, heading=heading, shared=values)
        for name, heading in zip(names, ("median", "99th percentile"), strict=True)
    ]
    drawn = [chart(of) for of in found if of is not None]
    return figure(told, drawn, _numbers(result, names), wide=True) if drawn else Safe("")


def _told(result: Result, name: str, caption: str) -> Told:
    meant = (result.get("figures") or {}).get(name) or {}
    title = str(meant.get("title", name))
    title = sentence(title).rstrip(".")
    return Told(name=f"rate-{name}", title=title, unit=_unit(result, name), caption=caption)


def _unit(result: Result, name: str) -> str:
    meant = (result.get("figures") or {}).get(name) or {}
    return str(meant.get("unit", "ms" if name.endswith("_ms") else ""))


def _caption(result: Result, name: str) -> str:
    objective = objective_in_words(result)
    if name == "goodput_share":
        return (
            f"Requests that met the objective ({objective}). The line is the share that counts as "
            "serving within it."
        )
    return (
        f"Requests a second that met the objective ({objective}). The ring is each arm's best "
        f"operating point: beyond it more load serves fewer in time. {counted_in_words()}"
    )


def _chart(
    result: Result, told: Told, name: str, *, heading: str = "", shared: list[float] | None = None
) -> Chart | None:
    found = [_curve(result, arm, name) for arm in names_of(result)]
    if not any(curve.points for curve in found):
        return None
    capacity = (result.get("capacity") or {}).get("requests_s")
    attainment = (result.get("settings") or {}).get("attainment_min")
    unit = _unit(result, name)
    across = [(attainment, valued(attainment, "share"))] if attainment else []
    return Chart(
        told=told,
        unit=unit,
        x_title=X_TITLE,
        curves=found,
        log=unit == "ms",
        top=1.04 if unit == "share" else None,
        heading=heading,
        bests=list(_bests(result)) if name == "goodput_requests_s" else (),
        downs=[(capacity, "capacity")] if capacity else (),
        acrosses=across if name == "goodput_share" else (),
        shared=shared or (),
    )


def _rows(result: Result, arm: str, name: str) -> Iterator[tuple[Result, Result]]:
    rows = [row for row in result["curves"] if row["arm"] == arm]
    for row in sorted(rows, key=lambda row: float(row["requests_s"])):
        value = row["figures"].get(name)
        if value and value.get("mean") is not None:
            yield row, value


def _heights(result: Result, name: str) -> list[float]:
    rows = [value for arm in names_of(result) for _, value in _rows(result, arm, name)]
    return [one for value in rows for one in (value["mean"], *value["values"]) if one is not None]


def _curve(result: Result, arm: str, name: str) -> Curve:
    unit = _unit(result, name)
    found = []
    for row, value in _rows(result, arm, name):
        shown = ranged(value["mean"], value["low"], value["high"], unit)
        found.append(
            Point(
                x=row["requests_s"],
                mean=value["mean"],
                low=value["low"],
                high=value["high"],
                values=[one for one in value["values"] if one is not None],
                says=f"{arm} at {rate_in_words(result, row['fraction'])}: {shown}",
            )
        )
    return Curve(index=place_of(result, arm), name=arm, points=found)


def _bests(result: Result) -> Iterator[Best]:
    for row in result.get("operating_points") or []:
        if row.get("goodput_requests_s") is None or row.get("requests_s") is None:
            continue
        shown = plain(float(f"{row['goodput_requests_s']:.3g}"))
        says = f"{row['arm']}: best at {rate_in_words(result, row['fraction'])}, {shown} in time"
        yield Best(
            index=place_of(result, row["arm"]),
            x=row["requests_s"],
            y=row["goodput_requests_s"],
            label=f"best {shown}",
            says=says,
        )


def _numbers(result: Result, names: list[str]) -> Table:
    heads = ["rate", "arm"]
    for name in names:
        percentile = next((part for part in ("p50", "p99") if part in name), "mean")
        heads += [percentile if len(names) > 1 else "mean", "95 % interval", "repeats"]
    rows: list[list[str]] = []
    at: list[Any] = sorted({row["fraction"] for row in result["curves"]})
    for fraction in at:
        for arm in names_of(result):
            cells = _cells(result, names, fraction, arm)
            if cells:
                rows.append([rate_in_words(result, fraction), arm, *cells])
    return Table(heads, rows, texts=2)


def _cells(result: Result, names: list[str], fraction: float, arm: str) -> list[str]:
    cells: list[str] = []
    for name in names:
        unit = _unit(result, name)
        for row, value in _rows(result, arm, name):
            if row["fraction"] == fraction:
                low, high = value["low"], value["high"]
                interval = (
                    NOTHING if low is None else f"{valued(low, unit)} to {valued(high, unit)}"
                )
                repeats = ", ".join(valued(one, unit) for one in value["values"])
                cells += [valued(value["mean"], unit), interval, repeats]
    return cells
