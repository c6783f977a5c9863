"""The batch over time: rows that compute for someone, rows kept for nobody, and who waits.

Owns that picture, one strip pair an arm over one time axis, made from the steps of one run each.
Steps are averaged over the columns of the picture, weighted by their time, so a gap between steps
is a gap. Knows no more of a result than a timeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.lab.page.axes import Frame, Scale, x_axis
from bench.lab.page.figure import Told, picture
from bench.lab.page.markup import Safe, points, tag
from bench.lab.page.numbers import plain, short

ROWS_PX, WAITING_PX, GAP_PX = 74.0, 30.0, 22.0
COLUMNS = 520
LEFT, RIGHT, WIDTH = 180.0, 20.0, 1040.0


@dataclass(frozen=True, slots=True)
class Columns:
    """A run's course by column of the picture: means over time, the most that waited."""

    rows: list[float]
    idle: list[float]
    waiting: list[float]


def columns_of(timeline: dict[str, Any], span_ms: float, count: int = COLUMNS) -> Columns:
    """Return the course of one run cut into equal columns."""
    width = span_ms / count
    found = Columns([0.0] * count, [0.0] * count, [0.0] * count)
    names = ("begin_ms", "end_ms", "rows", "idle_rows", "waiting")
    for begin, end, rows, idle, waiting in zip(*(timeline[name] for name in names), strict=True):
        first, last = max(0, int(begin / width)), min(count - 1, int(end / width))
        for column in range(first, last + 1):
            inside = min(end, (column + 1) * width) - max(begin, column * width)
            share = max(0.0, inside) / width
            found.rows[column] += rows * share
            found.idle[column] += idle * share
            found.waiting[column] = max(found.waiting[column], waiting)
    return found


def course(told: Told, timelines: Sequence[dict[str, Any]]) -> Safe:
    """Return the arms' courses one above the other, on the same scales."""
    span_ms = max((max(one["end_ms"], default=0.0) for one in timelines), default=1.0) or 1.0
    cut = [columns_of(one, span_ms) for one in timelines]
    rows_top = max(
        (r + i for one in cut for r, i in zip(one.rows, one.idle, strict=True)), default=1
    )
    waiting_top = max((max(one.waiting) for one in cut), default=1.0)
    pair = ROWS_PX + 6 + WAITING_PX + GAP_PX
    height = pair * len(cut) + 44
    frame = Frame(width=WIDTH, height=height, left=LEFT, right=RIGHT, top=4, bottom=46)
    x = Scale(low=0.0, high=span_ms / 1000, begin=LEFT, end=WIDTH - RIGHT)
    parts: list[Safe] = []
    for place, (timeline, one) in enumerate(zip(timelines, cut, strict=True)):
        top = 14 + place * pair
        parts += _rows(one, top, max(1.0, rows_top))
        parts += _waiting(one, top + ROWS_PX + 6, max(1.0, waiting_top))
        parts.append(tag("text", timeline["arm"], class_="name strong", x=4, y=top + 11))
    return picture(
        told, [*parts, *x_axis(frame, x, "seconds of the run")], width=WIDTH, height=height
    )


def _rows(one: Columns, top: float, most: float) -> list[Safe]:
    base = top + ROWS_PX
    size = ROWS_PX / most
    useful = [base - rows * size for rows in one.rows]
    whole = [y - idle * size for y, idle in zip(useful, one.idle, strict=True)]
    parts = [
        tag("line", class_="rule", x1=LEFT, x2=WIDTH - RIGHT, y1=base - ROWS_PX, y2=base - ROWS_PX),
        tag("text", f"{short(round(most, 1))} rows", class_="tick end", x=LEFT - 8, y=top + 11),
        tag("polygon", class_="fill rows", points=points(_area(useful, base))),
    ]
    if any(one.idle):
        lower = list(reversed(_steps(useful)))
        parts.append(tag("polygon", class_="fill idle", points=points([*_steps(whole), *lower])))
    parts.append(tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base))
    return parts


def _waiting(one: Columns, top: float, most: float) -> list[Safe]:
    base = top + WAITING_PX
    line = [base - value / most * WAITING_PX for value in one.waiting]
    return [
        tag("text", f"{plain(most)} wait", class_="tick end", x=LEFT - 8, y=top + 11),
        tag("polygon", class_="fill waiting", points=points(_area(line, base))),
        tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base),
    ]


def _steps(heights: Sequence[float]) -> list[tuple[float, float]]:
    """Return the outline of columns, without a corner where nothing changes."""
    width = (WIDTH - RIGHT - LEFT) / len(heights)
    found: list[tuple[float, float]] = []
    for column, y in enumerate(heights):
        if found and abs(found[-1][1] - y) < 0.005:
            found[-1] = (LEFT + (column + 1) * width, found[-1][1])
        else:
            found += [(LEFT + column * width, y), (LEFT + (column + 1) * width, y)]
    return found


def _area(heights: Sequence[float], base: float) -> list[tuple[float, float]]:
    return [(LEFT, base), *_steps(heights), (WIDTH - RIGHT, base)]
