"""An experiment's result for a terminal: one table, the verdicts, and what limits them.

Owns what `iterscope lab` prints at its end; the report holds the rest. lab_command.py calls it.
Must never compute a figure: what is printed stands in the result.
"""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.lab.curves import open_ended

COLUMNS = (
    ("output_tok_s", "tokens/s", 1),
    ("ttft_p50_ms", "first token p50 ms", 0),
    ("ttft_p99_ms", "p99 ms", 0),
    ("itl_p99_ms", "gap p99 ms", 1),
    ("goodput_share", "in time", 2),
    ("useful_rows_share", "useful rows", 2),
    ("unfinished_share", "cut off", 2),
)
NARROW = 100
"""Characters: below, a terminal is too narrow for all figures."""


def show(result: dict[str, Any], console: Console) -> None:
    """Print the result."""
    console.print(table(result, narrow=console.width < NARROW))
    capacity = result["capacity"]
    if capacity:
        console.print(
            f"capacity of {escape(capacity['arm'])}: {capacity['requests_s']:.2f} requests/s, "
            f"{capacity['output_tok_s']:.0f} tokens/s"
        )
    for row in result["at_slo"]:
        console.print(f"within the objective, {escape(at_slo_in_words(result, row))}")
    for one in result["hypotheses"]:
        told = escape(f"{one['claim']} {one['because']}")
        console.print(f"[bold]{one['verdict']:>7}[/]  {told}", soft_wrap=True)
    equal = result["equality"]
    console.print(
        f"the same tokens in {equal['same']} of {equal['checked']} answers compared"
        + ("" if equal["allowed"] else "; some differ by more than rounding explains")
    )
    for note in result["notes"]:
        console.print(f"[dim]- {escape(note)}[/]", soft_wrap=True)


def table(result: dict[str, Any], *, narrow: bool = False) -> Table:
    """Return one line for each arm at each rate, mean over repeats."""
    found = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    # What was cut off stands in the notes as well.
    columns = COLUMNS[:-1] if narrow else COLUMNS
    found.padding = (0, 0) if narrow else (0, 1)
    found.add_column("x capacity", justify="right")
    found.add_column("requests / s", justify="right")
    found.add_column("arm", no_wrap=True)
    for _, title, _ in columns:
        # Words of a title may stand below each other, a figure is never broken.
        found.add_column(title, justify="right", min_width=max(map(len, title.split())))
    for curve in sorted(result["curves"], key=lambda curve: float(curve["fraction"])):
        cells = [_mean(curve["figures"].get(name), digits) for name, _, digits in columns]
        found.add_row(
            f"{curve['fraction']:g}",
            f"{curve['requests_s']:.2f}",
            escape(str(curve["arm"])),
            *cells,
        )
    return found


def _mean(figure: dict[str, Any] | None, digits: int) -> str:
    return "" if figure is None else f"{figure['mean']:,.{digits}f}"


def at_slo_in_words(result: dict[str, Any], row: dict[str, Any]) -> str:
    """Return what the objective allows an arm and the baseline.

    Who kept it at the highest rate that was run is told as "at least", and is in no ratio.
    """
    unit = "requests/s" if row["figure"] == "at_slo_requests_s" else "tokens/s"
    kept = open_ended(result)
    told = []
    for name, mean in ((row["arm"], row["arm_mean"]), (row["baseline"], row["baseline_mean"])):
        least = "at least " if name in kept else ""
        told.append(f"{name} {least}{mean:.2f}")
    whole = f"{told[0]} {unit}, {told[1]}: "
    if kept & {row["arm"], row["baseline"]}:
        return whole + "no ratio, the highest rate that was run is no limit"
    # Of pairs, so that it need not be the means' own.
    whole += f"mean {row['kind']} {row['value']:.2f}"
    if row["low"] is None:
        return f"{whole}, one pair"
    return f"{whole} ({row['low']:.2f} to {row['high']:.2f})"
