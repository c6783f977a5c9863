"""One request's life, iteration by iteration: what each nanosecond of it was spent on, and by whom.

Owns `walk`, which follows one request's state through the iterations of its life and names who
was in its way, in all of it and in its slowest gaps. explanation.py shows the result;
explain_fold.py comes to the same sums for all requests at once, and a test holds the two together.
Must never guess: what no record tells is `unexplained`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from telemetry.explain import SPLIT, Floats, Ints, Model, Parts, named_neighbours, split
from telemetry.explain_tiles import (
    CAUSE_INDEX,
    Bounds,
    Tile,
    after,
    batch_of,
    before,
    bounds,
    waits_for,
)
from telemetry.records import CAUSES, Delivery, RequestEnd, RequestStart

SPLIT_INDEX = [CAUSE_INDEX[cause] for cause in SPLIT]
ROWS_AT_ONCE = 100_000
"""Batch rows that are divided in one go: a bound on memory, not on the life."""

SLOW_MAX = 16
"""The longest gaps, whose neighbours are named one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that the iterations tell of a life."""

    name: str
    at_ns: int
    facts: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """What one other request did to this one under one cause."""

    tokens: int
    ns: float


Named = dict[str, dict[int, Neighbour]]
"""Who stands behind each cause, by request."""

_Found = dict[str, dict[int, tuple[int, float]]]  # the same while it is summed up


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A life divided: `by_tile` [tiles, causes] ns in the order of CAUSES.

    `commits` are its tokens, each the index of the tile that committed it and its number from 1;
    `at_ns` [tiles] is where each tile ends for this request, `rows` its batch row there (-1 without
    one). `before` and `after` are what lies outside the tiles. `named` tells of the whole life,
    `slow` of its longest gaps, each by the index of the commit that ended it.
    """

    bounds: Bounds
    state: str
    tiles: list[Tile]
    rows: list[int]
    by_tile: Ints
    at_ns: list[int]
    commits: list[tuple[int, int]]
    before: dict[str, int]
    after: dict[str, int]
    named: Named
    slow: dict[int, Named]
    events: list[Event]
    models: list[Model]

    @property
    def tokens(self) -> int:
        """Return how many output tokens the iterations tell of."""
        return self.commits[-1][1] if self.commits else 0

    def totals(self) -> dict[str, int]:
        """Return the ns of each cause that has any, in the order of CAUSES."""
        sums = self.by_tile.sum(axis=0)
        for part in (self.before, self.after):
            for cause, ns in part.items():
                sums[CAUSE_INDEX[cause]] += ns
        return {cause: int(ns) for cause, ns in zip(CAUSES, sums, strict=True) if ns}


def walk(
    start: RequestStart,
    end: RequestEnd | None,
    delivery: Delivery | None,
    tiles: Sequence[tuple[Tile, Model]],
    *,
    prompts: Mapping[int, int],
    prior_step: int | None = None,
) -> Walk:
    """Divide one life; `tiles` are its generation's from its arrival on, in order.

    `prompts` are the prompt lengths of the requests in them, as far as known; `prior_step` is the
    step before the first tile if that one is on record: then nothing is missing before it.
    """
    through = tiles[-1][0].end_at_ns if tiles else start.arrived_at_ns
    limits = bounds(start, end, delivery, through)
    decided = end.decided_at_ns if end else None
    walker = _Walker(start, limits, decided, prior_step)
    for tile, model in tiles:
        walker.take(tile, model)
    return walker.finish(delivery, prompts, ended=end is not None)


class _Walker:
    """Goes through the tiles of one life in order."""

    def __init__(
        self, start: RequestStart, limits: Bounds, decided: int | None, prior_step: int | None
    ) -> None:
        self._request = start.request
        self._limits = limits
        self._decided = decided
        self._cursor = limits.arrived
        self._step = prior_step or 0
        self._first = True
        self._gap: int | None = None  # index of the tile after the last loss
        self._state = "waiting"
        self._for: int | None = None  # whom it was preempted for
        self._lost = 0
        self._known = start.prompt_tokens
        self._prompt = start.prompt_tokens
        self._tiles: list[Tile] = []
        self._models: list[Model] = []
        self._charges: list[dict[str, int]] = []
        self._behind: list[tuple[str, int | None]] = []
        self._rows: list[tuple[int, int, int, int]] = []  # tile, row, length, lost
        self._placeless: list[tuple[int, int]] = []  # tile, length: running, without a row
        self._at_ns: list[int] = []
        self._commits: list[tuple[int, int]] = []
        self._events: list[Event] = []

    def take(self, tile: Tile, model: Model) -> None:
        """Charge one tile to the request."""
        certain = tile.step == self._step + 1
        self._step = tile.step
        limits = self._limits
        if tile.end_at_ns <= limits.arrived or self._cursor >= limits.stop:
            return
        low = min(max(tile.begin_at_ns, limits.arrived), limits.stop)
        high = min(tile.end_at_ns, limits.stop)
        charge: dict[str, int] = {}
        if low > self._cursor:
            cause = "step_boundary" if self._first and certain else "unexplained"
            charge[cause] = low - self._cursor
        if not certain:
            self._gap = len(self._tiles)
        self._first = False
        self._cursor = high
        self._tiles.append(tile)
        self._models.append(model)
        self._charges.append(charge)
        self._behind.append(("", None))
        self._at_ns.append(high)
        row = self._meet(tile)
        self._charge(tile, row, low, high)

    def _meet(self, tile: Tile) -> int:
        """Follow the request's state through a tile; return its row, -1 without one."""
        request = self._request
        row = tile.requests.index(request) if request in tile.requests else -1
        if request in tile.preempted:
            self._preempt(tile, tile.preempted.index(request))
        elif request in tile.admitted:
            cached = tile.admitted_cached_tokens[tile.admitted.index(request)]
            name = "admitted" if self._state == "waiting" else "readmitted"
            at_ns = max(tile.begin_at_ns, self._limits.arrived)
            self._events.append(Event(name=name, at_ns=at_ns, facts={"cached_tokens": cached}))
            self._state = "running"
        elif row >= 0 and self._state != "running":
            self._forget_since_the_gap()
            self._state = "running"
        return row

    def _preempt(self, tile: Tile, at: int) -> None:
        if self._state != "running":
            self._forget_since_the_gap()
        lost = tile.preempted_lost_tokens[at]
        self._state = f"preempted_{tile.preempted_causes[at]}"
        self._for = tile.preempted_beneficiaries[at]
        self._lost = max(self._lost, lost)
        facts: dict[str, object] = {
            "cause": tile.preempted_causes[at],
            "lost_tokens": lost,
            "request": self._for,
        }
        at_ns = max(tile.begin_at_ns, self._limits.arrived)
        self._events.append(Event(name="preempted", at_ns=at_ns, facts=facts))

    def _forget_since_the_gap(self) -> None:
        """Take back what was said of the time in which its admission was lost."""
        for index in range(self._gap or 0, len(self._charges) - 1):
            charge = self._charges[index]
            unknown = sum(charge.values())
            if unknown:
                self._charges[index] = {"unexplained": unknown}
                self._behind[index] = ("", None)

    def _charge(self, tile: Tile, row: int, low: int, high: int) -> None:
        charge = self._charges[-1]
        if self._state.startswith("preempted"):
            charge[self._state] = high - low
            self._behind[-1] = (self._state, self._for)
        elif self._request in tile.passed_over:
            charge["passed_over"] = high - low
        elif self._state == "waiting":
            cause = waits_for(tile.admission_stop)
            charge[cause] = charge.get(cause, 0) + high - low
            self._behind[-1] = (cause, tile.admission_blocker)
        else:
            until = min(high, max(low, self._limits.cut))
            if high > until:
                charge["batch_held"] = high - until
            if row >= 0:
                self._rows.append((len(self._tiles) - 1, row, until - low, self._lost))
                self._count_token(tile, row)
            elif until > low and self._ends_in(tile):
                charge["scheduler"] = until - low  # it was ended before the step was planned
            elif until > low:
                self._placeless.append((len(self._tiles) - 1, until - low))

    def _ends_in(self, tile: Tile) -> bool:
        return self._decided is not None and tile.begin_at_ns < self._decided <= tile.end_at_ns

    def _count_token(self, tile: Tile, row: int) -> None:
        reached = tile.start_positions[row] + tile.token_counts[row]
        if reached >= self._known and tile.end_at_ns - tile.commit_ns <= self._limits.cut:
            self._known = reached + 1
            self._commits.append((len(self._tiles) - 1, self._known - self._prompt))

    def finish(self, delivery: Delivery | None, prompts: Mapping[int, int], *, ended: bool) -> Walk:
        """Divide the rows and put everything together."""
        limits = self._limits
        by_tile = np.zeros((len(self._tiles), len(CAUSES)), dtype=np.int64)
        for index, charge in enumerate(self._charges):
            for cause, ns in charge.items():
                by_tile[index, CAUSE_INDEX[cause]] += ns
        # Admitted and given nothing, unless it is the record that has holes.
        cause = "passed_over" if self._gap is None else "unexplained"
        for index, ns in self._placeless:
            by_tile[index, CAUSE_INDEX[cause]] += ns
        named = self._named(0, len(self._tiles), prompts, by_tile)
        state = self._state if self._state in ("waiting", "running") else "preempted"
        return Walk(
            bounds=limits,
            state="finished" if ended else state,
            tiles=self._tiles,
            rows=self._row_of_each(),
            by_tile=by_tile,
            at_ns=self._at_ns,
            commits=self._commits,
            before=before(limits, delivery),
            after=after(limits, delivery, limits.stop - self._cursor),
            named=named,
            slow=self._slow(prompts),
            events=self._events,
            models=self._models,
        )

    def _row_of_each(self) -> list[int]:
        rows = [-1] * len(self._tiles)
        for index, row, *_ in self._rows:
            rows[index] = row
        return rows

    def _slow(self, prompts: Mapping[int, int]) -> dict[int, Named]:
        """Return who is behind each of the longest gaps, by the index of the commit ending it."""
        at_ns, commits = self._at_ns, self._commits
        lengths = [
            (at_ns[commits[index][0]] - at_ns[commits[index - 1][0]], index)
            for index in range(1, len(commits))
        ]
        longest = sorted(lengths, reverse=True)[:SLOW_MAX]
        return {
            index: self._named(commits[index - 1][0] + 1, commits[index][0] + 1, prompts)
            for _, index in sorted(longest, key=lambda one: one[1])
        }

    def _named(
        self, first: int, last: int, prompts: Mapping[int, int], by_tile: Ints | None = None
    ) -> Named:
        """Return who is behind the time of tiles first..last - 1; their rows go into `by_tile`."""
        found = self._named_waits(first, last)
        low, high = (bisect_left(self._rows, (index,)) for index in (first, last))
        for part in _parts(self._rows[low:high], self._tiles):
            indices, causes = self._divide(part, found, prompts)
            if by_tile is not None:
                by_tile[indices[:, None], SPLIT_INDEX] += causes
        return {
            cause: {request: Neighbour(tokens=t, ns=ns) for request, (t, ns) in those.items()}
            for cause, those in found.items()
        }

    def _named_waits(self, first: int, last: int) -> _Found:
        """Return who is behind each wait: those before it in line, else those in the batch.

        The first in line is its own blocker: what it lacks is held by those that run, and before
        its first step it is their step that it waits for. They are named in equal parts.
        """
        named: _Found = {}
        of_these = (column[first:last] for column in (self._tiles, self._behind, self._charges))
        for tile, (cause, whom), charge in zip(*of_these, strict=True):
            if not cause:
                continue
            ahead = [whom] if whom not in (None, self._request) else tile.requests
            found = named.setdefault(cause, {})
            for other in ahead:
                assert other is not None
                _, ns = found.get(other, (0, 0.0))
                found[other] = (0, ns + charge.get(cause, 0) / len(ahead))
        return named

    def _divide(
        self,
        rows: list[tuple[int, int, int, int]],
        named: _Found,
        prompts: Mapping[int, int],
    ) -> tuple[Ints, Ints]:
        """Divide some rows and name their neighbours; return their tiles and what each got."""
        tiles = [self._tiles[index] for index, *_ in rows]
        models = [self._models[index] for index, *_ in rows]
        batch, members = batch_of(tiles, models, prompts)
        offsets = np.cumsum([0, *(len(tile.requests) for tile in tiles[:-1])])
        own = offsets + np.array([row for _, row, _, _ in rows], dtype=np.int64)
        count = len(rows)
        parts = Parts(
            starts=batch.starts[own],
            counts=batch.counts[own],
            prompts=np.full(count, self._prompt, dtype=np.int64),
            lost=np.array([lost for *_, lost in rows], dtype=np.int64),
            lengths=np.array([length for _, _, length, _ in rows], dtype=np.int64),
            device_ns=batch.device_ns,
            models=batch.models,
            totals=batch.totals(),
        )
        causes = split(parts)
        indices = np.array([index for index, *_ in rows], dtype=np.int64)
        added = named_neighbours(batch, own, causes)
        for cause, ns in zip(("neighbour_prefill", "neighbour_decode"), added, strict=True):
            _add_named(named.setdefault(cause, {}), members, batch.counts, ns)
        return indices, causes


def _parts(
    rows: list[tuple[int, int, int, int]], tiles: list[Tile]
) -> Iterable[list[tuple[int, int, int, int]]]:
    """Yield the rows in portions whose steps have a bounded number of rows together."""
    portion: list[tuple[int, int, int, int]] = []
    size = 0
    for row in rows:
        portion.append(row)
        size += len(tiles[row[0]].requests)
        if size >= ROWS_AT_ONCE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _add_named(
    found: dict[int, tuple[int, float]], members: Ints, counts: Ints, ns: Floats
) -> None:
    there = ns > 0
    requests, places = np.unique(members[there], return_inverse=True)
    tokens = np.bincount(places, counts[there], len(requests))
    added = np.bincount(places, ns[there], len(requests))
    for request, some, more in zip(requests.tolist(), tokens.tolist(), added.tolist(), strict=True):
        had, before_ns = found.get(request, (0, 0.0))
        found[request] = (had + int(some), before_ns + more)
