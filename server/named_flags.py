"""The flags that choose a named query and its values: `--query NAME`, `-p KEY=VALUE`, `--list`.

Owns their help, their reading, the list and the answers that people see; `iterscope sql` and
`iterscope lint` use them. What a value may be is telemetry/named.py's to say. Asks no record.
"""

import argparse
from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from server.terminal import open_console
from telemetry.answer import Answer
from telemetry.named import Bound, ParameterError, catalogue

INSTANT = "_unix_us"
EPOCH = datetime(1970, 1, 1)
"""Without a zone: the column's name says that it is UTC."""


def add_parameter_flag(parser: argparse.ArgumentParser, what: str) -> None:
    """Give the parser `-p KEY=VALUE`, to be given once for each value."""
    parser.add_argument(
        "-p", dest="parameters", action="append", default=[], metavar="KEY=VALUE", help=what
    )


def add_query_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags that ask a named query."""
    parser.add_argument("--query", metavar="NAME", help="a named query instead of a SELECT")
    add_parameter_flag(parser, "a parameter of the named query")
    parser.add_argument("--list", action="store_true", help="list the named queries")


def bind_query(name: str, given: Mapping[str, object]) -> Bound:
    """Return a named query with its values; raises ParameterError."""
    query = catalogue().get(name)
    if query is None:
        raise ParameterError(name, "there is no such query; --list names them")
    return query.bind(given)


def pairs_of(texts: list[str]) -> dict[str, object]:
    """Return `key=value` texts as parameters; raises ParameterError."""
    given: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ParameterError(text, "is not KEY=VALUE")
        if name in given:
            raise ParameterError(name, "is given twice")
        given[name] = value
    return given


def readable(answer: Answer) -> Answer:
    """Return an answer for people: instants of the wall clock as UTC text, not as microseconds."""
    names = [column["name"] for column in answer.columns]
    places = [place for place, name in enumerate(names) if name.endswith(INSTANT)]
    columns = [
        {"name": name.removesuffix(INSTANT) + "_utc", "type": "VARCHAR"}
        if place in places
        else column
        for place, (name, column) in enumerate(zip(names, answer.columns, strict=True))
    ]
    rows = [
        [_utc(value) if place in places else value for place, value in enumerate(row)]
        for row in answer.rows
    ]
    return msgspec.structs.replace(answer, columns=columns, rows=rows)


def _utc(unix_us: int | None) -> str | None:
    if unix_us is None:
        return None
    try:
        instant = EPOCH + timedelta(microseconds=unix_us)
    except OverflowError:  # a clock, or a record, that is far off: shown as it is
        return str(unix_us)
    return instant.isoformat(sep=" ", timespec="milliseconds")


def show_queries() -> None:
    """Print every named query with its meaning and what it takes."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in ("kind", "query", "what it says", "takes"):
        table.add_column(head, overflow="fold")
    for query in catalogue().values():
        takes = " ".join(p.name + ("" if p.required else "?") for p in query.parameters)
        table.add_row(query.kind.replace("_", "-"), query.name, query.meaning, takes)
    open_console().print(table)
