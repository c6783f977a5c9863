"""`iterscope sql`: one SELECT over the record, as a table for people, JSON or CSV for programs.

Owns the command's flags and exit codes; server/cli.py calls `run_sql_command`. Where the answer
comes from is server/source.py's choice, how it looks server/terminal.py's, which SELECT a name
stands for telemetry/named.py's. Must never write.
"""

import argparse
import sys

from server.named_flags import add_query_flags, bind_query, pairs_of, readable, show_queries
from server.source import NoAnswer, add_source_flags, source_of
from server.terminal import ANSWERED, MISUSE, WRONG, refuse, show_answer
from telemetry.named import Bound, ParameterError


def add_sql_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope sql`."""
    parser.add_argument("sql", nargs="?", help="one SELECT; tables are described in SCHEMA.md")
    add_query_flags(parser)
    add_source_flags(parser)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print the answer as JSON")
    shape.add_argument("--csv", action="store_true", help="print the answer as CSV")


def run_sql_command(args: argparse.Namespace) -> int:
    """Answer `args.sql` or `args.query`; 0 when answered, 1 without an answer, 2 for misuse."""
    if args.list:
        show_queries()
        return ANSWERED
    try:
        bound = _asked(args)
    except ParameterError as error:
        return refuse(f"sql: {error}", MISUSE)
    if not bound.sql.strip():
        return refuse("sql: the query is empty", MISUSE)
    try:
        with source_of(args) as source:
            answer = source.ask(bound.sql, bound.parameters)
    except NoAnswer as error:
        return refuse(str(error), WRONG)
    if args.json:
        sys.stdout.write(answer.json().decode() + "\n")
    elif args.csv:
        sys.stdout.write(answer.csv())
    else:
        show_answer(readable(answer) if args.query else answer)
    if args.csv and answer.truncated:
        refuse(f"only the first {answer.row_count} rows: there are more", ANSWERED)
    return ANSWERED


def _asked(args: argparse.Namespace) -> Bound:
    if args.query is not None:
        if args.sql is not None:
            raise ParameterError("--query", "takes no SELECT beside it")
        return bind_query(args.query, pairs_of(args.parameters))
    if args.parameters:
        raise ParameterError("-p", "is for a named query: --query NAME")
    return Bound(sql=args.sql or "", parameters=[])
