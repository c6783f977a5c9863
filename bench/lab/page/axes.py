"""Scales, ticks and the frame that the page's charts stand in.

Owns where a value lies in a picture, and which values an axis names. The charts under
bench/lab/page use it. Sizes are SVG units, CSS pixels at the width a figure is made for. Must
never place a mark outside its frame: values beyond a scale stand at its end.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.lab.page.markup import Safe, tag
from bench.lab.page.numbers import short

DECADES_FOR_LOG = 1.2
"""Values that span more powers of ten than this are drawn on a logarithmic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From values low..high to places begin..end."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value, held within the scale."""
        held = min(max(value, self.low), self.high)
        low, high = self.low, self.high
        if self.log:
            held, low, high = math.log(held), math.log(low), math.log(high)
        return self.begin + (self.end - self.begin) * (held - low) / (high - low)

    def ticks(self, count: int = 5) -> list[float]:
        """Return round values within the scale, about so many."""
        found = _log_ticks(self.low, self.high) if self.log else []
        return found if len(found) > 2 else _ticks(self.low, self.high, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The box of a chart: its whole size, and the margins that labels need."""

    width: float = 620
    height: float = 300
    left: float = 62
    right: float = 96
    top: float = 22
    bottom: float = 46

    @property
    def x_end(self) -> float:
        """Return where the plot ends on the right."""
        return self.width - self.right

    @property
    def y_end(self) -> float:
        """Return where the plot ends at the bottom."""
        return self.height - self.bottom

    def across(self, values: Iterable[float], *, zero: bool = True) -> Scale:
        """Return the x scale of values."""
        low, high = _span(values, zero=zero)
        return Scale(low=low, high=high, begin=self.left, end=self.x_end)

    def up(self, values: Iterable[float], *, log: bool = False, top: float | None = None) -> Scale:
        """Return the y scale of values: from zero, or with `log` from below the smallest."""
        found = [value for value in values if math.isfinite(value)]
        positive = [value for value in found if value > 0]
        if log and positive and max(positive) / min(positive) > 10**DECADES_FOR_LOG:
            low, high = min(positive) / 1.25, max(positive) * 1.25
            return Scale(low=low, high=high, begin=self.y_end, end=self.top, log=True)
        high = top if top is not None else max(found, default=1.0) * 1.08
        return Scale(low=0.0, high=high if high > 0 else 1.0, begin=self.y_end, end=self.top)


def _span(values: Iterable[float], *, zero: bool) -> tuple[float, float]:
    found = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = (0.0 if zero else min(found)), max(found)
    room = (high - low or abs(high) or 1.0) * 0.03
    return (low if zero else low - room), high + room


def _ticks(low: float, high: float, count: int) -> list[float]:
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    sizes: Sequence[int] = (1,) if len(powers) > 4 else (1, 3) if len(powers) > 2 else (1, 2, 5)
    every = [size * 10.0**power for power in powers for size in sizes]
    return [value for value in every if low <= value <= high]


def x_axis(frame: Frame, scale: Scale, title: str, unit: str = "") -> list[Safe]:
    """Return the axis below: ticks, their values and the title."""
    drawn = [
        tag("line", class_="axis", x1=frame.left, x2=frame.x_end, y1=frame.y_end, y2=frame.y_end)
    ]
    for value in scale.ticks(6):
        x = scale.at(value)
        drawn += [
            tag("line", class_="axis", x1=x, x2=x, y1=frame.y_end, y2=frame.y_end + 4),
            tag("text", tick(value, unit), class_="tick middle", x=x, y=frame.y_end + 16),
        ]
    middle = (frame.left + frame.x_end) / 2
    return [*drawn, tag("text", title, class_="label middle", x=middle, y=frame.y_end + 35)]


def y_axis(frame: Frame, scale: Scale, unit: str) -> list[Safe]:
    """Return the axis on the left: a rule across the plot for each value it names."""
    drawn = []
    for value in scale.ticks(5):
        y = scale.at(value)
        drawn += [
            tag("line", class_="rule", x1=frame.left, x2=frame.x_end, y1=y, y2=y),
            tag("text", tick(value, unit), class_="tick end", x=frame.left - 8, y=y + 4),
        ]
    return drawn


def tick(value: float, unit: str) -> str:
    """Return a value that an axis names: times and shares carry their unit, others stand plain."""
    if unit == "share":
        return f"{short(100 * value)} %"
    if unit == "ms":
        return f"{short(value / 1000)} s" if value >= 1000 else f"{short(value)} ms"
    return short(value)


def apart(places: Sequence[float], least: float, high: float) -> list[float]:
    """Return places moved so that neighbours are `least` apart and none lies beyond `high`."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved: list[float] = []
    for index in order:
        moved.append(max(places[index], moved[-1] + least) if moved else places[index])
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], high)
        high = moved[number] - least
    found = [0.0] * len(places)
    for index, place in zip(order, moved, strict=True):
        found[index] = place
    return found
