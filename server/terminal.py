"""What commands print for people: tables of answers, one-line refusals, no control characters.

Owns the table's look and the cleaning of text; the commands of `iterscope` call it. Names and texts
in the record were given by strangers: must never let one reach a terminal as anything but text.
"""

import sys
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from telemetry.answer import Answer

ANSWERED, WRONG, MISUSE = 0, 1, 2
"""Exit codes: fine; something is wrong or there is no answer; the command was misused."""

CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
NUMBERS = ("BIGINT", "INTEGER", "DOUBLE", "HUGEINT", "DECIMAL")


def show_answer(answer: Answer) -> None:
    """Print an answer as a table, and how many rows it has."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in answer.columns:
        number = column["type"].startswith(NUMBERS)
        right = number and not column["type"].endswith("]")
        table.add_column(
            Text(printable(column["name"])),
            justify="right" if right else "left",
            overflow="fold",
        )
    for row in answer.rows:
        table.add_row(*(_cell(value) for value in row))
    console = open_console()
    console.print(table)
    more = ", there is more" if answer.truncated else ""
    rows = "1 row" if answer.row_count == 1 else f"{answer.row_count} rows"
    console.print(Text(f"{rows}{more} ({answer.elapsed_ms:.1f} ms)", style="dim"))


def open_console() -> Console:
    """Return a console for standard output; without a terminal it folds nothing, for grep."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)


def _cell(value: Any) -> Text:
    if value is None:
        return Text("null", style="dim")
    if isinstance(value, list | dict):
        return Text(printable(msgspec.json.encode(value).decode()))
    return Text(printable(str(value)))


def printable(text: str) -> str:
    """Return the text with each control character as an escape."""
    return text.translate(CONTROL)


def refuse(message: str, code: int) -> int:
    """Print one line on standard error and return the exit code."""
    sys.stderr.write(f"iterscope: {printable(message)}\n")
    return code
