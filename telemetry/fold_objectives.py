"""Goodput: each token against its deadline, each sequence against its objective.

Owns the sums by class and outcome; fold_tokens.py tells it of tokens as they are committed, fold.py
of starts, ends and refusals. In health a step costs one comparison: no token can be late before the
earliest deadline of those that decode. Keeps nothing of a sequence that is over.
"""

from collections.abc import Iterable
from typing import Literal

from telemetry.histogram import Value
from telemetry.objective import CLASSES, Class, Due, due_of, late
from telemetry.records import RejectionReason, RequestEnd, RequestStart

Outcome = Literal["met", "missed", "dropped"]
OUTCOMES: tuple[Outcome, ...] = ("met", "missed", "dropped")
OVERLOAD: frozenset[RejectionReason] = frozenset(
    {"queue_full", "queue_tokens", "queue_bytes", "infeasible", "engine_down"}
)
"""Refusals that are ours: not a tenant over its own limit, nor a server that is being replaced."""
LEFT = frozenset({"client", "api"})
NEVER_NS = 1 << 62


class ObjectiveFold:
    """Sums over tokens and sequences of a run."""

    def __init__(self, default: Due) -> None:
        self._default = default
        # Of each live sequence: when the token that it would reach position 0 with were due, and
        # the time for each one after it, so that the token at a position is due at base + x tpot.
        self._due: dict[int, tuple[int, int, Class]] = {}
        self._of: dict[int, Due] = {}
        self._own: set[int] = set()  # of a class other than the default
        self._late: set[int] = set()
        self._safe_until_ns = NEVER_NS  # no token of those that decode is due before
        self._tokens = {(one, met): 0 for one in CLASSES for met in (True, False)}
        self._requests = {(one, outcome): 0 for one in CLASSES for outcome in OUTCOMES}

    def start(self, record: RequestStart) -> None:
        """Begin to watch a sequence."""
        due = due_of(record, self._default)
        base_ns = record.arrived_at_ns + due.ttft_ns - record.prompt_tokens * due.tpot_ns
        self._due[record.request] = (base_ns, due.tpot_ns, due.of_class)
        self._of[record.request] = due
        if due.of_class != "default":
            self._own.add(record.request)

    def joined(self, request: int, position: int, at_ns: int) -> None:
        """Judge a token of one that gave none in the step before; it decodes from here on."""
        due = self._due.get(request)
        if due is not None:
            next_ns = self._judge(request, due, position, at_ns)
            self._safe_until_ns = min(self._safe_until_ns, next_ns)

    def safe(self, at_ns: int) -> bool:
        """Return whether no token committed now, of those that decoded before, can be late."""
        return at_ns <= self._safe_until_ns and not self._own

    def met(self, tokens: int) -> None:
        """Count tokens in time, where it was safe."""
        self._tokens["default", True] += tokens

    def decoded(self, rows: Iterable[tuple[int, int]], at_ns: int) -> None:
        """Judge one token of each row, all that decoded before: sequences and their positions."""
        # The same as _judge, row by row, in a loop that a slow step runs for each of its rows.
        safe_ns, tokens, due_of_row = NEVER_NS, self._tokens, self._due.get
        for request, position in rows:
            due = due_of_row(request)
            if due is None:
                continue
            base_ns, tpot_ns, of_class = due
            due_ns = base_ns + position * tpot_ns
            if at_ns <= due_ns:
                tokens[of_class, True] += 1
            else:
                tokens[of_class, False] += 1
                self._late.add(request)
            if due_ns + tpot_ns < safe_ns:  # noqa: PLR1730  min() would cost as much as the rest
                safe_ns = due_ns + tpot_ns
        self._safe_until_ns = safe_ns

    def _judge(self, request: int, due: tuple[int, int, Class], position: int, at_ns: int) -> int:
        """Count a token; return when the next one is due."""
        base_ns, tpot_ns, of_class = due
        due_ns = base_ns + position * tpot_ns
        self._tokens[of_class, at_ns <= due_ns] += 1
        if at_ns > due_ns:
            self._late.add(request)
        return due_ns + tpot_ns

    def end(self, record: RequestEnd) -> None:
        """Judge a sequence that is over."""
        due = self._of.get(record.request)
        if due is not None:
            outcome = self._outcome(record, due)
            if outcome is not None:
                self._requests[due.of_class, outcome] += 1
        self.forget(record.request)

    def _outcome(self, record: RequestEnd, due: Due) -> Outcome | None:
        was_late = record.request in self._late
        if record.finish in {"stop", "length"}:
            # Ends are told even where iterations were lost, so they are asked as well.
            return "missed" if was_late or late(record, due) else "met"
        if record.cancel_cause not in LEFT:
            return "dropped"
        next_ns = record.arrived_at_ns + due.ttft_ns + record.output_tokens * due.tpot_ns
        return "missed" if was_late or record.decided_at_ns > next_ns else None

    def refused(self, reason: RejectionReason) -> None:
        """Count a request that never came in: its objective is not on record."""
        if reason in OVERLOAD:
            self._requests["default", "dropped"] += 1

    def forget(self, request: int) -> None:
        """Forget a sequence."""
        self._due.pop(request, None)
        self._of.pop(request, None)
        self._own.discard(request)
        self._late.discard(request)

    def values(self) -> dict[str, dict[tuple[str, ...], Value]]:
        """Return what the table names of objectives."""
        return {
            "iterscope_slo_objective_seconds": {
                ("ttft",): self._default.ttft_ns / 1e9,
                ("tpot",): self._default.tpot_ns / 1e9,
            },
            "iterscope_slo_requests_total": {
                (of_class, outcome): count for (of_class, outcome), count in self._requests.items()
            },
            "iterscope_slo_tokens_total": {
                (of_class, "met" if met else "missed"): count
                for (of_class, met), count in self._tokens.items()
            },
        }
