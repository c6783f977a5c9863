"""When the tokens of a request are due: its objective, or the server's own for what it left open.

Owns the rule that metrics and the flight recorder judge by, the same that the slo policy plans by:
token j, from 0, is due at arrival + ttft + j x tpot. Reads no clock and keeps nothing.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from telemetry.records import RequestEnd, RequestStart

Class = Literal["default", "tighter", "looser"]
CLASSES: tuple[Class, ...] = ("default", "tighter", "looser")
"""The request named no objective; one of which a part is tighter than the server's; another one."""


class Objective(msgspec.Struct, frozen=True):
    """When tokens are due, in ms; as in RequestStart.slo. None is the server's default."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """An objective in force: nanoseconds from arrival to the first token, and for each after it."""

    ttft_ns: int
    tpot_ns: int
    of_class: Class = "default"


def due_ms(*, ttft_ms: float, tpot_ms: float) -> Due:
    """Return a server's own objective."""
    return Due(round(ttft_ms * 1e6), round(tpot_ms * 1e6))


def due_of(start: RequestStart, default: Due) -> Due:
    """Return the objective of a sequence; one that cannot be read is the default."""
    if start.slo is None:
        return default
    try:
        asked = msgspec.json.decode(start.slo, type=Objective)
    except msgspec.DecodeError:
        return default
    ttft_ns = default.ttft_ns if asked.ttft_ms is None else round(asked.ttft_ms * 1e6)
    tpot_ns = default.tpot_ns if asked.tpot_ms is None else round(asked.tpot_ms * 1e6)
    tighter = ttft_ns < default.ttft_ns or tpot_ns < default.tpot_ns
    return Due(ttft_ns, tpot_ns, "tighter" if tighter else "looser")


def late(end: RequestEnd, due: Due) -> bool:
    """Return whether a sequence's first or last token came after it was due, or none came."""
    if end.finish == "error" or end.first_token_at_ns is None:
        return True
    first_ns = end.first_token_at_ns - end.arrived_at_ns
    last_ns = end.decided_at_ns - end.arrived_at_ns
    return first_ns > due.ttft_ns or last_ns > due.ttft_ns + due.tpot_ns * max(
        0, end.output_tokens - 1
    )
