"""One life in the fold: its state, its sums so far, and how they become causes when it is over.

Owns Life (advanced by explain_fold.py alone) and Settled (what is told of it). A life reads the
running totals when its state changes and never in between. Must keep the parts' sum exact: what
nothing else explains is `unexplained`, and every correction takes from where the time was put.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from telemetry.explain import SPLIT
from telemetry.explain_sums import COUNTED_ROWS, DEVICE, KV, Cut, Step
from telemetry.explain_tiles import Bounds, after, before, bounds, waits_for
from telemetry.records import (
    ADMISSION_STOPS,
    CAUSES,
    Delivery,
    PreemptionCause,
    RequestEnd,
    RequestStart,
    Rule,
)


@dataclass(slots=True)
class Totals:
    """Running sums over all tiles in ns: waiting by admission_stop, and wall time covered."""

    waited: list[int]
    covered: int

    def copy(self) -> "Totals":
        """Return the sums as of now."""
        return Totals(self.waited.copy(), self.covered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A life divided: ns by cause in the order of CAUSES, and its shares."""

    request: int
    causes: dict[str, int]
    device_ns: int
    kv_block_ns: int
    rule: Rule
    start: RequestStart
    end: RequestEnd
    bounds: Bounds


class Life:
    """One sequence from its start to its last record; `first` is the first step that held it."""

    def __init__(self, start: RequestStart, slot: int) -> None:
        self.start = start
        self.slot = slot
        self.state = "waiting"
        self.first: Step | None = None
        self.end: RequestEnd | None = None
        self.delivery: Delivery | None = None
        self.parted = False
        self.gapped = False
        self.last_index = -1
        self.lost = 0
        self.tail: list[Step] = []
        self.held_from: int | None = None  # the running total where its finish was decided
        self._covered = 0
        self._certain = False
        self._first_at = start.arrived_at_ns
        self._base = Totals([0] * len(ADMISSION_STOPS), 0)
        self._since = 0
        self._running_ns = 0
        self._passed_running_ns = 0
        self._lost_base: list[int] | None = None
        self._lost_passed_ns = 0
        self._sums: dict[str, int] = {}
        self._trace = [(-1, "waiting")]

    # ---- as iterations come

    def begin(self, step: Step, totals: Totals, *, certain: bool = True) -> None:
        """Begin in this tile; `totals` are those of its beginning, or of the later arrival."""
        self.first = step
        self._certain = certain and step.certain
        self.gapped = not self._certain
        self._first_at = max(self._first_at, step.record.begin_at_ns)
        self._base = totals

    def run(self, index: int, totals: Totals, missed_ns: int) -> None:
        """Be admitted in the tile at `index`, of which the life missed the first part."""
        if self.state == "running":
            return
        if self.first is None or self.first.index != index:
            self._leave(totals)
        self._enter(index, "running", totals.covered + missed_ns)

    def preempt(self, index: int, totals: Totals, cause: PreemptionCause) -> None:
        """Lose the blocks in the tile at `index`."""
        self._leave(totals)
        self._enter(index, f"preempted_{cause}", totals.covered)

    def lose(self) -> None:
        """Note that iterations are missing here."""
        self.gapped = True
        self._lost_base = self._base.waited.copy()
        self._lost_passed_ns = self._sums.get("passed_over", 0)

    def recall(self, gap: Totals | None, totals: Totals) -> None:
        """Take back what was said since iterations were lost: it had run meanwhile."""
        if gap is None or self._lost_base is None:
            gap, self._lost_base = self._base.copy(), self._base.waited
        if self.state != "waiting":
            self._since = totals.covered - max(0, gap.covered - self._since)
            return
        self._base.waited = [
            base + now - then
            for base, now, then in zip(self._lost_base, totals.waited, gap.waited, strict=True)
        ]
        self._sums["passed_over"] = min(self._lost_passed_ns, self._sums.get("passed_over", 0))

    def pass_over(self, stop: int, part_ns: int) -> None:
        """Be given nothing in a tile although it was the life's turn."""
        if self.state.startswith("preempted"):
            return
        self._add("passed_over", part_ns)
        if self.state == "waiting":
            self._base.waited[stop] += part_ns
        else:
            self._passed_running_ns += part_ns

    def part(self, index: int, totals: Totals) -> None:
        """End the engine's part with the tile at `index`."""
        self.parted = True
        self.last_index = index
        self._covered = totals.covered
        if self.first is not None:
            self._leave(totals)

    def _enter(self, index: int, state: str, since: int) -> None:
        self.state = state
        self._since = since
        self._trace.append((index, state))
        del self._trace[1:-8]

    def _leave(self, totals: Totals) -> None:
        """Sum up the time in the present state."""
        if self.state == "running":
            self._running_ns += totals.covered - self._since
        elif self.state == "waiting":
            for name, now, then in zip(
                ADMISSION_STOPS, totals.waited, self._base.waited, strict=True
            ):
                if now > then:
                    self._add(waits_for(name), now - then)
        else:
            self._add(self.state, totals.covered - self._since)

    def _add(self, cause: str, ns: int) -> None:
        self._sums[cause] = self._sums.get(cause, 0) + ns

    # ---- when it is over

    def cuts(self, delivery: Delivery) -> list[Cut]:
        """Return the rows that reach past the life's end, or past where its finish was decided."""
        limits = bounds(self.start, self.end, delivery, 0)
        found = []
        for step in self.tail:
            record = step.record
            if record.end_at_ns <= limits.cut or self.start.request not in record.requests:
                continue
            low = max(record.begin_at_ns, self._first_at)
            found.append(
                Cut(
                    step=step,
                    row=record.requests.index(self.start.request),
                    prompt=self.start.prompt_tokens,
                    lost=self.lost,
                    was=record.end_at_ns - low,
                    now=max(0, limits.cut - low),
                )
            )
        return found

    def settle(self, delivery: Delivery, rows: Sequence[int], blocks: int) -> Settled:
        """Return the life divided; `rows` are the sums of its rows, `blocks` what it held last."""
        assert self.end is not None
        limits = bounds(self.start, self.end, delivery, 0)
        sums = dict(self._sums)
        running_ns = self._running_ns - sum(rows[: len(SPLIT)])
        passed_ns = self._passed_running_ns
        through = self._covered
        for cause, ns in zip(SPLIT, rows, strict=False):
            sums[cause] = sums.get(cause, 0) + ns
        for step in self.tail:
            where, ns = self._excess(step, limits)
            through -= ns
            if where == "passed_over" and self._state_at(step.index) == "running":
                passed_ns -= ns
                running_ns -= ns
            if where == "running":
                running_ns -= ns
            else:
                sums[where] = sums.get(where, 0) - ns
        running_ns -= passed_ns
        kv_block_ns = rows[KV] + blocks * max(0, running_ns + passed_ns)
        from_ns = through if self.held_from is None else self.held_from
        self._place(sums, running_ns, max(0, through - from_ns), limits)
        if self.first is not None and self._certain:
            boundary = min(self._first_at, limits.stop) - limits.arrived
            sums["step_boundary"] = sums.get("step_boundary", 0) + boundary
        untold_ns = limits.stop - limits.arrived - sum(sums.values())
        for part in (before(limits, delivery), after(limits, delivery, untold_ns)):
            for cause, ns in part.items():
                sums[cause] = sums.get(cause, 0) + ns
        return Settled(
            request=self.start.request,
            causes={cause: sums[cause] for cause in CAUSES if sums.get(cause)},
            device_ns=rows[DEVICE],
            kv_block_ns=kv_block_ns,
            rule="counted" if rows[COUNTED_ROWS] else "fitted",
            start=self.start,
            end=self.end,
            bounds=limits,
        )

    def _excess(self, step: Step, limits: Bounds) -> tuple[str, int]:
        """Return what of a tile lies past the engine's part, and where it was put."""
        record = step.record
        low = max(record.begin_at_ns, self._first_at, limits.stop)
        ns = max(0, record.end_at_ns - low)
        state = self._state_at(step.index)
        if self.first is None or step.index < self.first.index or not ns:
            return "running", 0
        if not state.startswith("preempted") and self.start.request in record.passed_over:
            return "passed_over", ns
        if state == "waiting":
            return waits_for(record.admission_stop), ns
        return state, ns

    def _place(self, sums: dict[str, int], rest_ns: int, held_ns: int, limits: Bounds) -> None:
        """Say what a running request did while it had no row and was not passed over."""
        assert self.end is not None
        for step in self.tail:
            record = step.record
            if (
                record.begin_at_ns < self.end.decided_at_ns <= record.end_at_ns
                and self._state_at(step.index) == "running"
                and self.start.request not in record.requests
                and self.start.request not in record.passed_over
            ):
                # It was ended before the step was planned.
                ns = max(0, limits.cut - max(record.begin_at_ns, self._first_at))
                sums["scheduler"] = sums.get("scheduler", 0) + ns
                rest_ns -= ns
        held_ns = min(rest_ns, held_ns)
        for cause, ns in (
            ("batch_held", held_ns),
            ("unexplained" if self.gapped else "passed_over", rest_ns - held_ns),
        ):
            sums[cause] = sums.get(cause, 0) + ns

    def _state_at(self, index: int) -> str:
        return next(state for at, state in reversed(self._trace) if at <= index)
