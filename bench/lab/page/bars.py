"""Bars and forests: parts of a whole laid end to end, and ratios with their intervals.

Owns those two pictures; waits, the life of a mean request and the comparisons are drawn with them.
A part has a colour and a hatch or a form of its own, a ratio that chance explains is hollow. Knows
no result.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.lab.page.axes import Frame, Scale, x_axis
from bench.lab.page.figure import Told, arm_class, mark, picture
from bench.lab.page.markup import Safe, tag
from bench.lab.page.numbers import TIMES, ratio, short, valued

BAR_PX, GAP_PX, GROUP_PX = 16.0, 5.0, 12.0
LABEL_FITS_PX = 48.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a bar: `fill` is its class."""

    fill: str
    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: the group it stands in, its own name, its parts from left to right."""

    group: str
    name: str
    parts: Sequence[Part]

    @property
    def whole(self) -> float:
        """Return the bar's length."""
        return sum(part.value for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One comparison: how many times as much as the baseline."""

    group: str
    name: str
    index: int
    value: float
    low: float | None
    high: float | None
    sure: bool
    says: str


def stacked(told: Told, bars: Sequence[Bar], unit: str, x_title: str) -> Safe:
    """Return bars in their groups, one scale for all."""
    places, height = _places([bar.group for bar in bars])
    frame = Frame(width=1040, height=height + 46, left=216, right=84, top=6)
    scale = frame.across([0.0, *(bar.whole for bar in bars)])
    parts: list[Safe] = [*_rules(frame, scale), *x_axis(frame, scale, x_title, unit)]
    for bar, (top, first) in zip(bars, places, strict=True):
        parts += _labels(frame, bar.group if first else "", bar.name, top)
        at = 0.0
        for part in bar.parts:
            begin, end = scale.at(at), scale.at(at + part.value)
            at += part.value
            says = f"{bar.name}, {bar.group}: {part.name} {valued(part.value, unit)}"
            parts.append(
                tag(
                    "rect",
                    tag("title", says),
                    class_=part.fill,
                    data_says=says,
                    x=begin,
                    y=top,
                    width=max(0.0, end - begin),
                    height=BAR_PX,
                )
            )
        shown = valued(bar.whole, unit)
        parts.append(tag("text", shown, class_="tick", x=scale.at(at) + 6, y=top + 12))
    return picture(told, parts, width=frame.width, height=frame.height)


def forest(told: Told, ratios: Sequence[Ratio], baseline: str) -> Safe:
    """Return ratios on a logarithmic scale around 1, each with its interval."""
    places, height = _places([one.group for one in ratios])
    frame = Frame(width=620, height=height + 46, left=190, right=104, top=6)
    scale = _around_one(frame, ratios)
    one = scale.at(1.0)
    parts: list[Safe] = [*_rules(frame, scale)]
    parts += _ratio_axis(frame, scale, f"times that of {baseline}")
    parts.append(tag("line", class_="even", x1=one, x2=one, y1=frame.top, y2=frame.y_end))
    for row, (top, first) in zip(ratios, places, strict=True):
        parts += _labels(frame, row.group if first else "", row.name, top)
        parts.append(_ratio(row, scale, top + BAR_PX / 2))
        shown = ratio(row.value)
        parts.append(tag("text", shown, class_="tick", x=frame.x_end + 8, y=top + 12))
    return picture(told, parts, width=frame.width, height=frame.height)


def _places(groups: Sequence[str]) -> tuple[list[tuple[float, bool]], float]:
    """Return each bar's top and whether it is the first of its group; and the height of all."""
    found: list[tuple[float, bool]] = []
    top = 8.0
    for place, group in enumerate(groups):
        first = place == 0 or groups[place - 1] != group
        top += GROUP_PX if first and place else 0.0
        found.append((top, first))
        top += BAR_PX + GAP_PX
    return found, top + 6


def _labels(frame: Frame, group: str, name: str, top: float) -> Iterator[Safe]:
    if group:
        yield tag("text", group, class_="tick strong", x=4, y=top + 12)
    shown = name if len(name) <= 16 else name[:15] + "…"
    yield tag("text", shown, class_="tick end", x=frame.left - 8, y=top + 12)


def _rules(frame: Frame, scale: Scale) -> Iterator[Safe]:
    for value in scale.ticks(6):
        at = scale.at(value)
        yield tag("line", class_="rule", x1=at, x2=at, y1=frame.top, y2=frame.y_end)


def _ratio_axis(frame: Frame, scale: Scale, title: str) -> Iterator[Safe]:
    yield tag("line", class_="axis", x1=frame.left, x2=frame.x_end, y1=frame.y_end, y2=frame.y_end)
    for value in scale.ticks():
        at = scale.at(value)
        yield tag("text", f"{short(value)}{TIMES}", class_="tick middle", x=at, y=frame.y_end + 16)
    middle = (frame.left + frame.x_end) / 2
    yield tag("text", title, class_="label middle", x=middle, y=frame.y_end + 35)


def _around_one(frame: Frame, ratios: Sequence[Ratio]) -> Scale:
    ends = [1.0]
    for row in ratios:
        ends += [row.value]
        # An interval may be endless; a picture of it need not be: a quarter of its value and four.
        ends += [] if row.low is None else [max(row.low, row.value / 4)]
        ends += [] if row.high is None else [min(row.high, row.value * 4)]
    low, high = min(ends), max(ends)
    room = max(1.25, (high / low) ** 0.05)
    low, high = min(low / room, 0.8), max(high * room, 1.25)
    return Scale(low=low, high=high, begin=frame.left, end=frame.x_end, log=True)


def _ratio(row: Ratio, scale: Scale, y: float) -> Safe:
    at = scale.at(row.value)
    whisker = None
    if row.low is not None and row.high is not None and math.isfinite(row.high):
        begin, end = scale.at(max(row.low, scale.low)), scale.at(row.high)
        whisker = tag("line", class_="whisker thick", x1=begin, x2=end, y1=y, y2=y)
    hollow = "" if row.sure else " hollow"
    return tag(
        "g",
        whisker,
        mark(row.index, at, y, says=row.says, size=4.6),
        class_=arm_class(row.index) + hollow,
    )
