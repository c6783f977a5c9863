"""What the server prints: the start banner, one line per request end, and what goes wrong.

Owns the set-up of the `iterscope` logger and of the web server's own; server/cli.py calls it once
at start, everybody else logs through the standard library. Lines are plain and go to the standard
error stream. Must never carry text of a prompt or of an answer, nor a key.
"""

import logging
import sys
from collections.abc import Mapping
from typing import Any

LINE = "%(asctime)s %(levelname)-7s %(message)s"
CUT_STREAM = "ASGI callable returned without completing response."
"""What uvicorn says of a stream that ended early: we cut it, and have logged why."""


def configure(level: str) -> None:
    """Send lines at `level` (debug, info, warning or error) and above to standard error."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(logging.Formatter(LINE))
    lines.addFilter(lambda record: record.msg != CUT_STREAM)
    for name, least in (("iterscope", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [lines]
        logger.propagate = False
        logger.setLevel(least)


def facts(values: Mapping[str, Any]) -> str:
    """Return `name=value` for each value that is known, in order, on one line."""
    return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)
