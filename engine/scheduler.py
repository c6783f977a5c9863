"""The scheduler: at every step it decides anew who computes how many tokens, and says why not.

Owns the decisions of a step; the books (who runs, waits, holds, ends) are the roster's, and only
this module writes in them. core calls add, abort, plan, commit and roll_back. There are no phases:
chunked prefill, decode, resumption and prefix hits are all "known - computed - in flight, as far as
budget and blocks go". Never touches tensors or clocks, and never asks a policy for its name.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from engine.admission import Admission
from engine.batching import BATCHING
from engine.config import EngineConfig
from engine.draft import Draft
from engine.kv import KVPool
from engine.messages import Abort, Submit
from engine.plan import Plan, StepOutput
from engine.policies import Policy, View
from engine.request import Request
from engine.roster import Roster
from engine.rows import Outlook, Vector
from telemetry.records import AdmissionStop, PreemptionCause

TIGHT_STEPS = 100
"""Steps that a smaller token budget holds for, after memory ran out in one."""


class Scheduler:
    """Plans over `config` (resolved). `eos_ids` end a sequence unless it ignores them.

    is_ready says whether what a sequence depends on (a grammar, an adapter) has been prepared.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        pool: KVPool,
        policy: Policy,
        eos_ids: Sequence[int],
        is_ready: Callable[[Request], bool] | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.policy = policy
        self.steps = 0
        self.batching = BATCHING[config.batching](config)
        self.roster = Roster(
            pool=pool,
            policy=policy,
            fixed=self.batching.fixed,
            caching=config.enable_prefix_caching,
        )
        self._admission = Admission(
            config=config, pool=pool, policy=policy, batching=self.batching, is_ready=is_ready
        )
        self._eos_ids = frozenset(eos_ids)
        self._budget = config.max_num_batched_tokens
        self._tight_steps = 0

    # ---- arrivals and departures

    def add(self, submit: Submit, now_ns: int) -> Request:
        """Put a submission in line; one that can never run ends at once with an error."""
        request = Request.create(submit, now_ns, eos_ids=self._eos_ids, table=self.roster.table)
        request.rank = self.policy.rank(request)
        request.group = self.policy.group(request)
        self.roster.enter(request)
        if refusal := self._admission.infeasible(request):
            self.roster.fail(request, refusal, now_ns)
            self.roster.settle(request, now_ns)
        return request

    def abort(self, abort: Abort, now_ns: int) -> bool:
        """End a live sequence early; False when it is unknown or has ended already."""
        request = self.roster.requests.get(abort.request)
        if request is None or request.finish is not None:
            return False
        request.life.cancel_requested = now_ns
        request.cancel_cause = abort.cancel_cause
        request.error = abort.error
        request.undelivered = max(0, request.output_tokens - abort.delivered_tokens)
        self.roster.end(request, abort.finish, now_ns)
        self.roster.settle(request, now_ns)
        return True

    # ---- planning

    def plan(self, now_ns: int) -> Plan:
        """Reserve a step: running sequences first, then those in line while they fit."""
        draft = self._open(now_ns)
        if self.policy.may_preempt:
            self._make_room(draft, now_ns)
        self._place_running(draft, now_ns)
        self._admit_waiting(draft, now_ns)
        plan = draft.seal(self.roster.table, histories=self.roster.histories > 0)
        plan.kv_blocks_peak = self.pool.used
        return plan

    def discard(self, plan: Plan) -> None:
        """Forget a plan that reserved nothing; its number goes to the next one."""
        assert not plan.requests
        assert not plan.preempted
        self.steps -= 1

    def rest(self) -> Plan:
        """Return an empty plan for time in which a closed batch kept everybody waiting."""
        self.steps += 1
        head = self.roster.waiting.head()
        plan = Plan(step=self.steps, token_budget=self._budget, kv_blocks_peak=self.pool.used)
        plan.admission_stop = "batch_closed"
        plan.admission_blocker = head.number if head else None
        return plan

    def opens_in_ns(self, now_ns: int) -> int:
        """Return how long nothing can be done but wait for a batch to form."""
        if self.roster.running or not self.roster.waiting:
            return 0
        waiting = len(self.roster.waiting)
        return self.batching.opens_in_ns(running=0, waiting=waiting, now_ns=now_ns) or 0

    def _open(self, now_ns: int) -> Draft:
        """Begin a step: number it and ask the policy for its prefill share."""
        self.steps += 1
        plan = Plan(step=self.steps, token_budget=self._budget)
        share = self.policy.prefill_budget(self._view(now_ns, self._budget))
        draft = Draft(
            plan,
            left=max(1, self._budget - self.roster.held),
            prefill_left=self._budget if share is None else share,
            chunk_max=self.config.long_prefill_tokens or self._budget,
        )
        if self.roster.held:
            for request in self.roster.running.rows:
                # What was not finite was cleared, and would come back if it were computed again.
                if request.finish is not None and request.finish != "error":
                    draft.idle(request)
        return draft

    def _view(self, now_ns: int, tokens_left: int) -> View:
        return View(
            now_ns=now_ns,
            running=self.roster.running.rows,
            slots=self.roster.running.slots,
            table=self.roster.table,
            waiting=len(self.roster.waiting),
            tokens_left=tokens_left,
        )

    def _make_room(self, draft: Draft, now_ns: int) -> None:
        """Let the policy preempt for the first in line when a slot or blocks lack."""
        for _ in range(self.config.policy_preemptions_max):
            candidate = self._head(now_ns)
            if candidate is None:
                return
            view = self._view(now_ns, draft.left)
            if self._admission.first_refusal(draft, candidate, view) not in ("seqs", "kv"):
                return
            victim = self.policy.preempts(candidate, self.roster.running.rows)
            if victim is None:
                return
            self._preempt(draft.plan, victim, "policy", beneficiary=candidate)

    def _place_running(self, draft: Draft, now_ns: int) -> None:
        """Give running sequences their tokens in the policy's order.

        Decodes are placed all at once, unless chunks go between them, or tokens or blocks do not
        suffice for all of them: then who gets what depends on the order, one by one.
        """
        running, policy = self.roster.running, self.policy
        outlook = self.roster.table.outlook(running.slots)
        placed = (policy.decodes_first or not outlook.chunks) and self._place_decodes(
            draft, outlook
        )
        if placed and not outlook.chunks:
            return
        pending = outlook.pending
        order = policy.running_order(self._view(now_ns, draft.left))
        order = np.arange(len(running)) if order is None else order
        is_chunk = pending[order] > 1
        if placed:
            order = order[is_chunk]
        elif policy.decodes_first:
            order = np.concatenate((order[~is_chunk], order[is_chunk]))
        self._place_each(draft, order, pending)

    def _place_decodes(self, draft: Draft, outlook: Outlook) -> bool:
        """Give one token to each row that wants one; False, with nothing done, if some lack."""
        lacking = len(outlook.lacking)
        if len(outlook.decodes) > draft.left or lacking > self.pool.available:
            return False
        if lacking:
            self.roster.widen(outlook.lacking, self.pool.allocate(lacking) or [])
        draft.place_decodes(self.roster.running, outlook.decodes)
        return True

    def _place_each(self, draft: Draft, places: Vector, pending: Vector) -> None:
        """Give running sequences their tokens one by one; who comes late may lose its blocks."""
        running = self.roster.running.rows
        order = [running[place] for place in places.tolist()]
        for index, (request, wants) in enumerate(zip(order, pending[places].tolist(), strict=True)):
            if wants <= 0 or request.state != "running":
                continue
            count = draft.share(wants)
            if count <= 0:
                draft.pass_over(request, "slo" if draft.left else "budget")
            elif self._grow(draft.plan, order, index, count):
                draft.place(request, count, wants)

    def _grow(self, plan: Plan, order: list[Request], index: int, count: int) -> bool:
        """Get the blocks for `count` more tokens, preempting if need be; False if it gave way."""
        request = order[index]
        lacking = self.pool.blocks_for(request.planned + count) - len(request.blocks)
        if lacking <= 0:
            return True
        while (blocks := self.pool.allocate(lacking)) is None:
            plan.allocation_failures += 1
            unplaced = [other for other in order[index:] if other.state == "running"]
            victim = self.policy.victim(unplaced)
            self._preempt(plan, victim, "kv", beneficiary=request)
            if victim is request:
                return False
        request.hold(blocks, self.pool.block_tokens)
        return True

    def _admit_waiting(self, draft: Draft, now_ns: int) -> None:
        """Admit in rank order until a check refuses; the plan says which, and whom.

        A policy that overtakes lets planning go on at the next group's head; heads that were
        passed are on record if somebody behind them was admitted.
        """
        plan = draft.plan
        refused: list[tuple[Request, AdmissionStop]] = []
        passed = 0
        while True:
            request = self._head(now_ns, skip={other.group for other, _ in refused})
            stop = self._admission.first_refusal(draft, request, self._view(now_ns, draft.left))
            if request is not None and stop is None:
                self._admit(draft, request, now_ns)
                passed = len(refused)
            elif request is not None and stop in ("slo", "policy") and self.policy.overtakes:
                assert stop is not None
                refused.append((request, stop))
            else:
                break
        for other, reason in refused[:passed]:
            draft.pass_over(other, reason)
        if request is None and refused:
            request, stop = refused[0]
        plan.admission_stop = stop or "no_waiting"
        plan.admission_blocker = request.number if request else None
        if plan.admitted:
            self.batching.formed()

    def _head(self, now_ns: int, skip: Collection[str] = ()) -> Request | None:
        """Return the first in line, once everybody before it stands in the line it belongs in."""
        waiting, policy = self.roster.waiting, self.policy
        while (head := waiting.head(policy.group_ranks, skip)) is not None:
            group = policy.regroup(head, now_ns)
            if group == head.group:
                break
            self.roster.regroup(head, group)
        return head

    def _admit(self, draft: Draft, request: Request, now_ns: int) -> None:
        """Make a waiting sequence run: reserve all its blocks and place its first tokens."""
        hits = self._admission.hits(request)
        self.pool.share(hits)
        needed = self.pool.blocks_for(self.batching.reserves(request)) - len(hits)
        blocks = self.pool.allocate(needed)
        assert blocks is not None, "the kv check promised these blocks"
        cached = self.roster.start(request, hits, blocks, now_ns)
        draft.plan.admitted.append(request.number)
        draft.plan.admitted_cached_tokens.append(cached)
        count = draft.share(request.pending)
        if count > 0:
            draft.place(request, count, request.pending)

    def _preempt(
        self, plan: Plan, victim: Request, cause: PreemptionCause, *, beneficiary: Request
    ) -> None:
        """Take a running sequence's blocks and computed tokens, and put it back in line."""
        plan.preempted.append(victim.number)
        plan.preempted_causes.append(cause)
        plan.preempted_blocks.append(len(victim.blocks))
        plan.preempted_lost_tokens.append(victim.computed)
        plan.preempted_beneficiaries.append(beneficiary.number)
        self.roster.stop(victim)

    # ---- taking results in

    def commit(self, plan: Plan, output: StepOutput, now_ns: int) -> None:
        """Advance every row, keep its token, and end what is done."""
        if output.prompt_logprobs:
            self.roster.score_prompts(output.prompt_logprobs)
        if output.errors:
            self.roster.fail_rows(output.errors, now_ns)
        if plan.reserved is not None:
            self.roster.land(plan, plan.reserved, output, now_ns)
        self.policy.charge(plan, output)
        self._tight_steps = max(0, self._tight_steps - 1)
        if not self._tight_steps:
            self._budget = self.config.max_num_batched_tokens

    def roll_back(self, plan: Plan, error: str, now_ns: int) -> None:
        """End every sequence of a step that failed; the service goes on."""
        for request in plan.rows:
            self.roster.fail_row(request, error, now_ns)

    @property
    def is_tight(self) -> bool:
        """Whether memory ran out a short while ago."""
        return self._tight_steps > 0

    def retry(self, plan: Plan, now_ns: int) -> None:
        """Memory ran out in a step: all of it is planned again, in steps half as large for a while.

        Where a step must hold a whole prompt, it is tried again as it was.
        """
        self._tight_steps = TIGHT_STEPS
        if self.config.enable_chunked_prefill:
            self._budget = max(1, len(plan.token_ids) // 2)
        self.void(plan, now_ns)

    def give_way(self, plan: Plan, error: str, now_ns: int) -> None:
        """Memory ran out in a step: its newest sequence ends, the others try again without it."""
        going = [request for request in plan.rows if request.finish is None]
        if going:
            newest = max(going, key=lambda request: request.arrival)
            self.roster.fail(newest, error, now_ns)
        self.void(plan, now_ns)

    def void(self, plan: Plan, now_ns: int) -> None:
        """Take back what a step had reserved: nothing of it came, or what came builds on nothing.

        Steps are taken back in their order, and none may be planned in between.
        """
        if plan.reserved is None:
            return
        columns = (plan.rows, plan.reserved.epochs, plan.token_counts, plan.samples)
        for request, epoch, count, sampled in zip(*columns, strict=True):
            if request.finish is None:
                self.roster.take_back(request, count if request.epoch == epoch else 0, sampled)
            self.roster.drop_row(request, now_ns)
