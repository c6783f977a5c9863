"""The fold: every request's causes and shares, summed while iterations come, told when it is over.

Owns one Life a live request and the running sums of waiting time: an iteration costs O(its rows),
a waiting request O(1). The server's explainer thread calls `advance` and publishes what it returns;
receipts read it. Comes to what explain_walk.py finds by going through one life. Must never name
neighbours: that goes back to the iterations, on demand.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import cast

from telemetry.bus import Bus, Snapshot
from telemetry.explain import COUNTED, SPLIT
from telemetry.explain_life import Life, Settled, Totals
from telemetry.explain_sums import KV, NOBODY, Cut, RowSums, Step, recount
from telemetry.explain_tiles import model_of
from telemetry.records import (
    ADMISSION_STOPS,
    Cause,
    Delivery,
    Iteration,
    Record,
    RequestCause,
    RequestEnd,
    RequestShare,
    RequestStart,
    Run,
    StepModel,
)

TAKE_MAX = 2048
ROWS_MAX = 2048
"""Rows that wait to be divided in one go, unless a life is settled before."""
RECENT_STEPS = 1024
TAIL_STEPS = 16
DECIDED_STEPS = 3
"""Steps before its end that a life's last instants can lie in: a stop string needs two or three."""
EARLY_MAX = 10_000
"""Deliveries whose start has not come yet: a bound, never reached in health."""

STOP_INDEX = {stop: index for index, stop in enumerate(ADMISSION_STOPS)}


class CauseFold:
    """All lives of a run as of the record it has read last. One thread at a time."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reader = bus.reader(0, label="explain")
        self._lives: dict[int, Life] = {}
        self._slots: dict[int, int] = {}
        self._fresh: list[Life] = []  # arrived, and no tile seen yet
        self._lost: dict[int, int] = {}  # tokens that preemptions took, of live requests
        self._unplaced: set[int] = set()  # not running when iterations were lost
        self._early: dict[int, Delivery] = {}
        self._over: list[Life] = []
        self._rows = RowSums()
        self._recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        self._totals = Totals([0] * len(ADMISSION_STOPS), 0)
        self._gap: Totals | None = None
        self._model = COUNTED
        self._index = 0
        self._step = 0
        self._end_at_ns = 0

    def advance(self) -> list[Record]:
        """Take in what was published since; return the causes and shares of lives now over."""
        told: list[Record] = []
        head = self._bus.head
        while self._reader.seq < head:
            batch = self._reader.take(TAKE_MAX)
            if batch.lost:
                self._resume(self._bus.tail_snapshot())
            for entry in batch.entries:
                self._one(entry.record)
            told += self._tell()
        return told

    def settled(self, request: int, delivery: Delivery) -> Settled | None:
        """Return a life whose engine part is over as `delivery` stands now; None if unknown."""
        life = self._lives.get(request)
        if life is None or life.end is None:
            return None
        return self._settle([(life, delivery)])[0]

    @property
    def lives(self) -> int:
        """Lives that are not told yet."""
        return len(self._lives)

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()

    # ---- records

    def _one(self, record: Record) -> None:
        if isinstance(record, Iteration):
            self._iteration(record)
            if self._rows.pending >= ROWS_MAX:
                self._rows.flush()
        elif isinstance(record, RequestStart):
            self._start(record)
        elif isinstance(record, RequestEnd):
            self._end(record)
        elif isinstance(record, Delivery):
            self._delivery(record)
        elif isinstance(record, StepModel):
            self._model = model_of(record)
        elif isinstance(record, Run):
            self._model, self._step, self._gap = COUNTED, 0, None
            self._recent.clear()

    def _resume(self, snapshot: Snapshot) -> None:
        """Go on after records were lost: with the lives of a later place, all uncertain."""
        live = {start.request: start for start in snapshot.live}
        self._rows.flush()
        for request, life in list(self._lives.items()):
            if request not in live and life.end is None:
                self._drop(life)
        for start in live.values():
            self._start(start)
        self._step = -1

    def _start(self, record: RequestStart) -> None:
        if record.request in self._lives:
            return
        life = Life(record, self._rows.open(record.prompt_tokens))
        self._lives[record.request] = life
        self._slots[record.request] = life.slot
        if record.arrived_at_ns >= self._end_at_ns or not self._recent:
            self._fresh.append(life)
        else:
            self._catch_up(life)
        if delivery := self._early.pop(record.request, None):
            life.delivery = delivery

    def _catch_up(self, life: Life) -> None:
        """Let a life whose start was told late go through the tiles since its arrival, waiting."""
        arrived = life.start.arrived_at_ns
        missed = [step for step in self._recent if step.record.end_at_ns > arrived]
        begun = self._totals.copy()
        for step in missed:
            length = step.record.end_at_ns - max(step.record.begin_at_ns, arrived)
            begun.waited[STOP_INDEX[step.record.admission_stop]] -= length
            begun.covered -= length
        whole = missed[0] is not self._recent[0] or len(self._recent) < RECENT_STEPS
        life.begin(missed[0], begun, certain=whole)
        if not all(step.certain for step in missed):
            life.lose()
            self._unplaced.add(life.start.request)
        for step in missed:
            if life.start.request in step.record.passed_over:
                stop = STOP_INDEX[step.record.admission_stop]
                life.pass_over(stop, step.record.end_at_ns - max(step.record.begin_at_ns, arrived))

    def _end(self, record: RequestEnd) -> None:
        life = self._lives.get(record.request)
        if life is None:
            return
        life.end = record
        self._part(life)
        if life in self._fresh:
            self._fresh.remove(life)
        self._keep_tail(life, record.decided_at_ns)
        if life.delivery is not None:
            self._over.append(life)

    def _keep_tail(self, life: Life, decided_at_ns: int) -> None:
        """Keep the steps that the last instants of a life lie in.

        At loop depth 2 a row of a fixed batch comes back once more after its finish was decided,
        which may be long before the batch is freed.
        """
        recent = list(self._recent)
        decided = bisect_left(recent, decided_at_ns, key=lambda step: step.record.end_at_ns)
        last = max(0, len(recent) - TAIL_STEPS)
        steps = recent[decided : min(last, decided + DECIDED_STEPS)] + recent[last:]
        life.tail = [step for step in steps if step.index <= life.last_index]
        if decided < len(recent):
            step = recent[decided]
            life.held_from = step.covered + max(0, decided_at_ns - step.record.begin_at_ns)

    def _delivery(self, record: Delivery) -> None:
        life = self._lives.get(record.request)
        if life is not None:
            life.delivery = record
            if life.end is not None:
                self._over.append(life)
            return
        if len(self._early) >= EARLY_MAX:
            del self._early[next(iter(self._early))]
        self._early[record.request] = record

    # ---- iterations

    def _iteration(self, record: Iteration) -> None:
        certain = record.step == self._step + 1
        if not certain:
            self._lose()
        step = Step(record, self._index, self._model, self._totals.covered, certain=certain)
        stop = STOP_INDEX[record.admission_stop]
        length = record.end_at_ns - record.begin_at_ns
        begun = self._begin_lives(step, stop) if self._fresh else {}
        if record.preempted:
            self._preempt(record)
        for request in record.admitted:
            if life := self._present(request):
                life.run(self._index, self._totals, begun.get(request, 0))
                self._unplaced.discard(request)
        if self._unplaced:
            self._find_unplaced(record)
        for request in record.passed_over:
            if life := self._present(request):
                life.pass_over(stop, length - begun.get(request, 0))
        self._totals.waited[stop] += length
        self._totals.covered += length
        self._add_rows(step, begun)
        for request in record.finished:
            if life := self._present(request):
                self._part(life)
        self._recent.append(step)
        self._index += 1
        self._step = record.step
        self._end_at_ns = record.end_at_ns

    def _present(self, request: int) -> Life | None:
        """Return a life whose engine part is not over.

        At loop depth 2 a step may have been planned for one that ended meanwhile.
        """
        life = self._lives.get(request)
        return None if life is None or life.parted else life

    def _lose(self) -> None:
        """Note that iterations are missing here: whoever did not run may have run meanwhile."""
        self._gap = self._totals.copy()
        for request, life in self._lives.items():
            if life.first is not None and not life.parted:
                life.lose()
                if life.state != "running":
                    self._unplaced.add(request)

    def _begin_lives(self, step: Step, stop: int) -> dict[int, int]:
        """Begin the lives that arrived before this tile's end; return what part each missed."""
        begun: dict[int, int] = {}
        later: list[Life] = []
        for life in self._fresh:
            if life.start.arrived_at_ns >= step.record.end_at_ns:
                later.append(life)
                continue
            missed = max(0, life.start.arrived_at_ns - step.record.begin_at_ns)
            totals = self._totals.copy()
            totals.waited[stop] += missed
            totals.covered += missed
            life.begin(step, totals)
            begun[life.start.request] = missed
            if not step.certain:  # it may have been admitted meanwhile
                life.lose()
                self._unplaced.add(life.start.request)
        self._fresh = later
        return begun

    def _preempt(self, record: Iteration) -> None:
        for request, cause, lost in zip(
            record.preempted, record.preempted_causes, record.preempted_lost_tokens, strict=True
        ):
            if life := self._present(request):
                if life.state != "running":
                    life.recall(self._gap, self._totals)
                life.preempt(self._index, self._totals, cause)
                self._lost[request] = max(self._lost.get(request, 0), lost)
                self._unplaced.discard(request)

    def _find_unplaced(self, record: Iteration) -> None:
        """Let those run whose admission was lost with an iteration."""
        for request in self._unplaced.intersection(record.requests):
            self._unplaced.discard(request)
            if (life := self._lives.get(request)) and life.state != "running":
                life.recall(self._gap, self._totals)
                life.run(self._index, self._totals, 0)

    def _add_rows(self, step: Step, begun: dict[int, int]) -> None:
        requests = step.record.requests
        if not requests:
            return
        try:
            slots = list(map(self._slots.__getitem__, requests))
        except KeyError:
            slots = [self._slots.get(request, NOBODY) for request in requests]
        lost = None
        if self._lost:
            lost = [self._lost.get(request, 0) for request in requests]
        self._rows.add(step, slots, lost)
        length = step.record.end_at_ns - step.record.begin_at_ns
        for request, missed in begun.items():
            if missed and request in requests:
                self._rows.shorten(requests.index(request), length - missed)

    def _part(self, life: Life) -> None:
        """Sum up the engine's part of a life; nothing is added to it from here on."""
        if life.parted:
            return
        life.part(self._index, self._totals)
        self._slots.pop(life.start.request, None)
        self._unplaced.discard(life.start.request)
        life.lost = self._lost.pop(life.start.request, 0)

    # ---- telling

    def _tell(self) -> list[Record]:
        """Return the records of the lives that are over, and forget these."""
        over, self._over = self._over, []
        if not over:
            return []
        told: list[Record] = []
        asked = [(life, life.delivery) for life in over if life.delivery is not None]
        for settled in self._settle(asked):
            told += records_of(settled)
        for life in over:
            self._drop(life)
        return told

    def _settle(self, asked: Sequence[tuple[Life, Delivery]]) -> list[Settled]:
        """Divide lives whose engine part is over; their last rows are cut in one go."""
        self._rows.flush()
        cuts: list[Cut] = []
        owners: list[int] = []
        for index, (life, delivery) in enumerate(asked):
            found = life.cuts(delivery)
            cuts += found
            owners += [index] * len(found)
        changes = [[0] * len(SPLIT) for _ in asked]
        blocks = [0] * len(asked)
        for owner, cut, change in zip(owners, cuts, recount(cuts).tolist(), strict=True):
            changes[owner] = [a + b for a, b in zip(changes[owner], change, strict=True)]
            blocks[owner] += cut.step.record.kv_block_counts[cut.row] * (cut.now - cut.was)
        settled = []
        for (life, delivery), change, kv in zip(asked, changes, blocks, strict=True):
            sums = self._rows.read(life.slot)
            rows = [a + b for a, b in zip(sums, change, strict=False)] + sums[len(SPLIT) :]
            rows[KV] += kv
            settled.append(life.settle(delivery, rows, self._rows.blocks(life.slot)))
        return settled

    def _drop(self, life: Life) -> None:
        request = life.start.request
        self._part(life)
        self._lives.pop(request, None)
        if life in self._fresh:
            self._fresh.remove(life)
        self._rows.close(life.slot)


def records_of(settled: Settled) -> list[Record]:
    """Return what is published of a life that is over."""
    told: list[Record] = [
        RequestCause(request=settled.request, cause=cast(Cause, cause), ns=ns, rule=settled.rule)
        for cause, ns in settled.causes.items()
    ]
    told.append(
        RequestShare(
            request=settled.request,
            device_ns=settled.device_ns,
            kv_block_ns=settled.kv_block_ns,
            rule=settled.rule,
        )
    )
    return told
