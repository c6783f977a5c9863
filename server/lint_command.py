"""`iterscope lint`: every lint and law over a range of the record; rows only where it is wrong.

Owns the command's flags, what it prints and its exit codes; server/cli.py calls `run_lint_command`.
What is wrong is decided in telemetry/sql/lint/ and telemetry/sql/law/ alone. Must never call a
record healthy that it could not read.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.text import Text

from server.named_flags import add_parameter_flag, pairs_of, readable
from server.range_flags import add_range_flags, range_of, spans_in
from server.source import NoAnswer, Source, add_source_flags, source_of
from server.terminal import ANSWERED, MISUSE, WRONG, open_console, refuse, show_answer
from telemetry.answer import Answer
from telemetry.named import Bound, NamedQuery, ParameterError, of_kind
from telemetry.spans import BadRange, TimeRange

LAST_S = 3600.0
ROWS_SHOWN = 20

Finding = tuple[NamedQuery, Answer]


def add_lint_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope lint`."""
    names = ", ".join(query.name for query in of_kind("lint", "law"))
    parser.description = f"Find what is wrong; without a range, in the last hour on record: {names}"
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these lints and laws")
    add_parameter_flag(parser, "a threshold, for each lint that takes it")
    add_range_flags(parser)
    add_source_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run_lint_command(args: argparse.Namespace) -> int:
    """Run the lints; 0 when nothing is wrong, 1 when something is or nobody answers, 2 misuse."""
    try:
        asked = range_of(args)
        lints = bind_lints(args.names, window_of(asked), pairs_of(args.parameters))
    except (BadRange, ParameterError) as error:
        return refuse(f"lint: {error}", MISUSE)
    try:
        with source_of(args) as source:
            if asked.from_unix_us or asked.to_unix_us:
                spans_in(source, asked)  # a range without a record is not a healthy one
            findings = _run(source, lints, args.run_id)
            name = source.name
    except (NoAnswer, BadRange) as error:
        return refuse(str(error), WRONG)
    if args.json:
        _print_json(name, lints, findings)
    else:
        _print(name, lints, findings)
    return WRONG if findings else ANSWERED


def window_of(asked: TimeRange) -> dict[str, object]:
    """Return the window's parameters of a range from the flags; the last hour if there is none."""
    window = {
        "from_unix_us": asked.from_unix_us,
        "to_unix_us": asked.to_unix_us,
        "last_s": LAST_S if asked.last_us is None else asked.last_us / 1e6,
        "run_id": asked.run_id,
    }
    return {name: value for name, value in window.items() if value is not None}


def bind_lints(
    names: list[str], window: Mapping[str, object], thresholds: Mapping[str, object]
) -> list[tuple[NamedQuery, Bound]]:
    """Return the lints of these names, all without any, each with the thresholds it takes."""
    known = {query.name: query for query in of_kind("lint", "law")}
    for name in names:
        if name not in known:
            raise ParameterError(name, f"there is no such lint; there are {', '.join(known)}")
    chosen = [query for query in known.values() if not names or query.name in names]
    takes = {query.name: {parameter.name for parameter in query.parameters} for query in chosen}
    for name in thresholds:
        if name in window or not any(name in taken for taken in takes.values()):
            raise ParameterError(name, "no chosen lint takes it as a threshold")
    return [
        (
            query,
            query.bind(
                {
                    **window,
                    **{key: thresholds[key] for key in thresholds if key in takes[query.name]},
                }
            ),
        )
        for query in chosen
    ]


def _run(
    source: Source, lints: list[tuple[NamedQuery, Bound]], run_id: str | None
) -> list[Finding]:
    runs = source.ask("SELECT count(*) FROM run WHERE $1 IS NULL OR run_id = $1", [run_id])
    if runs.rows == [[0]]:
        raise NoAnswer(f"{source.name} has no record of {run_id or 'any run'}")
    findings = []
    for query, bound in lints:
        try:
            answer = source.ask(bound.sql, bound.parameters)
        except NoAnswer as error:
            raise NoAnswer(f"{query.name}: {error}") from error
        if answer.rows:
            findings.append((query, answer))
    return findings


def _print(name: str, lints: list[tuple[NamedQuery, Bound]], findings: list[Finding]) -> None:
    console = open_console()
    for query, answer in findings:
        console.print(Text(f"{query.name}: {query.title}", style="bold red"))
        console.print(Text(query.meaning))
        few = answer.rows[:ROWS_SHOWN]
        more = answer.truncated or len(few) < len(answer.rows)
        shown = msgspec.structs.replace(answer, rows=few, row_count=len(few), truncated=more)
        show_answer(readable(shown))
        console.print()
    wrong = f"{len(findings)} of {len(lints)} found something wrong"
    console.print(Text(f"{name}: {wrong if findings else f'nothing wrong in {len(lints)} checks'}"))


def _print_json(name: str, lints: list[tuple[NamedQuery, Bound]], findings: list[Finding]) -> None:
    told: dict[str, Any] = {
        "source": name,
        "healthy": not findings,
        "checked": [query.name for query, _ in lints],
        "findings": [
            {
                "name": query.name,
                "kind": query.kind,
                "title": query.title,
                "meaning": query.meaning,
                "columns": answer.columns,
                "rows": answer.rows,
                "truncated": answer.truncated,
            }
            for query, answer in findings
        ],
    }
    sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
