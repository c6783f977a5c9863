"""What makes the flight recorder work by itself: objectives missed, an engine that stands or dies.

Owns the rules and the pause after each alarm. recorder.py feeds it every record and asks it once a
second. A request misses its objective if its first token, or its last, came after it was due; one
that its client cancelled counts for nothing. Reads no clock: it is told the time.
"""

from collections import deque
from dataclasses import dataclass

from telemetry.objective import Due, due_ms, due_of, late
from telemetry.records import Fault, Record, RequestEnd, RequestStart

WINDOW_NS = 60 * 10**9
LIVE_MAX = 100_000
"""Requests whose objective is remembered; the oldest is forgotten first."""
MARK = "flight recorder"
"""What a Fault that the recorder itself puts on record says of where."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A reason to record: one word, and a line for people."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When an alarm is raised. `judge_all`: requests without an objective have the default one."""

    ttft_ms: float
    tpot_ms: float
    judge_all: bool
    burn_share: float
    burn_requests: int
    stall_s: float
    pause_s: float


class Alarms:
    """Watches one run. Bounded: live objectives, and the ends of one minute."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._default = due_ms(ttft_ms=rules.ttft_ms, tpot_ms=rules.tpot_ms)
        self._due: dict[int, Due] = {}
        self._ended: deque[tuple[int, bool]] = deque(maxlen=LIVE_MAX)
        self._died: Fault | None = None
        self._quiet_until_ns: dict[str, int] = {}

    def see(self, record: Record) -> None:
        """Take one record in."""
        if isinstance(record, RequestStart):
            self._start(record)
        elif isinstance(record, RequestEnd):
            self._end(record)
        elif isinstance(record, Fault) and record.where != MARK:
            self._died = record

    def raised(self, *, now_ns: int, stalled_s: float) -> list[Alarm]:
        """Return what is wrong now and was not told within the pause.

        `stalled_s` is how long the engine has made no progress although it has work.
        """
        found = []
        if self._died is not None:
            found.append(Alarm("crash", f"{self._died.where}: {self._died.error}"))
            self._died = None
        if stalled_s > self._rules.stall_s:
            found.append(Alarm("stall", f"no progress for {stalled_s:.0f} s, with work to do"))
        while self._ended and self._ended[0][0] < now_ns - WINDOW_NS:
            self._ended.popleft()
        missed = sum(miss for _, miss in self._ended)
        count = len(self._ended)
        if count >= self._rules.burn_requests and missed >= self._rules.burn_share * count:
            found.append(Alarm("slo", f"{missed} of {count} requests of a minute missed theirs"))
        told = [alarm for alarm in found if now_ns >= self._quiet_until_ns.get(alarm.reason, 0)]
        for alarm in told:
            self._quiet_until_ns[alarm.reason] = now_ns + int(self._rules.pause_s * 1e9)
        return told

    def _start(self, start: RequestStart) -> None:
        if start.slo is None and not self._rules.judge_all:
            return
        self._due[start.request] = due_of(start, self._default)
        if len(self._due) > LIVE_MAX:
            self._due.pop(next(iter(self._due)))

    def _end(self, end: RequestEnd) -> None:
        due = self._due.pop(end.request, None)
        if due is not None and end.finish != "cancelled":
            self._ended.append((end.released_at_ns, late(end, due)))
