"""Totals folded from the record: counts, sums and the live state behind every metric.

Owns plain ints, who lives, and the order in which the sums of steps, tokens, requests and
objectives (files of their own) are fed; metrics.py calls `advance` from its thread and at each
scrape. Must never invent: what the ring lost is counted exactly where the bus can tell, and stays
out of the totals it cannot tell.
"""

from collections.abc import Callable
from operator import add

from telemetry.bus import Batch, Bus, Entry, Snapshot
from telemetry.fold_objectives import ObjectiveFold
from telemetry.fold_queue import QueueFold
from telemetry.fold_requests import RequestFold, keep
from telemetry.fold_steps import StepFold
from telemetry.fold_tokens import TokenFold
from telemetry.histogram import Values, labelled
from telemetry.objective import Due
from telemetry.records import (
    ADMISSION_STOPS,
    FINISHES,
    KINDS,
    Delivery,
    Finish,
    Iteration,
    Rejection,
    RequestCause,
    RequestEnd,
    RequestShare,
    RequestStart,
    Run,
)

TAKE_MAX = 4096
Over = Callable[[RequestEnd, Delivery], None]
"""Called with each sequence whose end and delivery are both known."""

_STARTS, _ENDS, _FAULTS = (list(KINDS).index(k) for k in ("request_start", "request_end", "fault"))


def nobody(end: RequestEnd, delivery: Delivery) -> None:
    """Take note of no sequence that is over."""
    del end, delivery


class Fold:
    """Everything known of a run as of the record it has read last."""

    def __init__(self, bus: Bus, *, objective: Due, over: Over = nobody) -> None:
        self._bus = bus
        self._reader = bus.reader(0, label="metrics")
        self._over = over
        self._live: dict[int, RequestStart] = {}
        self._live_seq = 0
        self._running: set[int] = set()
        self._leaving: set[int] = set()  # finished in an iteration, their ends not yet published
        self._reached: dict[int, int] = {}
        self._reached_before: dict[int, int] = {}  # of those preempted: the highest so far
        self._ended_prompt_tokens = 0
        self._ended_generation_tokens = 0
        self._unmatched_ends: dict[int, RequestEnd] = {}
        self._unmatched_deliveries: dict[int, Delivery] = {}
        self._ahead: Iteration | None = None  # the last of a run of steady steps
        self.run: Run | None = None
        self.last: Iteration | None = None
        self.accepted = 0
        self.ended = 0
        self.faults = 0
        self.iterations = 0
        self.iterations_lost = 0
        self._published = (0,) * len(KINDS)
        self._ends_by_finish = dict.fromkeys(FINISHES, 0)
        self._stops_by_reason = dict.fromkeys(ADMISSION_STOPS, 0)
        self._steps = StepFold()
        self._objectives = ObjectiveFold(objective)
        self._tokens = TokenFold(self._objectives)
        self._requests = RequestFold()
        self._queue = QueueFold(self._live)

    # ---- what metrics read

    @property
    def running(self) -> int:
        """Sequences in flight that are not waiting."""
        return len((self._running | self._leaving) & self._live.keys())

    @property
    def waiting(self) -> int:
        """Sequences in flight that wait, preempted ones included."""
        return len(self._live) - self.running

    @property
    def kv_usage(self) -> float:
        """Return the share of KV blocks that sequences hold, 0..1.

        Only live sequences hold blocks: without any the share is 0, although no iteration comes to
        say so when an engine has died.
        """
        return self.kv_used / self.run.kv_blocks_total if self.run else 0.0

    @property
    def kv_used(self) -> int:
        """KV blocks that sequences hold."""
        if self.last is None or self.run is None or not self._live:
            return 0
        return min(self.last.kv_blocks_used, self.run.kv_blocks_total)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of sequences whose prompt was computed, hits of the cache included."""
        live = self._live
        return self._ended_prompt_tokens + sum(
            live[request].prompt_tokens
            for request in self._reached.keys() & live.keys()
            if self._highest(request) >= live[request].prompt_tokens
        )

    @property
    def generation_tokens(self) -> int:
        """Return output tokens: exact for ended sequences, all but the newest one for live ones."""
        live = self._live
        return self._ended_generation_tokens + sum(
            max(0, self._highest(request) - live[request].prompt_tokens)
            for request in self._reached.keys() & live.keys()
        )

    @property
    def ends_unknown(self) -> int:
        """Ends that the ring lost before this fold saw how they finished."""
        return self.ended - sum(self._ends_by_finish.values())

    def values(self, now_ns: int | None) -> dict[str, Values]:
        """Return what the table names of the run, at an instant: None is that of the last step."""
        self._catch_up()
        if now_ns is None:
            now_ns = self.last.end_at_ns if self.last else 0
        waiting = self._live.keys() - self._running - self._leaving
        return {
            "iterscope_faults_total": {(): self.faults},
            "iterscope_requests": labelled(
                {"running": len(self._live) - len(waiting), "waiting": len(waiting)}
            ),
            "iterscope_kv_usage_ratio": {(): self.kv_usage},
            "iterscope_prompt_tokens_total": {(): self.prompt_tokens},
            "iterscope_generation_tokens_total": {(): self.generation_tokens},
            "iterscope_iterations_total": {(): self.iterations},
            "iterscope_admission_stops_total": labelled(self._stops_by_reason),
            "iterscope_requests_accepted_total": {(): self.accepted},
            "iterscope_requests_ended_total": labelled(
                self._ends_by_finish | {"unknown": self.ends_unknown}
            ),
            "iterscope_inter_token_latency_seconds": {(): self._tokens.gaps_s},
            "iterscope_recomputed_tokens_total": {(): self._tokens.recomputed_tokens},
            "iterscope_telemetry_published_total": labelled(
                dict(zip(KINDS, self._published, strict=True))
            ),
            **self._queue.values(waiting, now_ns),
            **self._objectives.values(),
            **self._requests.values(),
            **self._steps.values(self.run, kv_used=self.kv_used, now_ns=now_ns),
        }

    # ---- advancing

    def advance(self) -> None:
        """Take in what was published since; bounded by the ring."""
        head = self._bus.head
        # After a loss the live set is that of a later place: read on past it, so that counts and
        # live set are of one moment, and the counts are known at all.
        while self._reader.seq < max(head, self._live_seq):
            self._take(self._reader.take(TAKE_MAX))

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()

    def _take(self, batch: Batch) -> None:
        if batch.lost:
            self._resume(self._bus.tail_snapshot())
        for entry in batch.entries:
            self._one(entry)
        if batch.entries:
            self._published = tally = batch.entries[-1].tally
            self.accepted, self.ended = tally[_STARTS], tally[_ENDS]
            self.faults = tally[_FAULTS]

    def _resume(self, snapshot: Snapshot) -> None:
        """Begin again with the live set of a later place: in sum, records up to it agree."""
        self._catch_up()
        self.run = snapshot.run
        before = self._live.copy()
        self._live.clear()  # the queue's fold looks at the same
        self._live.update((start.request, start) for start in snapshot.live)
        self._live_seq = snapshot.seq + 1  # in the ring: what follows the newest that left it
        for request in before.keys() - self._live.keys():
            self._forget(request)
        for request in self._live.keys() - before.keys():
            self._objectives.start(self._live[request])
        self._running &= self._live.keys()
        self._leaving &= self._live.keys()

    def _one(self, entry: Entry) -> None:
        record = entry.record
        if isinstance(record, Iteration):
            self._iteration(record)
        elif isinstance(record, RequestStart):
            self._live[record.request] = record
            self._objectives.start(record)
            self._requests.start(record)
        elif isinstance(record, RequestEnd):
            self._end(record)
            self._live.pop(record.request, None)
        elif isinstance(record, Delivery):
            self._delivery(record)
        elif isinstance(record, RequestCause):
            self._requests.cause(record)
        elif isinstance(record, RequestShare):
            self._requests.share(record)
        elif isinstance(record, Rejection):
            self._requests.rejection(record)
            self._objectives.refused(record.reason)
        elif isinstance(record, Run):
            self._catch_up()
            self.run, self.last = record, None
            self._steps.restart()
            self._tokens.restart()
            self._queue.restart()
            self._running.clear()
            self._leaving.clear()

    def _iteration(self, record: Iteration) -> None:
        last, self.last = self.last, record
        self.iterations += 1
        self.iterations_lost += record.lost_before
        self._stops_by_reason[record.admission_stop] += 1
        if last is not None and goes_on(last, record):
            self._steady(record)
        else:
            self._changed(record)
        for request in record.finished:
            if request in self._running:
                self._running.discard(request)
                self._leaving.add(request)
        if len(self._running) != record.running:
            # An iteration was lost, and with it who was admitted or preempted.
            self._running = set(record.requests) - self._leaving

    def _steady(self, record: Iteration) -> None:
        """Take a step of which each row decodes one token more than in the step before.

        What is kept by sequence is brought up to date once this ends: see _catch_up.
        """
        rows, starts = record.requests, record.start_positions
        count = len(rows)
        self._steps.take(record, context=sum(starts) + count, longest=max(starts) + 1)
        start = self._live.get(rows[0])
        name = start.request_id if start else ""
        positions = ((one, at + 1) for one, at in zip(rows, starts, strict=True))
        self._tokens.steady(name, count, record.end_at_ns, positions)
        self._ahead = record

    def _catch_up(self) -> None:
        """Bring what is kept by sequence up to the last of a run of steady steps."""
        record, self._ahead = self._ahead, None
        if record is not None:
            self._reached.update(zip(record.requests, ends_of(record), strict=True))
            self._tokens.settle(record.requests)

    def _changed(self, record: Iteration) -> None:
        """Take a step of another batch than the one before, or one that computes prompts."""
        self._catch_up()
        for request in record.preempted:
            self._reached_before[request] = self._highest(request)
            self._running.discard(request)
        positions = ends_of(record)
        self._steps.take(record, context=sum(positions), longest=max(positions, default=0))
        self._tokens.take(record, positions, self._known)
        self._reached.update(zip(record.requests, positions, strict=True))
        if record.preempted or record.admitted:
            self._queue.take(record)
            self._running.update(record.admitted)

    def _end(self, record: RequestEnd) -> None:
        self._catch_up()
        request = record.request
        self._ends_by_finish[record.finish] += 1
        self._requests.end(record)
        self._objectives.end(record)
        highest = self._highest(request)
        known = record.prefill_finished_at_ns is not None or highest >= record.prompt_tokens
        self._ended_prompt_tokens += record.prompt_tokens if known else 0
        # A counter never falls: what was counted while it lived stays counted.
        self._ended_generation_tokens += max(record.output_tokens, highest - record.prompt_tokens)
        self._forget(request)
        self._running.discard(request)
        self._leaving.discard(request)
        delivery = self._unmatched_deliveries.pop(request, None)
        if delivery is None:
            keep(self._unmatched_ends, request, record)
        else:
            self._both(record, delivery)

    def _forget(self, request: int) -> None:
        self._reached.pop(request, None)
        self._reached_before.pop(request, None)
        self._tokens.forget(request)
        self._objectives.forget(request)
        self._queue.forget(request)

    def _delivery(self, record: Delivery) -> None:
        request = record.request
        start, end = self._live.get(request), self._unmatched_ends.pop(request, None)
        known = start or end
        self._requests.delivery(record, known.request_id if known else "")
        if end is not None:
            self._both(end, record)
        elif start is not None:
            keep(self._unmatched_deliveries, request, record)

    def _both(self, end: RequestEnd, delivery: Delivery) -> None:
        if served(end.finish):
            self._requests.delivered(end, delivery)
        self._over(end, delivery)

    def _known(self, request: int) -> tuple[int, int, str]:
        """Return a sequence's prompt length, its first position never computed, and its id."""
        start = self._live.get(request)
        if start is None:
            return 0, self._highest(request), ""
        return start.prompt_tokens, self._highest(request), start.request_id

    def _highest(self, request: int) -> int:
        """Return the first position of a sequence that was never computed."""
        return max(self._reached.get(request, 0), self._reached_before.get(request, 0))


def goes_on(last: Iteration, record: Iteration) -> bool:
    """Whether each row decodes one token, as in the step before, and nobody came or went."""
    return (
        record.decode_tokens == last.decode_tokens == len(record.requests)
        and record.step == last.step + 1
        and not record.prefill_tokens
        and not last.prefill_tokens
        and record.requests == last.requests
        and bool(record.requests)
        and not record.preempted
        and not record.admitted
    )


def ends_of(record: Iteration) -> list[int]:
    """Return the position at which each row ended."""
    return [*map(add, record.start_positions, record.token_counts)]


def served(finish: Finish) -> bool:
    """Whether a sequence got what it asked for."""
    return finish in {"stop", "length"}
