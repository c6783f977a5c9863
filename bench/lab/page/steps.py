"""What the engine did, step by step: the batch over time, single rounds, and what a step costs.

Owns which runs are shown of all that were measured, and their captions; bench/lab/report.py puts
the section into the page. All of it is drawn from the engine's records. Computes no statistic.
"""

from typing import Any

from bench.lab.page.arms import (
    Result,
    closest,
    in_order,
    place_of,
    rate_in_words,
)
from bench.lab.page.course import course
from bench.lab.page.figure import (
    Table,
    Told,
    figure,
    figures,
    key_of_arms,
    key_of_fills,
    section,
)
from bench.lab.page.fit import in_words, step_times
from bench.lab.page.markup import Safe, join, tag
from bench.lab.page.numbers import plain, valued
from bench.lab.page.rounds import held_of, lanes_of, rounds, width_of

COURSES_MAX = 3
NEAR_CAPACITY = 0.9
COURSE_KEY = (
    ("fill rows", "rows that compute for someone"),
    ("fill idle", "idle rows: over, and computed on"),
    ("fill waiting", "requests that wait"),
)
ROUNDS_KEY = (
    ("prefill", "prefill, tokens of the prompt"),
    ("decode", "decode, one token"),
    ("held", "idle: over, its row goes on"),
    ("ends", "over"),
)


def steps(result: Result) -> Safe:
    """Return the section."""
    shown = _rounds(result)
    courses = _courses(result)
    return section(
        "steps",
        "What the engine did",
        join([shown]) if shown else None,
        figures(courses) or None,
        _step_time(result) or None,
    )


def _rounds(result: Result) -> Safe:
    found = result.get("rounds") or []
    fraction = closest({row["fraction"] for row in found}, NEAR_CAPACITY)
    picked: dict[str, Any] = {}
    for row in in_order(result, [row for row in found if row["fraction"] == fraction]):
        picked.setdefault(row["arm"], row)
    for row in in_order(result, found):  # an arm without that rate shows what it has
        picked.setdefault(row["arm"], row)
    if not picked:
        return Safe("")
    told = Told(
        name="rounds",
        title="Rounds as they were",
        unit="a lane a request, a column an iteration",
        caption=(
            "Consecutive iterations of one run of each arm, from the engine's records. A chevron "
            "is an admission, a bar an end. With continuous batching a request joins the next "
            "round and leaves at once; a fixed batch keeps the rows of the ended until the last "
            "is over, and nobody joins before."
        ),
    )
    drawn = [
        tag(
            "div",
            tag(
                "h4", row["arm"], tag("span", rate_in_words(result, row["fraction"]), class_="unit")
            ),
            tag("p", str(row.get("why") or ""), class_="why") if row.get("why") else None,
            rounds(told, row),
            class_=f"one rounds-{min(12, max(6, round(width_of(len(row['steps'])) / 60)))}",
        )
        for row in picked.values()
    ]
    return figure(told, [key_of_fills(ROUNDS_KEY), *drawn], _rounds_table(picked), wide=True)


def _rounds_table(picked: dict[str, Any]) -> Table:
    heads = [
        "arm",
        "step",
        "ms",
        "rows",
        "idle rows",
        "waiting",
        "admission stop",
        "joined",
        "over",
    ]
    rows = []
    for arm, row in picked.items():
        for step in row["steps"]:
            shown = " ".join(
                f"#{one['request']}:{one['kind'][0]}{one['tokens']}" for one in step["rows"]
            )
            rows.append(
                [
                    arm,
                    str(step["step"]),
                    plain(round(step["end_ms"] - step["begin_ms"], 2)),
                    shown,
                    str(step["idle_rows"]),
                    str(step["waiting"]),
                    step["admission_stop"],
                    " ".join(f"#{one}" for one in step["admitted"]),
                    " ".join(f"#{one}" for one in step["finished"]),
                ]
            )
    return Table(heads, rows, texts=9)


def idle_lanes(row: dict[str, Any]) -> int:
    """Return how many cells of a stretch are drawn as idle."""
    shown = row["steps"]
    return sum(len(held_of(request, shown)) for request in lanes_of(row, shown))


def _courses(result: Result) -> list[Safe]:
    found = [row for row in result.get("timelines") or [] if row["end_ms"]]
    fractions = sorted({row["fraction"] for row in found})
    if len(fractions) > COURSES_MAX:
        near = closest(set(fractions), NEAR_CAPACITY)
        fractions = sorted({fractions[0], near or fractions[1], fractions[-1]})
    drawn = []
    for number, fraction in enumerate(fractions):
        rows = in_order(result, [row for row in found if row["fraction"] == fraction])
        told = Told(
            name=f"course-{number}",
            title=f"Batch over time at {rate_in_words(result, fraction)}",
            unit="rows, and requests that wait",
            caption=(
                "Every step of one run of each arm, on the same scales; the same requests came at "
                "the same instants."
            ),
        )
        picture = [key_of_fills(COURSE_KEY), course(told, rows)]
        drawn.append(figure(told, picture, _course_table(rows), wide=True))
    return drawn


def _course_table(rows: list[dict[str, Any]]) -> Table:
    heads = ["arm", "steps", "busy", "rows, mean", "rows, most", "idle rows, mean", "waiting, most"]
    cells = []
    for row in rows:
        spent = [end - begin for begin, end in zip(row["begin_ms"], row["end_ms"], strict=True)]
        whole = sum(spent) or 1.0

        def mean(name: str, row: Any = row, spent: Any = spent, whole: Any = whole) -> str:
            total = sum(v * ms for v, ms in zip(row[name], spent, strict=True))
            return plain(round(total / whole, 2))

        cells.append(
            [
                row["arm"],
                plain(len(spent)),
                valued(whole, "ms"),
                mean("rows"),
                plain(max(row["rows"], default=0)),
                mean("idle_rows"),
                plain(max(row["waiting"], default=0)),
            ]
        )
    return Table(heads, cells)


def _step_time(result: Result) -> Safe:
    rows = [row for row in result.get("step_time") or [] if row["rows"]]
    if not rows:
        return Safe("")
    told = Told(
        name="step-time",
        title="What a row more costs",
        unit="ms a step of B rows",
        caption=(
            "Steps that only decoded, by their rows: the median, with a whisker to the 95th "
            "percentile. The line is T(B), a fixed part and a part for each row; at the knee they "
            "are equal. Left of it rows are almost free, right of it each lengthens all others' "
            "gaps. " + " ".join(in_words(row) for row in rows)
        ),
    )
    arms = [(place_of(result, row["arm"]), row) for row in rows]
    cells = [
        [row["arm"], str(size), valued(median, "ms"), valued(high, "ms"), plain(count)]
        for row in rows
        for size, median, high, count in zip(
            row["rows"], row["ms_p50"], row["ms_p95"], row["steps"], strict=True
        )
    ]
    heads = ["arm", "rows", "median", "p95", "steps"]
    picture = [key_of_arms([(place, row["arm"]) for place, row in arms]), step_times(told, arms)]
    return figure(told, picture, Table(heads, cells), wide=True)
