"""Scheduling policies: who is first in line, who is placed first, who gives way.

Owns the order of everything, as pure functions over read-only requests and a policy's own state,
which only `joins`, `charge` and `leaves` change. The scheduler calls these hooks and never asks a
policy's name; adding one touches this file and one golden timeline. Never changes a request, a plan
or the pool.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.plan import Plan, StepOutput
from engine.request import Request
from engine.rows import Vector
from engine.step_model import StepTimes
from engine.table import SLOTS_MIN, Table

Refusal = Literal["slo", "policy"]
Ranks = npt.NDArray[np.float64]


class View(NamedTuple):
    """What a policy may know of the step being planned; `slots` are those of `running`."""

    now_ns: int
    running: Sequence[Request]
    slots: Vector
    table: Table
    waiting: int
    tokens_left: int


OTHER_TENANTS = "(other)"
DECODE_WEIGHT = 2
LATE = "(late)"
LATE_SHARE = 16
"""One in so many admissions is of those that cannot meet their objective any more."""


def widened(by_slot: Vector, slot: int) -> Vector:
    """Return the vector, longer if it has no place for the slot."""
    while slot >= len(by_slot):
        by_slot = np.pad(by_slot, (0, len(by_slot)))
    return by_slot


by_rank = attrgetter("rank")
by_arrival = attrgetter("arrival")
"""Order by arrival; equal instants by number, which grows with it."""


class Policy:
    """The hooks and their neutral answers. Starvation bound: stated by each policy's docstring."""

    name = "policy"
    overtakes = False
    """Whether planning goes on at the next group's head when `refuse` stopped this one's."""
    may_preempt = False
    """Whether `preempts` ever names anybody."""
    decodes_first = False
    """Whether running decodes are given tokens before running prefill chunks."""

    def __init__(self, config: EngineConfig, times: StepTimes) -> None:
        self.config = config
        self.times = times

    def rank(self, request: Request) -> tuple[int, ...]:
        """Place in line, constant while the request waits; lower goes first."""
        return request.arrival

    def group(self, request: Request) -> str:
        """Name of the line it stands in."""
        del request
        return ""

    def regroup(self, request: Request, now_ns: int) -> str:
        """Name of the line that the first of its line belongs in by now; it moves there."""
        del now_ns
        return request.group

    def group_ranks(self, groups: tuple[str, ...]) -> Ranks:
        """Places of lines among the lines; lower goes first.

        The lines' names are one object until they change, and so is what is returned until any
        place does.
        """
        return np.zeros(len(groups))

    def running_key(self, request: Request) -> tuple[int, ...]:
        """Place among the running, constant while it runs; lower is given tokens first."""
        return request.arrival

    def running_order(self, view: View) -> Vector | None:
        """Return the places of `view.running` in another order than by running_key, or None."""
        del view
        return None

    def victim(self, unplaced: Sequence[Request]) -> Request:
        """Return who loses its blocks when they lack: of those not placed yet, latest arrived."""
        return max(unplaced, key=by_arrival)

    def preempts(self, candidate: Request, running: Sequence[Request]) -> Request | None:
        """Return the running request that makes room for a waiting one, or None."""
        del candidate, running
        return None

    def prefill_budget(self, view: View) -> int | None:
        """Return the most prefill tokens of this step, None for no cap of its own."""
        del view
        return None

    def refuse(self, request: Request, view: View) -> Refusal | None:
        """Return why a request may not be admitted although it would fit."""
        del request, view
        return None

    def joins(self, request: Request) -> None:
        """Take note that a request entered the line."""

    def leaves(self, request: Request) -> None:
        """Take note that a request ended."""

    def charge(self, plan: Plan, output: StepOutput) -> None:
        """Take note of a committed step."""
        del plan, output


class Fcfs(Policy):
    """First come, first served: running chunks and decodes alike, by arrival.

    Starvation bound: a request waits only for those that arrived before it, each of which needs
    finitely many steps, since the first in order can always preempt all others.
    """

    name = "fcfs"


class DecodeFirst(Policy):
    """Arrival order in line; of the running, decodes before prefill chunks.

    Starvation bound: fcfs's for admission. A running chunk gets at least one token a step, since
    max_num_batched_tokens >= max_num_seqs leaves one when every other row decodes.
    """

    name = "decode_first"
    decodes_first = True


class Priority(Policy):
    """Lower numbers earlier; waiting makes up for a level each priority_age_ms.

    The rank arrived + priority x age never changes while a request waits, and orders it against
    all others for ever. Starvation bound: a request is overtaken only by those that arrive within
    priority_age_ms x (its level - the lowest level) after it.
    """

    name = "priority"
    may_preempt = True
    decodes_first = True

    def rank(self, request: Request) -> tuple[int, ...]:
        """Place in line: the instant of arrival, moved by the level."""
        age_ns = self.config.priority_age_ms * 1_000_000
        return (request.life.arrived + request.submit.priority * age_ns, request.number)

    def running_key(self, request: Request) -> tuple[int, ...]:
        """Place among the running: the rank."""
        return request.rank

    def victim(self, unplaced: Sequence[Request]) -> Request:
        """Return the last by rank."""
        return max(unplaced, key=by_rank)

    def preempts(self, candidate: Request, running: Sequence[Request]) -> Request | None:
        """Return the last by rank of those on a lower level than the candidate, if any."""
        level = candidate.submit.priority
        lower = [
            request
            for request in running
            if request.submit.priority > level and request.rank > candidate.rank
        ]
        return max(lower, key=by_rank, default=None)


class Fair(Policy):
    """Tenants share what is served: each has a virtual token counter, the least served goes next.

    After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): a counter rises by
    tokens served over the tenant's weight, decodes counting twice, and a tenant back from idle
    starts at the least counter of those active. Starvation bound: between two backlogged tenants
    of equal weight the counters differ by at most one step's tokens and one request's.
    """

    name = "fair"
    decodes_first = True
    overtakes = True

    def __init__(self, config: EngineConfig, times: StepTimes) -> None:
        super().__init__(config, times)
        self._places: dict[str, int] = {}  # tenant to its column below
        self._free: list[int] = []
        # Rows: the counter, what a token counts by the tenant's weight, its live requests.
        self._counters, self._prices, self._live = np.zeros((3, 0))
        self._place_of: Vector = np.zeros(SLOTS_MIN, dtype=np.int64)  # by a request's slot
        self._lines: tuple[str, ...] = ()  # those last asked for, and their columns
        self._places_of_lines: Vector = np.zeros(0, dtype=np.int64)
        self._ranks: Ranks | None = None  # of these lines, None once a counter has changed

    def group(self, request: Request) -> str:
        """Return the tenant, or the shared line when too many are told apart already."""
        tenant = request.submit.tenant
        known = self._places.get(tenant)
        if known is not None and self._live[known]:
            return tenant
        room = np.count_nonzero(self._live) < self.config.tenants_max
        return tenant if room else OTHER_TENANTS

    def group_ranks(self, groups: tuple[str, ...]) -> Ranks:
        """Return the tenants' counters."""
        if groups is not self._lines:
            self._lines = groups
            places = [self._places[group] for group in groups]
            self._places_of_lines, self._ranks = np.array(places, dtype=np.int64), None
        if self._ranks is None:
            self._ranks = self._counters[self._places_of_lines]
        return self._ranks

    def joins(self, request: Request) -> None:
        """Count a tenant's live requests; one back from idle gets no credit for its absence."""
        place = self._places.get(request.group)
        if place is None:
            place = self._places[request.group] = self._new_place(request.group)
        if not self._live[place]:
            least = min(self._counters[self._live > 0].tolist(), default=0.0)
            self._counters[place] = max(self._counters[place], least)
            self._ranks = None
        self._live[place] += 1
        self._place_of = widened(self._place_of, request.slot)
        self._place_of[request.slot] = place

    def _new_place(self, group: str) -> int:
        if not self._free:
            count = len(self._counters)
            values = np.stack((self._counters, self._prices, self._live))
            self._counters, self._prices, self._live = np.pad(values, ((0, 0), (0, count + 8)))
            self._free.extend(range(2 * count + 7, count - 1, -1))
        place = self._free.pop()
        self._counters[place] = 0.0
        self._prices[place] = 1 / self.config.weights.get(group, 1.0)
        return place

    def leaves(self, request: Request) -> None:
        """Forget tenants with nothing live, once there are too many whose counters say nothing."""
        self._live[self._places[request.group]] -= 1
        if len(self._places) > 2 * self.config.tenants_max:
            for group in [group for group, place in self._places.items() if not self._live[place]]:
                self._free.append(self._places.pop(group))

    def refuse(self, request: Request, view: View) -> Refusal | None:
        """Refuse a tenant that runs as many sequences as its quota allows."""
        quota = self.config.tenant_seqs_max
        if quota is None:
            return None
        running = sum(1 for other in view.running if other.group == request.group)
        return "policy" if running >= quota else None

    def charge(self, plan: Plan, output: StepOutput) -> None:
        """Raise the counters by what the step served."""
        del output
        if (step := plan.reserved) is None:
            return
        decodes = (step.starts > 0) & (step.counts == 1) & step.samples
        places = self._place_of[step.slots]
        tokens = step.counts + (DECODE_WEIGHT - 1) * decodes
        self._counters += self._prices * np.bincount(places, tokens, minlength=len(self._prices))
        self._ranks = None


class Objective(msgspec.Struct, frozen=True):
    """A latency objective in ms; what is None is the server's default."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Slo(Policy):
    """Latest start first; prefill gets what the least slack of those still in time allows.

    Token j of a request is due at arrival + ttft + j x tpot. Its latest start is that due time of
    its first token less the modelled time of its prompt. Whoever is past it when its turn comes
    cannot be in time any more and moves to a line of its own, so that under overload some are in
    time instead of nobody; those running that are late slow nobody down. Starvation bound: of those
    that can be in time, a request is overtaken only by earlier latest starts; a late one is first
    of its line after LATE_SHARE - 1 admissions from the other; and prefill always gets 1/16 of the
    budget.
    """

    name = "slo"
    decodes_first = True

    def __init__(self, config: EngineConfig, times: StepTimes) -> None:
        super().__init__(config, times)
        # By a request's slot: when its first token is due, and the time for each one after it.
        self._first_due: Vector = np.zeros(SLOTS_MIN, dtype=np.int64)
        self._tpot: Vector = np.zeros(SLOTS_MIN, dtype=np.int64)
        self._in_time = 0  # admissions since one of the late line
        self._lines: tuple[str, ...] = ()  # those last asked for, and which of them is the late
        self._late: Ranks = np.zeros(0)

    def rank(self, request: Request) -> tuple[int, ...]:
        """Place in line: the latest start."""
        asked = Objective()
        if request.submit.slo:
            asked = msgspec.json.decode(request.submit.slo, type=Objective)
        ttft_ms = self.config.ttft_ms if asked.ttft_ms is None else asked.ttft_ms
        tpot_ms = self.config.tpot_ms if asked.tpot_ms is None else asked.tpot_ms
        first_due_ns = request.life.arrived + round(ttft_ms * 1e6)
        self._first_due = widened(self._first_due, request.slot)
        self._tpot = widened(self._tpot, request.slot)
        self._first_due[request.slot], self._tpot[request.slot] = first_due_ns, round(tpot_ms * 1e6)
        fit = self.times.fitted
        prompt_ns = round(fit.fixed + fit.p * request.prompt_tokens) if fit else 0
        return (first_due_ns - prompt_ns, request.number)

    def regroup(self, request: Request, now_ns: int) -> str:
        """Let one that can not be in time any more give way; the preempted keep their place."""
        late = request.state == "waiting" and now_ns > request.rank[0]
        return LATE if late else request.group

    def group_ranks(self, groups: tuple[str, ...]) -> Ranks:
        """Put the late last, but for every LATE_SHARE-th admission."""
        if groups is not self._lines:
            self._lines = groups
            self._late = np.array([float(group == LATE) for group in groups])
        return -self._late if self._in_time >= LATE_SHARE - 1 else self._late

    def charge(self, plan: Plan, output: StepOutput) -> None:
        """Count admissions from either line."""
        del output
        if not (count := len(plan.admitted)):
            return
        # They were placed after all others, if there were tokens for them.
        for number, group in zip(plan.requests[-count:], plan.groups[-count:], strict=True):
            if number in plan.admitted:
                self._in_time = 0 if group == LATE else self._in_time + 1

    def due_ns(self, slots: Vector, table: Table) -> Vector:
        """Return when the next token of each is due, ns since the server's start."""
        tokens = table.known[slots] - table.prompt[slots]
        due: Vector = self._first_due[slots] + tokens * self._tpot[slots]
        return due

    def running_order(self, view: View) -> Vector | None:
        """Order by due time, those that are late already after all others."""
        due = self.due_ns(view.slots, view.table)
        return np.lexsort((due, due < view.now_ns))

    def victim(self, unplaced: Sequence[Request]) -> Request:
        """Return the one with most time left."""
        slots = np.array([request.slot for request in unplaced])
        return unplaced[int(np.argmax(self.due_ns(slots, unplaced[0].table)))]

    def prefill_budget(self, view: View) -> int | None:
        """Return the tokens that fit before the least slack of those decoding in time runs out."""
        fit, table = self.times.fitted, view.table
        if fit is None or fit.p <= 0:
            return None
        slots = view.slots[table.read[view.slots] > table.prompt[view.slots]]
        due = self.due_ns(slots, table)
        in_time = due >= view.now_ns
        if not in_time.any():
            return None
        slack_ns = int(due[in_time].min()) - view.now_ns
        context = int(table.computed[slots].sum())
        spare_ns = slack_ns - fit.fixed - fit.d * len(slots) - fit.c * context
        floor = max(1, self.config.max_num_batched_tokens // 16)
        return max(floor, int(spare_ns / fit.p))


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (DecodeFirst, Fcfs, Priority, Fair, Slo)
}
"""Policies by the name that --scheduling-policy takes."""
