"""What stands around a picture: title, unit, caption, the key of its marks, and its numbers.

Owns the form that every figure and table of the page has, so that none is without a caption or a
table to read instead. The charts under bench/lab/page make the pictures. Knows no result.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.lab.page.markup import Safe, join, tag

SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
ARMS_TOLD_APART = len(SHAPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a figure says of itself: `unit` counts its values, `caption` what they show."""

    name: str
    title: str
    unit: str
    caption: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table: heads, rows of text or markup; the first `texts` columns are words."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1


def figure(told: Told, picture: Iterable[Safe], numbers: Table, *, wide: bool = False) -> Safe:
    """Return a figure with its caption and its numbers."""
    title = tag("h3", told.title, tag("span", told.unit, class_="unit"))
    return tag(
        "figure",
        tag("figcaption", title, tag("p", told.caption, id=f"{told.name}-says")),
        tag("div", picture, class_="pictures"),
        tag("details", tag("summary", "Numbers"), table(numbers), class_="numbers"),
        id=told.name,
        class_="wide" if wide else None,
    )


def picture(told: Told, parts: Iterable[Safe], *, width: float, height: float) -> Safe:
    """Return an SVG that scales with the page and has a name."""
    return tag(
        "svg",
        parts,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=f"{told.title}, {told.unit}",
        aria_describedby=f"{told.name}-says",
    )


def table(numbers: Table, *, class_: str | None = None) -> Safe:
    """Return a table that scrolls on its own where it is too wide."""
    heads = [
        tag("th", head, scope="col", class_=None if place < numbers.texts else "num")
        for place, head in enumerate(numbers.heads)
    ]
    rows = [
        tag("tr", [_cell(cell, place, numbers) for place, cell in enumerate(row)])
        for row in numbers.rows
    ]
    body = tag("tbody", rows)
    whole = tag("table", tag("thead", tag("tr", heads)), body, class_=class_)
    return tag("div", whole, class_="scrolls", tabindex="0", role="group", aria_label="table")


def _cell(cell: str, place: int, numbers: Table) -> Safe:
    if place == 0 and numbers.texts:
        return tag("th", cell, scope="row")
    return tag("td", cell, class_=None if place < numbers.texts else "num")


def mark(index: int, x: float, y: float, *, says: str = "", size: float = 4.2) -> Safe:
    """Return an arm's mark, a colour and a shape; `says` is shown under the pointer."""
    shape = SHAPES[index % ARMS_TOLD_APART]
    title = tag("title", says) if says else None
    common = {"class_": f"mark {shape}", "data_says": says or None}
    if shape in ("circle", "ring"):
        return tag("circle", title, cx=x, cy=y, r=size, **common)
    corners = {
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "triangle": [(0, -1.2), (1.1, 0.85), (-1.1, 0.85)],
        "diamond": [(0, -1.3), (1.1, 0), (0, 1.3), (-1.1, 0)],
        "cross": [(-0.4, -1.1), (0.4, -1.1), (0.4, -0.4), (1.1, -0.4), (1.1, 0.4), (0.4, 0.4),
                  (0.4, 1.1), (-0.4, 1.1), (-0.4, 0.4), (-1.1, 0.4), (-1.1, -0.4), (-0.4, -0.4)],
    }[shape]  # fmt: skip
    places = " ".join(f"{x + size * dx:.2f},{y + size * dy:.2f}" for dx, dy in corners)
    return tag("polygon", title, points=places, **common)


def key_of_arms(names: Iterable[tuple[int, str]]) -> Safe:
    """Return the key: every arm with its line and its mark."""
    entries = []
    for index, name in names:
        line = tag("line", class_="curve", x1=1.0, x2=31.0, y1=8.0, y2=8.0)
        drawn = tag("svg", line, mark(index, 16, 8), viewBox="0 0 32 16", aria_hidden="true")
        entries.append(tag("li", drawn, name, class_=arm_class(index)))
    return tag("ul", entries, class_="key")


def key_of_fills(fills: Iterable[tuple[str, str]]) -> Safe:
    """Return the key of filled marks: (class, what it is)."""
    entries = []
    for class_, meaning in fills:
        box = tag("rect", class_=class_, x=0.5, y=2.5, width=13.0, height=11.0)
        drawn = tag("svg", box, viewBox="0 0 14 16", aria_hidden="true")
        entries.append(tag("li", drawn, meaning))
    return tag("ul", entries, class_="key")


def arm_class(index: int) -> str:
    """Return the class that gives an arm's marks their colour and dash."""
    return f"arm arm-{index % ARMS_TOLD_APART}"


def section(name: str, title: str, *children: Safe | None) -> Safe:
    """Return a section with its heading; nothing at all if there is nothing in it."""
    inside = [child for child in children if child]
    if not inside:
        return Safe("")
    return tag("section", tag("h2", title), join(inside), id=name)


def figures(of: Iterable[Safe]) -> Safe:
    """Return figures side by side where there is room."""
    found = [one for one in of if one]
    return tag("div", found, class_="figures") if found else Safe("")
