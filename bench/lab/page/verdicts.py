"""What came out: the headline, a verdict for each hypothesis with its evidence, the comparisons.

Owns how verdicts and evidence are worded and drawn; bench/lab/report.py puts them into the page.
A verdict stands with the query it rests on, its parameters and its rows, so that a reader can ask
again. Decides nothing: verdicts are the result's.
"""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from bench.lab.curves import open_ended
from bench.lab.page.arms import (
    Result,
    baseline_of,
    counted_in_words,
    names_of,
    objective_in_words,
    place_of,
    rate_in_words,
)
from bench.lab.page.bars import Ratio, forest
from bench.lab.page.figure import Table, Told, arm_class, figure, figures, section, table
from bench.lab.page.markup import Safe, join, tag
from bench.lab.page.numbers import NOTHING, counted, plain, ratio, sentence, times, valued

EVIDENCE_ROWS = 24
WORDS = MappingProxyType(
    {
        "holds": ("✓", "holds"),
        "fails": ("✕", "fails"),
        "mixed": ("◐", "mixed"),
        "changed": ("≠", "changed"),
    }
)
UNKNOWN = ("?", "not known")
AT_LEAST = "\N{GREATER-THAN OR EQUAL TO}"
FORESTS = (
    "output_tok_s",
    "goodput_requests_s",
    "ttft_p99_ms",
    "tpot_p99_ms",
    "itl_p99_ms",
    "e2e_p50_ms",
)


def headline(result: Result) -> Safe:
    """Return what a reader wants first: throughput at the objective, by arm."""
    tiles = [tile for name in names_of(result) if (tile := _tile(result, name))]
    if not tiles:
        return Safe("")
    says = f"Highest rate served within the objective: {objective_in_words(result)}."
    says += f" {counted_in_words()}"
    return tag(
        "div", tag("p", says, class_="what"), tag("ul", tiles, class_="tiles"), id="headline"
    )


def _tile(result: Result, name: str) -> Safe | None:
    point = next((r for r in result.get("operating_points") or [] if r["arm"] == name), None)
    if point is None:
        return None
    at_slo = point.get("at_slo_requests_s")
    paired = [r for r in result.get("at_slo") or [] if r["figure"] == "at_slo_requests_s"]
    against = next((row for row in paired if row["arm"] == name), None)
    # Where repeats are whole their mean is told, the one that ratios and the summary speak of.
    if name == baseline_of(result) and paired:
        at_slo = paired[0]["baseline_mean"]
    elif against:
        at_slo = against["arm_mean"]
    if name == baseline_of(result):
        beside = "the baseline"
    elif against and {name, against["baseline"]} & open_ended(result):
        beside = "no ratio: the highest rate is no limit"
    elif against and against.get("value") is not None:
        beside = (
            f"{times(against)} of {against['baseline']}"
            if against["kind"] == "ratio"
            else (f"{times(against)} requests/s against {against['baseline']}")
        )
    else:
        beside = "cannot be compared"
    value = "none" if at_slo is None else plain(float(f"{at_slo:.3g}"))
    if at_slo is not None and not point.get("interpolated"):
        value = f"{AT_LEAST} {value}"  # the highest rate that was measured still kept it
    good = point.get("goodput_requests_s")
    best = f"best goodput {valued(None if good is None else float(f'{good:.3g}'), 'requests/s')}"
    return tag(
        "li",
        tag("span", name, class_="name"),
        tag(
            "span",
            value,
            tag("span", "requests/s" if at_slo is not None else "", class_="unit"),
            class_="big",
        ),
        tag("span", beside, class_="beside"),
        tag("span", f"{best} at {rate_in_words(result, point['fraction'])}", class_="beside faint"),
        class_=arm_class(place_of(result, name)),
    )


def verdicts(result: Result) -> Safe:
    """Return the section of hypotheses."""
    found = result.get("hypotheses") or []
    return section("verdicts", "Verdicts", *(_hypothesis(result, one) for one in found))


def _hypothesis(result: Result, one: Result) -> Safe:
    glyph, word = WORDS.get(one["verdict"], UNKNOWN)
    compared = result.get("comparisons") or []
    rows = [compared[index] for index in one.get("comparisons") or [] if index < len(compared)]
    evidence = one.get("evidence") or []
    inside = [
        table(comparison_table(result, rows)) if rows else None,
        *(_evidence(result, piece) for piece in evidence),
    ]
    kept = [part for part in inside if part]
    beside = counted(len(rows), "comparison")
    if evidence:
        beside += f", {counted(len(evidence), 'answer')} of the record"
    return tag(
        "article",
        tag("h3", tag("span", glyph, " ", word, class_=f"verdict {one['verdict']}"), one["claim"]),
        tag("p", one["question"], class_="question") if one.get("question") else None,
        *_because(str(one["because"])),
        tag(
            "details",
            tag("summary", "Evidence", tag("span", beside, class_="unit")),
            join(kept),
            class_="evidence",
        )
        if kept
        else None,
        class_="hypothesis",
    )


def _because(words: str) -> Iterator[Safe]:
    """Yield a reason, the figures that follow its colon as a list."""
    said, colon, figures_told = words.partition(": ")
    pieces = figures_told.rstrip(".").split("; ")
    if not colon or len(pieces) < 2:
        yield tag("p", sentence(words))
        return
    yield tag("p", sentence(said).rstrip(".") + ":")
    yield tag("ul", [tag("li", piece) for piece in pieces], class_="because")


def _evidence(result: Result, piece: Result) -> Safe:
    columns = [str(column) for column in piece.get("columns") or []]
    rows = piece.get("rows") or []
    shown = [[_cell(value) for value in row] for row in rows[:EVIDENCE_ROWS]]
    more = len(rows) - len(shown)
    where = f"{piece.get('arm')}, {rate_in_words(result, piece.get('fraction'))}"
    if piece.get("repeat") is not None:
        where += f", repeat {plain(piece['repeat'])}"
    numeric = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    texts = next((i for i, is_number in enumerate(numeric) if is_number), len(columns))
    values = ", ".join(str(value) for value in piece.get("parameters") or [])
    return tag(
        "div",
        tag("h4", str(piece.get("title") or "query"), tag("span", where, class_="unit")),
        tag("pre", str(piece.get("sql") or "").strip(), class_="sql"),
        tag("p", f"with {values}", class_="faint") if values else None,
        tag("details", tag("summary", "Ask again"), tag("pre", str(piece["command"])))
        if piece.get("command")
        else None,
        table(Table(columns, shown, texts=texts)) if columns else None,
        tag("p", f"and {more} rows more", class_="faint") if more > 0 else None,
        class_="piece",
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return plain(value)
    return "" if value is None else str(value)


def comparisons(result: Result) -> Safe:
    """Return the section of paired comparisons."""
    rows = result.get("comparisons") or []
    if not rows:
        return Safe("")
    drawn = [_forest(result, name) for name in FORESTS]
    told = tag(
        "p",
        "Runs of one repeat and rate stand next to each other in time and got the same requests, "
        "so each arm is compared with the baseline within the pair. Whiskers are 95 % intervals; "
        "a hollow mark is a change that chance explains, after Holm's correction over the whole "
        "family.",
        class_="what",
    )
    whole = tag(
        "details",
        tag("summary", "Every comparison", tag("span", plain(len(rows)), class_="unit")),
        table(comparison_table(result, rows)),
        class_="numbers",
    )
    return section("comparisons", "Compared in pairs", told, figures(drawn) or None, whole)


def _forest(result: Result, name: str) -> Safe:
    rows = [row for row in _of_figure(result, name) if row["kind"] == "ratio" and row["value"]]
    if not rows:
        return Safe("")
    meant = (result.get("figures") or {}).get(name) or {}
    better = {"more": "right is better", "less": "left is better"}.get(str(meant.get("better")), "")
    title = str(meant.get("title", name))
    told = Told(
        name=f"compared-{name}",
        title=sentence(title).rstrip("."),
        unit=f"times, {better}" if better else "times",
        caption=f"Against {baseline_of(result)}, by rate; {ratio(1.0)} is no difference.",
    )
    ratios = [
        Ratio(
            group=rate_in_words(result, row["fraction"]),
            name=row["arm"],
            index=place_of(result, row["arm"]),
            value=row["value"],
            low=row["low"],
            high=row["high"],
            sure=bool(row["holm"]),
            says=f"{row['arm']} at {rate_in_words(result, row['fraction'])}: {times(row)}",
        )
        for row in rows
    ]
    return figure(told, [forest(told, ratios, baseline_of(result))], comparison_table(result, rows))


def _of_figure(result: Result, name: str) -> Iterator[Result]:
    rows = [row for row in result["comparisons"] if row["figure"] == name]
    yield from sorted(rows, key=lambda row: (row["fraction"] or 0.0, place_of(result, row["arm"])))


def comparison_table(result: Result, rows: list[Result]) -> Table:
    """Return comparisons as a table."""
    figures_told = result.get("figures") or {}
    cells = []
    for row in rows:
        meant = figures_told.get(row["figure"]) or {}
        unit = str(meant.get("unit", ""))
        cells.append(
            [
                str(meant.get("title", row["figure"])),
                rate_in_words(result, row["fraction"]),
                f"{row['arm']} / {row['baseline']}",
                str(row["verdict"])
                + ("" if row["holm"] or not row["significant"] else ", not after Holm"),
                valued(row["arm_mean"], unit),
                valued(row["baseline_mean"], unit),
                times(row),
                NOTHING if row["p"] is None else plain(float(f"{row['p']:.2g}")),
                str(row["pairs"]),
            ]
        )
    heads = [
        "figure",
        "rate",
        "arm / baseline",
        "verdict",
        "arm",
        "baseline",
        "change",
        "p",
        "pairs",
    ]
    return Table(heads, cells, texts=4)
