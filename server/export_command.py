"""`iterscope export --perfetto`: a range of the record as a trace for ui.perfetto.dev.

Owns its flags, its file and its exit codes; telemetry/perfetto.py decides what a trace holds.
Reads page by page and writes as it reads, so a long range needs no more memory than a short one.
Must never leave half a trace under the name that was asked for.
"""

import argparse
import os
import sys
from pathlib import Path

from server.range_flags import add_range_flags, range_of, spans_in
from server.source import NoAnswer, Source, add_source_flags, source_of
from server.terminal import ANSWERED, MISUSE, WRONG, refuse
from telemetry.perfetto import trace_events, write_trace
from telemetry.reading import read_records
from telemetry.spans import BadRange, Span

KINDS = ("run", "request_start", "iteration", "request_end", "delivery", "rejection", "fault")


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope export`."""
    parser.add_argument(
        "--perfetto", action="store_true", help="write a trace that ui.perfetto.dev opens"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="file to write; - is standard output"
    )
    add_range_flags(parser)
    add_source_flags(parser)


def run_export_command(args: argparse.Namespace) -> int:
    """Write the trace; 0 when written, 1 when there is nothing to write, 2 for misuse."""
    if not args.perfetto:
        return refuse("export: say what to write: --perfetto", MISUSE)
    try:
        asked = range_of(args)
    except BadRange as error:
        return refuse(f"export: {error}", MISUSE)
    try:
        with source_of(args) as source:
            count = _export(source, spans_in(source, asked), args.output)
    except (NoAnswer, BadRange) as error:
        return refuse(str(error), WRONG)
    except OSError as error:
        return refuse(f"{args.output} cannot be written: {error.strerror}", WRONG)
    sys.stderr.write(f"{count} events of {source.name} in {args.output}\n")
    return ANSWERED


def _export(source: Source, spans: list[Span], output: str) -> int:
    events = trace_events(spans, read_records(source.ask, spans, KINDS))
    if output == "-":
        return write_trace(events, spans, sys.stdout.buffer)
    path = Path(output).expanduser()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            count = write_trace(events, spans, file)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count
