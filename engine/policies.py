"""Scheduling policies: who is first in line, who is placed first, who gives way.

Owns the order of everything, as pure functions over read-only requests and a policy's own state,
which only `joins`, `charge` and `leaves` change. The scheduler calls these hooks and never asks a
policy's name; adding one touches this file and one golden timeline. Never changes a request, a plan
or the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.plan import Plan, StepOutput
from engine.request import Request
from engine.step_model import StepTimes

Refusal = Literal["slo", "policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a policy may know of the step being planned."""

    now_ns: int
    running: Sequence[Request]
    waiting: int
    tokens_left: int


OTHER_TENANTS = "(other)"
DECODE_WEIGHT = 2

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
    accounts = False
    """Whether `charge` reads the plan's groups."""

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

    def group_rank(self, group: str) -> float:
        """Place of a line among the lines; lower goes first."""
        del group
        return 0.0

    def running_order(self, running: list[Request]) -> list[Request]:
        """Return who is given tokens first."""
        return sorted(running, key=by_arrival)

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


def decodes_first(ordered: list[Request]) -> list[Request]:
    """Return decodes (one token left to compute), then chunks, each in the order given."""
    decodes: list[Request] = []
    chunks: list[Request] = []
    for request in ordered:
        (chunks if request.known - request.planned > 1 else decodes).append(request)
    return decodes + chunks


class DecodeFirst(Policy):
    """Arrival order in line; of the running, decodes before prefill chunks.

    Starvation bound: fcfs's for admission. A running chunk gets at least one token a step, since
    max_num_batched_tokens >= max_num_seqs leaves one when every other row decodes.
    """

    name = "decode_first"

    def running_order(self, running: list[Request]) -> list[Request]:
        """Return decodes by arrival, then chunks by arrival."""
        return decodes_first(sorted(running, key=by_arrival))


class Priority(Policy):
    """Lower numbers earlier; waiting makes up for a level each priority_age_ms.

    The rank arrived + priority x age never changes while a request waits, and orders it against
    all others for ever. Starvation bound: a request is overtaken only by those that arrive within
    priority_age_ms x (its level - the lowest level) after it.
    """

    name = "priority"
    may_preempt = True

    def rank(self, request: Request) -> tuple[int, ...]:
        """Place in line: the instant of arrival, moved by the level."""
        age_ns = self.config.priority_age_ms * 1_000_000
        return (request.life.arrived + request.submit.priority * age_ns, request.number)

    def running_order(self, running: list[Request]) -> list[Request]:
        """Return decodes by rank, then chunks by rank."""
        return decodes_first(sorted(running, key=by_rank))

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
    overtakes = True
    accounts = True

    def __init__(self, config: EngineConfig, times: StepTimes) -> None:
        super().__init__(config, times)
        self._weights = config.weights
        self._counters: dict[str, float] = {}
        self._live: dict[str, int] = {}

    def group(self, request: Request) -> str:
        """Return the tenant, or the shared line when too many are told apart already."""
        tenant = request.submit.tenant
        if tenant in self._live or len(self._live) < self.config.tenants_max:
            return tenant
        return OTHER_TENANTS

    def group_rank(self, group: str) -> float:
        """Return the tenant's counter."""
        return self._counters.get(group, 0.0)

    def joins(self, request: Request) -> None:
        """Count a tenant's live requests; one back from idle gets no credit for its absence."""
        group = request.group
        if not self._live.get(group):
            active = [self._counters[other] for other in self._live]
            self._counters[group] = max(self._counters.get(group, 0.0), min(active, default=0.0))
        self._live[group] = self._live.get(group, 0) + 1

    def leaves(self, request: Request) -> None:
        """Forget a tenant with nothing live, once its counter says nothing any more."""
        group = request.group
        self._live[group] -= 1
        if not self._live[group]:
            del self._live[group]
            if len(self._counters) > 2 * self.config.tenants_max:
                self._counters = {name: self._counters[name] for name in self._live}

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
        for group, start, count, samples in zip(
            plan.groups, plan.start_positions, plan.token_counts, plan.samples, strict=True
        ):
            weight = self._weights.get(group, 1.0)
            decode = start > 0 and count == 1 and samples
            served = count * (DECODE_WEIGHT if decode else 1)
            self._counters[group] = self._counters.get(group, 0.0) + served / weight


class Objective(msgspec.Struct, frozen=True):
    """A latency objective in ms; what is None is the server's default."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Slo(Policy):
    """Latest start first; prefill gets what the least slack of the running ones allows.

    Token j of a request is due at arrival + ttft + j x tpot. Its latest start is that due time of
    its first token less the modelled time of its prompt; the rank never changes while it waits.
    Starvation bound: a request is overtaken only by those with an earlier latest start, which for
    equal objectives arrived at most one modelled prompt after it; and late or not, prefill always
    gets 1/16 of the budget.
    """

    name = "slo"

    def __init__(self, config: EngineConfig, times: StepTimes) -> None:
        super().__init__(config, times)
        self._targets: dict[int, tuple[int, int]] = {}

    def rank(self, request: Request) -> tuple[int, ...]:
        """Place in line: the latest start."""
        asked = Objective()
        if request.submit.slo:
            asked = msgspec.json.decode(request.submit.slo, type=Objective)
        ttft_ms = self.config.ttft_ms if asked.ttft_ms is None else asked.ttft_ms
        tpot_ms = self.config.tpot_ms if asked.tpot_ms is None else asked.tpot_ms
        ttft_ns, tpot_ns = round(ttft_ms * 1e6), round(tpot_ms * 1e6)
        self._targets[request.number] = (request.life.arrived + ttft_ns, tpot_ns)
        fit = self.times.fitted
        prompt_ns = round(fit.p * request.prompt_tokens) if fit else 0
        return (request.life.arrived + ttft_ns - prompt_ns, request.number)

    def leaves(self, request: Request) -> None:
        """Forget its objective."""
        del self._targets[request.number]

    def due_ns(self, request: Request) -> int:
        """Return when its next token is due, ns since the server's start."""
        first_due, tpot_ns = self._targets[request.number]
        return first_due + (request.known - request.prompt_tokens) * tpot_ns

    def running_order(self, running: list[Request]) -> list[Request]:
        """Return decodes by due time, then chunks by due time."""
        return decodes_first(sorted(running, key=self.due_ns))

    def victim(self, unplaced: Sequence[Request]) -> Request:
        """Return the one with most time left."""
        return max(unplaced, key=self.due_ns)

    def prefill_budget(self, view: View) -> int | None:
        """Return the tokens that fit before the least slack of those decoding runs out."""
        fit = self.times.fitted
        decoding = [request for request in view.running if request.output_tokens > 0]
        if fit is None or fit.p <= 0 or not decoding:
            return None
        slack_ns = min(self.due_ns(request) for request in decoding) - view.now_ns
        context = sum(request.computed for request in decoding)
        spare_ns = slack_ns - fit.fixed - fit.d * len(decoding) - fit.c * context
        floor = max(1, self.config.max_num_batched_tokens // 16)
        return max(floor, int(spare_ns / fit.p))


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (DecodeFirst, Fcfs, Priority, Fair, Slo)
}
"""Policies by the name that --scheduling-policy takes."""
