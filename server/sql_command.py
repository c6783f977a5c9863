"""`iterscope sql`: one SELECT over the record, as a table for people or as JSON for programs.

Owns the command's flags and exit codes; server/cli.py calls `run_sql_command`. Where the answer
comes from is server/source.py's choice, how it looks server/terminal.py's. Must never write.
"""

import argparse
import sys

import msgspec

from server.source import NoAnswer, add_source_flags, source_of
from server.terminal import ANSWERED, MISUSE, WRONG, refuse, show_answer


def add_sql_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope sql`."""
    parser.add_argument("sql", help="one SELECT; tables are described in SCHEMA.md")
    add_source_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run_sql_command(args: argparse.Namespace) -> int:
    """Answer `args.sql`; 0 when answered, 1 when there is no answer, 2 for misuse."""
    if not args.sql.strip():
        return refuse("sql: the query is empty", MISUSE)
    try:
        with source_of(args) as source:
            answer = source.ask(args.sql)
    except NoAnswer as error:
        return refuse(str(error), WRONG)
    if args.json:
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    else:
        show_answer(answer)
    return ANSWERED
