"""Scheduling policies: who is first in line, who is placed first, who gives way.

Owns the order of everything, as pure functions over read-only requests and a policy's own state,
which only `charge` changes. The scheduler calls these hooks and never asks a policy's name; adding
a policy touches this file and one golden timeline. Never changes a request, a plan or the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from engine.plan import Plan, StepOutput
from engine.request import Request

Refusal = Literal["slo", "policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a policy may know of the step being planned."""

    now_ns: int
    running: Sequence[Request]
    tokens_left: int


by_arrival = attrgetter("arrival")
"""Order by arrival; equal instants by number, which grows with it."""


class Policy:
    """The hooks and their neutral answers. Starvation bound: stated by each policy's docstring."""

    name = "policy"
    overtakes = False
    """Whether planning goes on at the next group's head when `refuse` stopped this one's."""

    def rank(self, request: Request) -> tuple[int, ...]:
        """Place in line, constant while the request waits; lower goes first."""
        return request.arrival

    def group(self, request: Request) -> str:
        """Name of the line it stands in."""
        del request
        return ""

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

    def charge(self, plan: Plan, output: StepOutput) -> None:
        """Take note of a committed step; the only place where a policy's state changes."""
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

    def running_order(self, running: list[Request]) -> list[Request]:
        """Return decodes (one token left to compute) by arrival, then chunks by arrival."""
        ordered = sorted(running, key=by_arrival)
        decodes: list[Request] = []
        chunks: list[Request] = []
        for request in ordered:
            known = len(request.tokens) + request.placeholders
            left = known - request.computed - request.in_flight
            (chunks if left > 1 else decodes).append(request)
        return decodes + chunks


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (DecodeFirst, Fcfs)}
"""Policies by the name that --scheduling-policy takes."""
