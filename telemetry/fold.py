"""Totals folded from the record: counts, sums and the live state behind every metric.

Owns plain ints and two histograms, and has the sums of steps and of requests in files of their own;
metrics.py calls `advance` from its thread and at each scrape. Must never invent: what the ring
lost is counted exactly where the bus can tell, and stays out of the totals it cannot tell.
"""

from collections.abc import Sequence
from operator import add
from typing import TypeVar

from telemetry.bus import Batch, Bus, Entry, Snapshot
from telemetry.fold_requests import RequestFold
from telemetry.fold_steps import StepFold
from telemetry.histogram import Histogram
from telemetry.records import (
    ADMISSION_STOPS,
    FINISHES,
    KINDS,
    REJECTION_REASONS,
    Delivery,
    Finish,
    Iteration,
    Rejection,
    RequestCause,
    RequestEnd,
    RequestStart,
    Run,
)

TAKE_MAX = 4096
UNMATCHED_MAX = 10_000
"""Ends that wait for their delivery, or the other way round: a bound, never reached in health."""

_Half = TypeVar("_Half", RequestEnd, Delivery)

_STARTS, _ENDS, _FAULTS = (list(KINDS).index(k) for k in ("request_start", "request_end", "fault"))


class Fold:
    """Everything known of a run as of the record it has read last."""

    def __init__(
        self, bus: Bus, *, ttft_edges: Sequence[float], e2e_edges: Sequence[float]
    ) -> None:
        self._bus = bus
        self._reader = bus.reader(0, label="metrics")
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
        self.run: Run | None = None
        self.last: Iteration | None = None
        self.accepted = 0
        self.ended = 0
        self.faults = 0
        self.iterations = 0
        self.iterations_lost = 0
        self.preemptions = 0
        self.ends_by_finish = dict.fromkeys(FINISHES, 0)
        self.stops_by_reason = dict.fromkeys(ADMISSION_STOPS, 0)
        self.rejections_by_reason = dict.fromkeys(REJECTION_REASONS, 0)
        self.ttft_s = Histogram(ttft_edges)
        self.e2e_s = Histogram(e2e_edges)
        self.steps = StepFold()
        self.requests = RequestFold()

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
        return min(1.0, self.kv_used / self.run.kv_blocks_total) if self.run else 0.0

    @property
    def kv_used(self) -> int:
        """KV blocks that sequences hold."""
        return self.last.kv_blocks_used if self.last is not None and self._live else 0

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
        return self.ended - sum(self.ends_by_finish.values())

    # ---- advancing

    def advance(self) -> None:
        """Take in what was published since; bounded by the ring."""
        head = self._bus.head
        # After a loss the live set is that of a later place: read on at least to there, so that
        # counts and live set are of one moment.
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
            tally = batch.entries[-1].tally
            self.accepted, self.ended = tally[_STARTS], tally[_ENDS]
            self.faults = tally[_FAULTS]

    def _resume(self, snapshot: Snapshot) -> None:
        """Begin again with the live set of a later place: in sum, records up to it agree."""
        self.run = snapshot.run
        self._live = {start.request: start for start in snapshot.live}
        self._live_seq = snapshot.seq
        for known in (self._reached, self._reached_before):
            for request in known.keys() - self._live.keys():
                del known[request]
                self.steps.forget(request)
        self._running &= self._live.keys()
        self._leaving &= self._live.keys()

    def _one(self, entry: Entry) -> None:
        record = entry.record
        if isinstance(record, Iteration):
            self._iteration(record)
        elif isinstance(record, RequestStart):
            self._live[record.request] = record
            self.requests.start(record)
        elif isinstance(record, RequestEnd):
            self._end(record)
            self._live.pop(record.request, None)
        elif isinstance(record, Delivery):
            self._delivery(record)
        elif isinstance(record, RequestCause):
            self.requests.cause(record)
        elif isinstance(record, Rejection):
            self.rejections_by_reason[record.reason] += 1
        elif isinstance(record, Run):
            self.run, self.last = record, None
            self.steps.restart()
            self._running.clear()
            self._leaving.clear()

    def _iteration(self, record: Iteration) -> None:
        self.last = record
        self.iterations += 1
        self.iterations_lost += record.lost_before
        self.stops_by_reason[record.admission_stop] += 1
        for request in record.preempted:
            self.preemptions += 1
            self._reached_before[request] = self._highest(request)
            self._running.discard(request)
        self.steps.take(record, self._known)
        self._reached.update(
            zip(record.requests, map(add, record.start_positions, record.token_counts), strict=True)
        )
        self._running.update(record.admitted)
        for request in record.finished:
            if request in self._running:
                self._running.discard(request)
                self._leaving.add(request)
        if len(self._running) != record.running:
            # An iteration was lost, and with it who was admitted or preempted.
            self._running = set(record.requests) - self._leaving

    def _end(self, record: RequestEnd) -> None:
        request = record.request
        self.ends_by_finish[record.finish] += 1
        self.requests.end(record)
        self.steps.forget(request)
        highest = self._highest(request)
        known = record.prefill_finished_at_ns is not None or highest >= record.prompt_tokens
        self._ended_prompt_tokens += record.prompt_tokens if known else 0
        # A counter never falls: what was counted while it lived stays counted.
        self._ended_generation_tokens += max(record.output_tokens, highest - record.prompt_tokens)
        self._reached.pop(request, None)
        self._reached_before.pop(request, None)
        self._running.discard(request)
        self._leaving.discard(request)
        if served(record.finish):
            delivery = self._unmatched_deliveries.pop(request, None)
            if delivery is None:
                _keep(self._unmatched_ends, request, record)
            else:
                self._end_to_end(record, delivery)

    def _delivery(self, record: Delivery) -> None:
        self.requests.delivery(record)
        if record.first_write_at_ns is not None:
            self.ttft_s.observe((record.first_write_at_ns - record.received_at_ns) / 1e9)
        end = self._unmatched_ends.pop(record.request, None)
        if end is not None:
            self._end_to_end(end, record)
        elif record.request in self._live:
            _keep(self._unmatched_deliveries, record.request, record)

    def _end_to_end(self, end: RequestEnd, delivery: Delivery) -> None:
        last_at_ns = delivery.last_write_at_ns or end.released_at_ns
        self.requests.delivered(end, delivery)
        self.e2e_s.observe((last_at_ns - delivery.received_at_ns) / 1e9)

    def _known(self, request: int) -> tuple[int, int]:
        """Return a sequence's prompt length, and its first position never computed."""
        start = self._live.get(request)
        return (start.prompt_tokens if start else 0), self._highest(request)

    def _highest(self, request: int) -> int:
        """Return the first position of a sequence that was never computed."""
        return max(self._reached.get(request, 0), self._reached_before.get(request, 0))


def served(finish: Finish) -> bool:
    """Whether a sequence got what it asked for."""
    return finish in {"stop", "length"}


def _keep(waiting: dict[int, _Half], request: int, record: _Half) -> None:
    if len(waiting) >= UNMATCHED_MAX:
        del waiting[next(iter(waiting))]
    waiting[request] = record
