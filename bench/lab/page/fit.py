"""Batch size against step time: what was measured, the line T(B) that fits it, and its knee.

Owns that picture. Steps that only decoded are its points, the median with a whisker to the 95th
percentile; the knee is where the batch costs as much as the step's fixed part, so that beyond it a
row more lengthens a step in proportion. Knows no more of a result than its step times.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from bench.lab.page.axes import Frame, Scale, x_axis, y_axis
from bench.lab.page.figure import Told, arm_class, mark, picture
from bench.lab.page.markup import Safe, points, tag
from bench.lab.page.numbers import TIMES, plain, short, valued

FRAME = Frame(width=1040, height=320, left=72, right=30, top=16)


def step_times(told: Told, arms: Sequence[tuple[int, dict[str, Any]]]) -> Safe:
    """Return the picture of arms, each with its place among them."""
    rows = [value for _, arm in arms for value in arm["rows"]]
    heights = [value for _, arm in arms for value in arm["ms_p50"]]
    tall = sorted(value for _, arm in arms for value in arm["ms_p95"])
    # One stutter of the host must not squeeze all that the picture is about.
    calm = min(max(heights, default=1.0) * 2, tall[-1] if tall else 1.0)
    x = FRAME.across(rows)
    y = FRAME.up([*heights, calm])
    parts: list[Safe] = [
        *y_axis(FRAME, y, "ms"),
        *x_axis(FRAME, x, "rows in the step, B"),
        *(_arm(index, arm, x, y) for index, arm in arms),
    ]
    return picture(told, parts, width=FRAME.width, height=FRAME.height)


def _arm(index: int, arm: dict[str, Any], x: Scale, y: Scale) -> Safe:
    drawn: list[Safe] = []
    columns = zip(arm["rows"], arm["ms_p50"], arm["ms_p95"], arm["steps"], strict=True)
    for rows, median, high, steps in columns:
        at = x.at(rows)
        says = f"{arm['arm']}, {rows} rows: {valued(median, 'ms')}, p95 {valued(high, 'ms')}"
        drawn += [
            tag("line", class_="whisker", x1=at, x2=at, y1=y.at(median), y2=y.at(high)),
            mark(index, at, y.at(median), says=f"{says}, {plain(steps)} steps", size=3.4),
        ]
    fit = arm.get("fit")
    if fit and arm["rows"]:
        drawn += _line(index, arm, x, y)
    return tag("g", drawn, class_=arm_class(index))


def _line(index: int, arm: dict[str, Any], x: Scale, y: Scale) -> Iterator[Safe]:
    last, fit = max(arm["rows"]), arm["fit"]
    fixed, row = fit["fixed_ms"], fit["row_ms"]
    ends = [(x.at(0), y.at(fixed)), (x.at(last), y.at(fixed + row * last))]
    yield tag("polyline", class_="curve", points=points(ends))
    knee = fit.get("knee_rows")
    if knee is not None and 0 < knee <= x.high:
        at, height = x.at(knee), y.at(fixed + row * knee)
        yield tag("line", class_="named", x1=at, x2=at, y1=height, y2=FRAME.y_end)
        yield tag("circle", class_="best", cx=at, cy=height, r=8.0)
        shown = f"knee at {short(round(knee, 1))} rows, {arm['arm']}"
        yield tag("text", shown, class_="tick halo", x=at + 6, y=FRAME.y_end - 8 - 15 * index)


def in_words(arm: dict[str, Any]) -> str:
    """Return the fitted line as a formula with its error."""
    fit = arm.get("fit")
    if not fit:
        return f"With {arm['arm']} there were too few sizes to fit a line."
    line = f"T(B) = {plain(fit['fixed_ms'])} ms + {plain(fit['row_ms'])} ms {TIMES} B"
    error = fit.get("error_share")
    off = "" if error is None else f", off by {valued(error, 'share')} in the mean"
    knee = fit.get("knee_rows")
    where = "" if knee is None else f"; the knee is at B = {short(round(knee, 1))}"
    return f"With {arm['arm']}, {line}{off}{where}."
