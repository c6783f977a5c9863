"""The flags that choose a range of time: `--last 5m`, `--from`, `--to`, `--run`.

Owns their help and their reading; record, export and whoever else takes a range from people use
them. Instants are UTC unless they name a zone, as in every answer of ours. Opens nothing.
"""

import argparse

from server.source import Source
from telemetry import spans
from telemetry.spans import Span, TimeRange, spans_of


def add_range_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of a range; without any it is all that is on record."""
    parser.add_argument("--last", metavar="TIME", help="the last 30s, 5m or 2h")
    parser.add_argument(
        "--from",
        dest="since",
        metavar="INSTANT",
        help="begin, such as 2026-11-30T14:03:00 (UTC unless it names a zone)",
    )
    parser.add_argument("--to", dest="until", metavar="INSTANT", help="end of the range")
    parser.add_argument(
        "--run", dest="run_id", metavar="RUN_ID", help="only this life of the server"
    )


def range_of(args: argparse.Namespace) -> TimeRange:
    """Return the range that the parsed flags ask for; raises BadRange."""
    return spans.range_of(last=args.last, since=args.since, until=args.until, run_id=args.run_id)


def spans_in(source: Source, asked: TimeRange) -> list[Span]:
    """Return the range's spans in a source; of a running server `--last` ends at its own now."""
    now: int | None = None
    if source.url is not None and asked.last_us is not None:
        now = source.ask("SELECT epoch_us(now())").rows[0][0]
    return spans_of(source.ask, asked, now_unix_us=now)
