"""Consecutive iterations of one run as a picture: a lane a request, a column a round.

Owns that picture, which says in one look what a batching mode does: who joins in the middle, who
leaves, which rows go on for nobody. It is drawn from records, none of it is made up. Knows no more
of a result than one of its rounds.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from bench.lab.page.figure import Told, picture
from bench.lab.page.markup import Safe, tag
from bench.lab.page.numbers import NOTHING, plain

LANES_MAX, ROUNDS_MAX = 16, 12
LEFT, COLUMN_PX, LANE_PX, TOP = 96.0, 46.0, 20.0, 46.0
FOOT_PX = 54.0


def width_of(steps: int) -> float:
    """Return how wide a picture of so many rounds is."""
    return LEFT + COLUMN_PX * steps + 10


def rounds(told: Told, shown: dict[str, Any]) -> Safe:
    """Return the picture of one stretch of iterations."""
    steps = shown["steps"][:ROUNDS_MAX]
    lanes = lanes_of(shown, steps)
    known = {row["request"] for step in steps for row in step["rows"]}
    known |= {request for step in steps for request in step["admitted"]}
    hidden = len(known) - len(lanes)
    others = others_of(lanes, steps)
    extra = (hidden > 0) + any(others)
    height = TOP + LANE_PX * (len(lanes) + extra) + FOOT_PX
    parts: list[Safe] = []
    for place, request in enumerate(lanes):
        parts += _lane(request, place, steps)
    if any(others):
        parts += _others(others, TOP + LANE_PX * len(lanes))
    if hidden > 0:
        y = TOP + LANE_PX * (len(lanes) + any(others)) + 14
        parts.append(tag("text", f"and {hidden} more", class_="tick", x=4, y=y))
    for place, step in enumerate(steps):
        parts += _column(step, place, height)
    for word, y in (("round", 16), ("ms", 32)):
        parts.append(tag("text", word, class_="tick end", x=LEFT - 10, y=y))
    for word, y in (("idle rows", height - 38), ("waiting", height - 22), ("stop", height - 6)):
        parts.append(tag("text", word, class_="tick end", x=LEFT - 10, y=y))
    return picture(told, parts, width=width_of(len(steps)), height=height)


def lanes_of(shown: dict[str, Any], steps: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the requests that are drawn, in the order of their first row."""
    present = {row["request"] for step in steps for row in step["rows"]}
    order = [request for request in shown["requests"] if request in present]
    return (order + sorted(present - set(order)))[:LANES_MAX]


def held_of(request: Any, steps: Sequence[dict[str, Any]]) -> set[int]:
    """Return the rounds in which a request's row goes on though it is over.

    A fixed batch keeps the rows of the ended: whoever had rows before, has none now, and stands in
    no later round while the batch still counts idle rows.
    """
    had = [any(row["request"] == request for row in step["rows"]) for step in steps]
    told = {
        place
        for place, step in enumerate(steps)
        if any(row["request"] == request and row["kind"] == "idle" for row in step["rows"])
    }
    if True not in had:
        return told
    last = len(had) - 1 - had[::-1].index(True)
    for place in range(last + 1, len(steps)):
        if not steps[place]["idle_rows"]:
            break
        told.add(place)
    return told


def others_of(lanes: Sequence[Any], steps: Sequence[dict[str, Any]]) -> list[int]:
    """Return how many idle rows of each round belong to requests that have no lane."""
    held = [held_of(request, steps) for request in lanes]
    return [
        max(0, step["idle_rows"] - sum(place in one for one in held))
        for place, step in enumerate(steps)
    ]


def _others(others: Sequence[int], top: float) -> Iterator[Safe]:
    yield tag("text", "over before", class_="tick end", x=LEFT - 10, y=top + LANE_PX / 2 + 4)
    for column, count in enumerate(others):
        if count:
            x = LEFT + COLUMN_PX * column
            says = f"{count} idle rows of requests that were over before"
            box = tag("rect", class_="held", x=x + 3, y=top + 2, width=COLUMN_PX - 6, height=16)
            number = tag("text", plain(count), class_="count halo", x=x + COLUMN_PX / 2, y=top + 14)
            yield tag("g", tag("title", says), box, number, data_says=says)


def _lane(request: Any, place: int, steps: Sequence[dict[str, Any]]) -> Iterator[Safe]:
    top = TOP + LANE_PX * place
    middle = top + LANE_PX / 2
    end = LEFT + COLUMN_PX * len(steps)
    yield tag("line", class_="rule", x1=LEFT, x2=end, y1=middle, y2=middle)
    yield tag("text", f"#{request}", class_="tick end", x=LEFT - 10, y=middle + 4)
    held = held_of(request, steps)
    for column, step in enumerate(steps):
        x = LEFT + COLUMN_PX * column
        for row in step["rows"]:
            if row["request"] == request and row["kind"] != "idle":
                yield _cell(row, x, top)
        if column in held:
            yield tag("rect", class_="held", x=x + 3, y=top + 4, width=COLUMN_PX - 6, height=12)
        if request in step["admitted"]:
            yield tag("path", class_="joins", d=f"M{x - 1:g} {top + 3:g}l5 7l-5 7")
        if request in step["finished"]:
            yield tag("rect", class_="ends", x=x + COLUMN_PX - 2.5, y=top + 2, width=3.0, height=16)


def _cell(row: dict[str, Any], x: float, top: float) -> Safe:
    says = f"#{row['request']}: {row['kind']}, {plain(row['tokens'])} tokens"
    kind = "prefill" if row["kind"] == "prefill" else "decode"
    if kind == "decode":
        box = tag("rect", class_="decode", x=x + 3, y=top + 4, width=COLUMN_PX - 6, height=12)
        return tag("g", tag("title", says), box, data_says=says)
    box = tag("rect", class_="prefill", x=x + 3, y=top + 2, width=COLUMN_PX - 6, height=16)
    number = tag("text", plain(row["tokens"]), class_="inside", x=x + COLUMN_PX / 2, y=top + 14)
    return tag("g", tag("title", says), box, number, data_says=says)


def _column(step: dict[str, Any], place: int, height: float) -> Iterator[Safe]:
    x = LEFT + COLUMN_PX * place
    middle = x + COLUMN_PX / 2
    yield tag("line", class_="rule", x1=x, x2=x, y1=TOP - 6, y2=height - FOOT_PX + 4)
    took = plain(float(f"{step['end_ms'] - step['begin_ms']:.3g}"))
    stop = step["admission_stop"].removeprefix("no_").replace("batch_closed", "closed")
    for word, y, kind in (
        (str(place + 1), 16.0, "tick middle strong"),
        (took, 32.0, "tick middle"),
        (plain(step["idle_rows"]), height - 38, "tick middle"),
        (plain(step["waiting"]), height - 22, "tick middle"),
        (NOTHING if stop == "waiting" else stop, height - 6, "tick middle"),
    ):
        yield tag("text", word, class_=kind, x=middle, y=y)
