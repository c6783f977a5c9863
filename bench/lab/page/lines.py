"""Curves against the offered rate: a mean with its interval, every repeat, and named places.

Owns that picture; bench/lab/page/curves.py fills it. An interval is a band and a whisker, a repeat
a small dot, so that a reader sees what a mean rests on; each arm has a colour, a dash, a mark and
its name at its end. Knows no result.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.lab.page.axes import Frame, Scale, apart, x_axis, y_axis
from bench.lab.page.figure import Told, arm_class, mark, picture
from bench.lab.page.markup import Safe, points, tag

LABEL_PX = 13.0
FRAME = Frame()
NAME_CHARACTERS = 14
SQUEEZE = 1.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One rate: the mean over repeats, its interval, and the repeats themselves."""

    x: float
    mean: float
    low: float | None
    high: float | None
    values: Sequence[float]
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One arm: its place among the arms gives its colour."""

    index: int
    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """A point that is ringed and named."""

    index: int
    x: float
    y: float
    label: str
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart shows: `downs` and `acrosses` are lines at a rate or a value, with a word."""

    told: Told
    unit: str
    x_title: str
    curves: Sequence[Curve]
    log: bool = False
    top: float | None = None
    heading: str = ""
    bests: Sequence[Best] = ()
    downs: Sequence[tuple[float, str]] = ()
    acrosses: Sequence[tuple[float, str]] = ()
    shared: Sequence[float] = field(default=())
    """Values beside those of the curves that the scale has to hold: two charts, one scale."""


def chart(of: Chart) -> Safe:
    """Return the picture."""
    every = [point for curve in of.curves for point in curve.points]
    heights = [value for point in every for value in (point.mean, *point.values)]
    # An interval counts as far as it does not squeeze the means it stands around.
    most = SQUEEZE * max(heights, default=0.0)
    heights += [point.high for point in every if point.high is not None and point.high <= most]
    heights += [*of.shared, *(value for value, _ in of.acrosses)]
    x = FRAME.across([point.x for point in every] + [at for at, _ in of.downs])
    y = FRAME.up(heights, log=of.log, top=of.top)
    parts: list[Safe] = [
        *y_axis(FRAME, y, of.unit),
        *x_axis(FRAME, x, of.x_title),
        *_named_lines(of, x, y),
        *(_curve(curve, x, y) for curve in of.curves if curve.points),
        *_names(of.curves, y),
        *_bests(of.bests, x, y),
    ]
    if of.heading:
        parts.append(tag("text", of.heading, class_="heading", x=FRAME.left + 6, y=FRAME.top + 10))
    return picture(of.told, parts, width=FRAME.width, height=FRAME.height)


def _named_lines(of: Chart, x: Scale, y: Scale) -> Iterator[Safe]:
    for value, word in of.downs:
        at = x.at(value)
        yield tag("line", class_="named", x1=at, x2=at, y1=FRAME.top, y2=FRAME.y_end)
        yield tag("text", word, class_="tick middle", x=at, y=FRAME.top - 6)
    for value, word in of.acrosses:
        at = y.at(value)
        yield tag("line", class_="named", x1=FRAME.left, x2=FRAME.x_end, y1=at, y2=at)
        yield tag("text", word, class_="tick halo", x=FRAME.left + 6, y=at - 5)


def _curve(curve: Curve, x: Scale, y: Scale) -> Safe:
    known = [point for point in curve.points if point.low is not None and point.high is not None]
    band = [(x.at(point.x), y.at(point.high or 0.0)) for point in known]
    band += [(x.at(point.x), y.at(point.low or 0.0)) for point in reversed(known)]
    line = [(x.at(point.x), y.at(point.mean)) for point in curve.points]
    return tag(
        "g",
        tag("polygon", class_="band", points=points(band)) if _inside(known, y) else None,
        tag("polyline", class_="curve", points=points(line)),
        [part for point in curve.points for part in _point(curve.index, point, x, y)],
        class_=arm_class(curve.index),
    )


def _inside(known: Sequence[Point], y: Scale) -> bool:
    """Return whether intervals fit the picture: a band that is cut off would say too little."""
    ends = [end for point in known for end in (point.low, point.high) if end is not None]
    return len(known) > 1 and all(y.low <= end <= y.high for end in ends)


def _point(index: int, point: Point, x: Scale, y: Scale) -> Iterator[Safe]:
    at = x.at(point.x)
    if point.low is not None and point.high is not None:
        ends = [y.at(point.low), y.at(point.high)]
        yield tag("line", class_="whisker", x1=at, x2=at, y1=ends[0], y2=ends[1])
        for end in ends:
            yield tag("line", class_="whisker", x1=at - 3, x2=at + 3, y1=end, y2=end)
    for value in point.values:
        yield tag("circle", class_="repeat", cx=at, cy=y.at(value), r=1.5)
    yield mark(index, at, y.at(point.mean), says=point.says)


def _names(curves: Iterable[Curve], y: Scale) -> Iterator[Safe]:
    shown = [curve for curve in curves if curve.points]
    own = [y.at(curve.points[-1].mean) for curve in shown]
    for curve, place, at in zip(shown, apart(own, LABEL_PX, FRAME.y_end), own, strict=True):
        name = curve.name
        if len(name) > NAME_CHARACTERS:
            name = name[: NAME_CHARACTERS - 1] + "…"
        yield tag(
            "g",
            tag("line", class_="leader", x1=FRAME.x_end + 1, x2=FRAME.x_end + 8, y1=at, y2=place),
            tag("text", name, class_="name", x=FRAME.x_end + 11, y=place + 4),
            class_=arm_class(curve.index),
        )


def _bests(bests: Sequence[Best], x: Scale, y: Scale) -> Iterator[Safe]:
    own = [y.at(best.y) - 9 for best in bests]
    for best, label in zip(bests, apart(own, LABEL_PX, FRAME.y_end), strict=True):
        yield _best(best, x.at(best.x), y.at(best.y), label)


def _best(best: Best, at: float, height: float, label: float) -> Safe:
    left = at > FRAME.x_end - 90
    return tag(
        "g",
        tag("circle", tag("title", best.says), class_="best", cx=at, cy=height, r=9.0),
        tag(
            "text",
            best.label,
            class_="tick halo" + (" end" if left else ""),
            x=at + (-12 if left else 12),
            y=label,
        ),
        class_=arm_class(best.index),
    )
