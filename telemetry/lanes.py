"""A request's life as slices that never overlap: queued by reason, chunks, decode, preempted, held.

Owns the state of every request while records go by, tile by tile, and what the line waited for.
perfetto.py feeds it one run's records in order and turns what it draws into a trace. Works tile by
tile as explanations do: each tile gives a request one slice, the first that matches of preempted,
passed over, scheduled, waiting. Costs a step O(batch), however many wait.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from telemetry.records import Iteration, RequestEnd, RequestStart

STOPS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Slice:
    """What one request did from `begin_ns` to `end_ns`."""

    request: int
    name: str
    begin_ns: int
    end_ns: int
    facts: dict[str, Any]


@dataclass(slots=True)
class Stop:
    """Why the line did not move from `begin_ns` to `end_ns`, and who stood at its head."""

    begin_ns: int
    end_ns: int
    name: str
    blocker: int | None


@dataclass(slots=True)
class Lane:
    """One request, drawn up to `until_ns`; `state` says what it has been since."""

    request: int
    prompt_tokens: int
    until_ns: int
    state: str = "waiting"
    reached: int = 0
    open: Slice | None = None


@dataclass(slots=True)
class Lanes:
    """The lanes of one run. Each call returns the slices that are complete by it, in order."""

    live: dict[int, Lane] = field(default_factory=dict)
    _stops: list[Stop] = field(default_factory=list)
    _until_ns: int = 0

    def start(self, start: RequestStart, *, from_ns: int) -> None:
        """Open a lane; nothing is drawn before `from_ns`."""
        begin = max(start.arrived_at_ns, from_ns)
        self.live.setdefault(start.request, Lane(start.request, start.prompt_tokens, begin))

    def step(self, record: Iteration, *, from_ns: int) -> list[Slice]:
        """Take one tile in."""
        begin, end = max(record.begin_at_ns, from_ns), record.end_at_ns
        self._note_stop(record, begin)
        drawn: list[Slice] = []
        lost = zip(
            record.preempted, record.preempted_causes, record.preempted_lost_tokens, strict=True
        )
        for request, cause, lost_tokens in lost:
            if lane := self.live.get(request):
                drawn += self._reach(lane, begin)
                lane.state = f"preempted_{cause}"
                lane.reached = max(lane.reached, lost_tokens)
        for request, reason in zip(record.passed_over, record.passed_over_reasons, strict=True):
            if lane := self.live.get(request):
                drawn += self._reach(lane, begin)
                drawn += self._extend(lane, "passed_over", end, {"reason": reason})
        for row in range(len(record.requests)):
            drawn += self._scheduled(record, row, begin)
        self._until_ns = max(self._until_ns, end)
        return drawn + self._shed() if len(self._stops) > STOPS_KEPT else drawn

    def end(self, end: RequestEnd) -> tuple[list[Slice], int]:
        """Close a lane and say up to where it was drawn: to its last tile, or until it was freed.

        What a fixed batch held after the finish was known is the last of it.
        """
        lane = self.live.pop(end.request, None)
        if lane is None:
            return [], end.decided_at_ns
        drawn = self._reach(lane, end.decided_at_ns)
        if end.freed_at_ns is not None and end.freed_at_ns > lane.until_ns:
            drawn += self._extend(lane, "batch_held", end.freed_at_ns, {"finish": end.finish})
        return drawn + self._close(lane), lane.until_ns

    def finish(self) -> list[Slice]:
        """Draw those that have not ended up to the last tile."""
        drawn: list[Slice] = []
        for lane in self.live.values():
            drawn += self._settle(lane, self._until_ns) + self._close(lane)
        self.live.clear()
        return drawn

    # ---- one lane

    def _scheduled(self, record: Iteration, row: int, begin: int) -> list[Slice]:
        request = record.requests[row]
        start, count = record.start_positions[row], record.token_counts[row]
        lane = self.live.get(request)
        if lane is None:  # its start was lost: it began no later than here
            lane = self.live[request] = Lane(request, start + count, begin)
        drawn = self._reach(lane, begin) + self._close(lane)
        name, facts = kinds(lane, start, count)
        facts |= {"step": record.step, "from": start, "blocks": record.kv_block_counts[row]}
        drawn.append(Slice(request, name, lane.until_ns, record.end_at_ns, facts))
        lane.until_ns, lane.state = record.end_at_ns, "running"
        lane.reached = max(lane.reached, start + count)
        return drawn

    def _reach(self, lane: Lane, now_ns: int) -> list[Slice]:
        """Draw a lane up to an instant; what no tile tells of a running one stays blank."""
        drawn = self._settle(lane, now_ns)
        lane.until_ns = max(lane.until_ns, now_ns)
        return drawn

    def _settle(self, lane: Lane, now_ns: int) -> list[Slice]:
        """Draw what a lane has been until now, if that is more than its own last step."""
        if lane.until_ns >= now_ns or lane.state == "running":
            return []
        if lane.state != "waiting":
            return self._extend(lane, lane.state, now_ns, {})
        drawn: list[Slice] = []
        for stop in self._stops[self._first_after(lane.until_ns) :]:
            if stop.begin_ns >= now_ns:
                break
            if stop.begin_ns > lane.until_ns:
                drawn += self._extend(lane, "step_boundary", stop.begin_ns, {})
            behind = None if stop.blocker == lane.request else stop.blocker
            facts = {} if behind is None else {"behind": behind}
            drawn += self._extend(lane, stop.name, min(stop.end_ns, now_ns), facts)
        return drawn + self._extend(lane, "step_boundary", now_ns, {})

    def _extend(self, lane: Lane, name: str, end_ns: int, facts: dict[str, Any]) -> list[Slice]:
        """Go on with the open slice if it says the same, else close it and open another."""
        if end_ns <= lane.until_ns:
            return []
        begin, last, drawn = lane.until_ns, lane.open, list[Slice]()
        if last and last.name == name and last.facts == facts and last.end_ns == begin:
            begin = last.begin_ns
        else:
            drawn = self._close(lane)
        lane.open = Slice(lane.request, name, begin, end_ns, facts)
        lane.until_ns = end_ns
        return drawn

    def _close(self, lane: Lane) -> list[Slice]:
        last, lane.open = lane.open, None
        return [last] if last else []

    # ---- the line

    def _note_stop(self, record: Iteration, begin: int) -> None:
        stops = self._stops
        name = f"queue_{record.admission_stop}"
        if record.admission_stop == "no_waiting":
            name = "step_boundary"  # whoever came during this tile was not looked at in it
        if record.lost_before and stops and stops[-1].end_ns < begin:
            stops.append(Stop(stops[-1].end_ns, begin, "unexplained", None))
        last = stops[-1] if stops else None
        same = last and (last.name, last.blocker) == (name, record.admission_blocker)
        if last and same and last.end_ns == begin:
            last.end_ns = record.end_at_ns
        else:
            stops.append(Stop(begin, record.end_at_ns, name, record.admission_blocker))

    def _shed(self) -> list[Slice]:
        """Draw those who wait up to the middle of the stops, and forget what lies before it."""
        half = len(self._stops) // 2
        until_ns = self._stops[half].begin_ns
        drawn: list[Slice] = []
        for lane in self.live.values():
            if lane.state == "waiting":
                drawn += self._settle(lane, until_ns)
        del self._stops[:half]
        return drawn

    def _first_after(self, instant_ns: int) -> int:
        return bisect_right(self._stops, instant_ns, key=lambda stop: stop.end_ns)


def kinds(lane: Lane, start: int, count: int) -> tuple[str, dict[str, Any]]:
    """Return what a row's tokens are, as a name and as counts: recompute, prefill, decode."""
    end = start + count
    recompute = min(count, max(0, lane.reached - start))
    prefill = max(0, min(end, lane.prompt_tokens) - max(start, lane.reached))
    counts = {"recompute": recompute, "prefill": prefill, "decode": count - recompute - prefill}
    said: dict[str, Any] = {name: tokens for name, tokens in counts.items() if tokens}
    return " + ".join(said) or "nothing", said
