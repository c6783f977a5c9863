"""`iterscope diff A B`: two runs, windows or files compared, for people or as JSON.

Owns what A and B may be, the tables and the exit codes; telemetry/diff.py judges. A side is a
file, a window `FROM/TO`, a run_id or its beginning, `last` or `previous`; all but files are looked
up where --url, --history or --file say. Exits 1 when B is worse than chance allows.
"""

import argparse
import math
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from server.source import NoAnswer, Source, add_source_flags, file_source, source_of
from server.terminal import ANSWERED, MISUSE, WRONG, open_console, printable, refuse
from telemetry.diff import Change, Diff, Setting, compare
from telemetry.sides import Side, read_side
from telemetry.spans import BadRange, Span, TimeRange, shown, spans_named, spans_of

STYLES = {"worse": "bold red", "better": "bold green", "unknown": "dim"}
BAR_CELLS = 24
SHARE_MAX = 20
"""A change by more than so many times is not told in percent."""


def add_diff_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope diff`."""
    for name in ("a", "b"):
        parser.add_argument(
            name,
            metavar=name.upper(),
            help="a file, a window such as 15m/10m or FROM/TO, a run_id, `last` or `previous`",
        )
    add_source_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run_diff_command(args: argparse.Namespace) -> int:
    """Compare; 0 when B is not worse, 1 when it is or cannot be read, 2 for misuse."""
    try:
        with ExitStack() as opened:
            sides = _Sides(args, opened)
            read = [sides.read(text) for text in (args.a, args.b)]
    except NoAnswer as error:
        return refuse(str(error), WRONG)
    except BadRange as error:
        return refuse(f"diff: {error}", MISUSE)
    for text, (side, _) in zip((args.a, args.b), read, strict=True):
        if not side.requests.sum():
            return refuse(f"no request ended by itself in {text}", WRONG)
    (a, about_a), (b, about_b) = read
    diff = compare(a, b)
    if args.json:
        body = {"a": about_a, "b": about_b, "worse": diff.worse, "diff": diff}
        sys.stdout.write(msgspec.json.encode(body).decode() + "\n")
    else:
        _show(diff, about_a, about_b)
    return WRONG if diff.worse else ANSWERED


class _Sides:
    """Finds what A and B name; opens each source once, and only those that are needed."""

    def __init__(self, args: argparse.Namespace, opened: ExitStack) -> None:
        self._args = args
        self._opened = opened
        self._sources: dict[str, Source] = {}

    def read(self, text: str) -> tuple[Side, str]:
        """Return a side and what it is, in words."""
        path = Path(text).expanduser()
        if path.is_file():
            source = self._source(path)
            spans = spans_of(source.ask, TimeRange())
        else:
            source = self._source(Path(self._args.file).expanduser() if self._args.file else None)
            spans = _spans(source, text)
        first, last = spans[0].from_unix_us, spans[-1].to_unix_us
        runs = ", ".join(span.run_id for span in spans)
        return read_side(source.ask, spans), f"{text}: {runs} from {shown(first)} to {shown(last)}"

    def _source(self, file: Path | None) -> Source:
        key = str(file.resolve()) if file else ""
        if key not in self._sources:
            opened = file_source(file) if file else source_of(self._args)
            self._sources[key] = self._opened.enter_context(opened)
        return self._sources[key]


def _spans(source: Source, text: str) -> list[Span]:
    """Return what a text names; a server counts times ago from now, files from their end."""
    now: int | None = None
    if source.url is not None and "/" in text:
        now = source.ask("SELECT epoch_us(now())").rows[0][0]
    return spans_named(source.ask, text, now_unix_us=now)


# ---- for people


def _show(diff: Diff, about_a: str, about_b: str) -> None:
    console = open_console()
    for name, about in (("A", about_a), ("B", about_b)):
        console.print(Text(f"{name}  {printable(about)}"))
    if diff.settings:
        console.print(_settings_table(diff.settings))
    console.print(_figures_table(diff.figures))
    console.print(_waterfall(diff))
    for note in diff.notes:
        console.print(Text(note, style="yellow"))
    verdict = "B is worse than A" if diff.worse else "B is not worse than A"
    console.print(
        Text(f"{verdict}, beyond what blocks of time differ by anyway (95 %, all together)")
    )


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    return table


def _settings_table(settings: list[Setting]) -> Table:
    table = _table("setting", "A", "B")
    for setting in settings:
        values = (", ".join(map(str, values)) for values in (setting.a, setting.b))
        table.add_row(*(Text(printable(text)) for text in (setting.name, *values)))
    return table


def _figures_table(changes: list[Change]) -> Table:
    table = _table("figure", "A", "B", "", "change", "within", "")
    for change in changes:
        table.add_row(
            change.name, _number(change.a), _number(change.b), change.unit, *_change_cells(change)
        )
    return table


def _waterfall(diff: Diff) -> Table:
    table = _table("ms a request", "A", "B", "change", "within", "", "")
    table.columns[6].justify = "left"
    largest = max((abs(c.delta) for c in (*diff.causes, diff.workload)), default=0.0) or 1.0
    for change in (diff.request, *diff.causes, diff.workload):
        cells = round(BAR_CELLS * min(1.0, abs(change.delta) / largest))
        bar = Text("█" * cells, style="red" if change.delta > 0 else "green")
        table.add_row(
            change.name,
            _number(change.a),
            _number(change.b),
            *_change_cells(change),
            Text("") if change is diff.request else bar,
        )
    return table


def _change_cells(change: Change) -> tuple[Text, str, Text]:
    within = "" if change.low is None else f"{_signed(change.low)} .. {_signed(change.high)}"
    known = change.a > 0 and abs(change.delta) < SHARE_MAX * change.a
    share = f" ({change.delta / change.a:+.1%})" if known else ""
    style = STYLES.get(change.verdict, "")
    word = "" if change.verdict == "same" else change.verdict
    return Text(_signed(change.delta) + share, style=style), within, Text(word, style=style)


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def _signed(value: float | None) -> str:
    return "" if value is None else ("+" if value >= 0 else "") + _number(value)
