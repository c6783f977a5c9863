"""An experiment's result for a terminal: one table, the verdicts, and what limits them.

Owns what `iterscope lab` prints at its end; the report holds the rest. lab_command.py calls it.
Must never compute a figure: what is printed stands in the result.
"""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
        console.print(f"within the objective, {escape(_compared(row))}")
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
    found.add_column("mode", no_wrap=True)
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


def _compared(row: dict[str, Any]) -> str:
    unit = "requests/s" if row["figure"] == "at_slo_requests_s" else "tokens/s"
    told = f"{row['arm']} {row['arm_mean']:.2f} {unit}, {row['baseline']} "
    told += f"{row['baseline_mean']:.2f}: "
    if row["low"] is None:
        return told + f"{row['kind']} {row['value']:.2f}, one pair"
    return told + f"{row['kind']} {row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
