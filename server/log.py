"""What the server prints: the start banner, one line per request end, and what goes wrong.

Owns the set-up of the `iterscope` logger and of the web server's own; server/cli.py calls it once
at start, everybody else logs through the standard library. Lines are plain, or JSON objects with
the facts as members, and go to the standard error stream. Must never carry text of a prompt or of
an answer, nor a key.
"""

import logging
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import msgspec

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
LINE = "%(asctime)s %(levelname)-7s %(message)s"
CUT_STREAM = "ASGI callable returned without completing response."
"""What uvicorn says of a stream that ended early: we cut it, and have logged why."""


class Facts:
    """Values by name: `name=value` on a plain line, members of a JSON one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.known = {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.known.items())


class Lines(logging.Formatter):
    """Plain lines; a trace tells where and of which kind an error was, but not in its own words.

    Those might quote a prompt: `words` lets them through, for who has asked to see prompts.
    """

    def __init__(self, *, words: bool = False) -> None:
        super().__init__(LINE)
        self._words = words

    def formatException(self, ei: ExcInfo) -> str:  # noqa: N802
        """Return the trace, the cause of an error before it."""
        if self._words:
            return super().formatException(ei)
        told: list[str] = []
        error = ei[1]
        while error is not None:
            frames = "".join(traceback.format_tb(error.__traceback__))
            told.insert(0, f"Traceback (most recent call last):\n{frames}{type(error).__name__}")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\n\nthen\n\n".join(told)


class JsonLines(Lines):
    """One JSON object a line: time (UTC), level, logger, message, facts, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what is no fact stays in the message."""
        made: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        args = record.args if isinstance(record.args, tuple) else ()
        if len(args) == 1 and isinstance(args[0], Facts):
            made["message"] = record.msg.replace("%s", "").strip(": ") or "request ended"
            made["facts"] = args[0].known
        else:
            made["message"] = record.getMessage()
        if record.exc_info:
            made["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(made, enc_hook=str).decode()


def configure(level: str, form: str = "text", *, words: bool = False) -> None:
    """Send lines at `level` (debug, info, warning or error) and above to standard error."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonLines(words=words) if form == "json" else Lines(words=words))
    lines.addFilter(lambda record: record.msg != CUT_STREAM)
    for name, least in (("iterscope", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [lines]
        logger.propagate = False
        logger.setLevel(least)


def facts(values: Mapping[str, Any]) -> Facts:
    """Return those values that are known, in order, to be logged with a `%s` of their own."""
    return Facts(values)
