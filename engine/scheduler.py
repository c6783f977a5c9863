"""The scheduler: at every step it decides anew who computes how many tokens, and says why not.

Owns the sequences, the running list, the waiting line and, through the pool, the KV blocks; it is
their one writer. core calls add, abort, plan, commit and roll_back. There are no phases: chunked
prefill, decode, resumption and prefix hits are all "known - computed - in flight, as far as budget
and blocks go". Never touches tensors or clocks, and never asks a policy for its name.
"""

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.kv import KVPool
from engine.messages import Abort, Delta, Submit
from engine.plan import Plan, StepOutput
from engine.policies import Policy, View
from engine.request import Request
from engine.waiting import WaitingLine
from telemetry.records import AdmissionStop, Finish, PreemptionCause


class Scheduler:
    """Plans over `config` (resolved). `eos_ids` end a sequence unless it ignores them."""

    def __init__(
        self, *, config: EngineConfig, pool: KVPool, policy: Policy, eos_ids: Sequence[int]
    ) -> None:
        assert config.max_model_len is not None, "the configuration is not resolved"
        self.config = config
        self.pool = pool
        self.policy = policy
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []
        self.waiting = WaitingLine()
        self.kv_tokens = 0
        self.steps = 0
        self._eos_ids = frozenset(eos_ids)
        self._model_len = config.max_model_len
        self._budget = config.max_num_batched_tokens
        self._watermark = max(1, pool.blocks_total // 100)
        self._deltas: list[Delta] = []
        self._ended: list[Request] = []

    # ---- arrivals and departures

    def add(self, submit: Submit, now_ns: int) -> Request:
        """Put a submission in line; one that can never run ends at once with an error."""
        assert submit.request not in self.requests, f"{submit.request} is already here"
        request = Request.create(submit, now_ns, self._eos_ids)
        request.rank = self.policy.rank(request)
        request.group = self.policy.group(request)
        self.requests[request.number] = request
        self.waiting.push(request)
        if refusal := self._infeasible(request):
            self._fail(request, refusal, now_ns)
            self._retire(request)
        return request

    def abort(self, abort: Abort, now_ns: int) -> bool:
        """End a live sequence early; False when it is unknown or has ended already."""
        request = self.requests.get(abort.request)
        if request is None or request.state == "finished":
            return False
        request.life.cancel_requested = now_ns
        request.cancel_cause = abort.cancel_cause
        request.error = abort.error
        request.undelivered = max(0, request.output_tokens - abort.delivered_tokens)
        self._end(request, abort.finish, now_ns)
        self._deltas.append(Delta(request.number, [], abort.finish, abort.error))
        self._retire(request)
        return True

    # ---- planning

    def plan(self, now_ns: int) -> Plan:
        """Reserve a step: running sequences first, then those in line while they fit."""
        self.steps += 1
        plan = Plan(step=self.steps, token_budget=self._budget)
        rows: list[Request] = []
        left = self._place_running(plan, rows)
        self._admit_waiting(plan, rows, left, now_ns)
        self._seal(plan, rows)
        plan.kv_blocks_peak = self.pool.used
        return plan

    def discard(self, plan: Plan) -> None:
        """Forget a plan that reserved nothing; its number goes to the next one."""
        assert not plan.requests
        assert not plan.preempted
        self.steps -= 1

    def _place_running(self, plan: Plan, rows: list[Request]) -> int:
        """Give running sequences their tokens in the policy's order; return the budget left."""
        left = self._budget
        block_tokens = self.pool.block_tokens
        order = self.policy.running_order(self.running)
        for index, request in enumerate(order):
            start = request.computed + request.in_flight
            pending = min(len(request.tokens) + request.placeholders, request.computed_max) - start
            if request.state != "running" or pending <= 0:
                continue
            count = min(pending, left)
            if count == 0:
                plan.passed_over.append(request.number)
                plan.passed_over_reasons.append("budget")
            elif start + count <= len(request.blocks) * block_tokens or self._grow(
                plan, order, index, count
            ):
                rows.append(request)
                plan.start_positions.append(start)
                plan.token_counts.append(count)
                left -= count
        return left

    def _grow(self, plan: Plan, order: list[Request], index: int, count: int) -> bool:
        """Get the blocks for `count` more tokens, preempting if need be; False if it gave way."""
        request = order[index]
        end = request.computed + request.in_flight + count
        lacking = self.pool.blocks_for(end) - len(request.blocks)
        while (blocks := self.pool.allocate(lacking)) is None:
            plan.allocation_failures += 1
            unplaced = [other for other in order[index:] if other.state == "running"]
            victim = self.policy.victim(unplaced)
            self._preempt(plan, victim, "kv", beneficiary=request)
            if victim is request:
                return False
        request.blocks.extend(blocks)
        return True

    def _admit_waiting(self, plan: Plan, rows: list[Request], left: int, now_ns: int) -> None:
        """Admit in rank order until a check refuses; the plan says which, and whom."""
        while True:
            request = self.waiting.head()
            view = View(now_ns=now_ns, running=self.running, tokens_left=left)
            stop = self._first_refusal(plan, request, view)
            if request is None or stop is not None:
                plan.admission_stop = stop or "no_waiting"
                plan.admission_blocker = request.number if request else None
                return
            self.waiting.pop(request)
            blocks = self.pool.allocate(self.pool.blocks_for(request.known + 1))
            assert blocks is not None, "the kv check promised these blocks"
            request.move("running")
            request.blocks = blocks
            request.life.admitted = request.life.admitted or now_ns
            self.running.append(request)
            plan.admitted.append(request.number)
            plan.admitted_cached_tokens.append(0)
            count = min(request.pending, left)
            rows.append(request)
            plan.start_positions.append(request.computed)
            plan.token_counts.append(count)
            left -= count
            request.life.first_scheduled = request.life.first_scheduled or now_ns

    def _first_refusal(
        self, plan: Plan, request: Request | None, view: View
    ) -> AdmissionStop | None:
        """Return the first check that keeps a request out, in the closed list's order."""
        if request is None:
            return "no_waiting"
        if len(self.running) >= self.config.max_num_seqs:
            return "seqs"
        left = view.tokens_left
        if left == 0 or (not self.config.enable_chunked_prefill and request.pending > left):
            return "budget"
        if "kv" in plan.preempted_causes or not self._fits(request):
            return "kv"
        return self.policy.refuse(request, view)

    def _fits(self, request: Request) -> bool:
        """Whether the whole request may reserve now: every known token and one more.

        The watermark binds only while something runs, so whatever was accepted fits alone.
        """
        keep = self._watermark if self.running else 0
        return self.pool.blocks_for(request.known + 1) <= self.pool.available - keep

    def _seal(self, plan: Plan, rows: list[Request]) -> None:
        """Fill the columns of the placed rows, and take their tokens in flight."""
        plan.requests = [request.number for request in rows]
        plan.epochs = [request.epoch for request in rows]
        plan.block_tables = [request.blocks for request in rows]
        plan.kv_block_counts = [len(request.blocks) for request in rows]
        plan.sampling = [request.sampling for request in rows]
        token_ids = plan.token_ids
        for request, start, count in zip(
            rows, plan.start_positions, plan.token_counts, strict=True
        ):
            end, tokens = start + count, request.tokens
            known = len(tokens) + request.placeholders
            plan.output_indices.append(known - request.prompt_tokens)
            plan.samples.append(end == known)
            if count == 1 and start < len(tokens):
                token_ids.append(tokens[start])
            else:
                token_ids.extend(request.token_ids(start, count))
            # By position: below the highest computed is recompute, below the prompt's end
            # prefill, else decode; one row may hold more than one kind.
            decode_from = max(start, request.prompt_tokens, request.highest)
            plan.decode_tokens += max(0, end - decode_from)
            request.in_flight += count
            request.flights += 1
            request.counts.iterations += 1
            request.placeholders += end == known
        plan.prefill_tokens = len(token_ids) - plan.decode_tokens

    def _preempt(
        self, plan: Plan, victim: Request, cause: PreemptionCause, *, beneficiary: Request
    ) -> None:
        """Take a running sequence's blocks and computed tokens, and put it back in line."""
        plan.preempted.append(victim.number)
        plan.preempted_causes.append(cause)
        plan.preempted_blocks.append(len(victim.blocks))
        plan.preempted_lost_tokens.append(victim.computed)
        plan.preempted_beneficiaries.append(beneficiary.number)
        victim.move("preempted")
        victim.counts.preemptions += 1
        victim.counts.lost += victim.computed
        victim.epoch += 1
        self._release(victim)
        victim.computed = 0
        self.waiting.push(victim)

    # ---- taking results in

    def commit(self, plan: Plan, output: StepOutput, now_ns: int) -> None:
        """Advance every row, keep its token, and end what is done."""
        requests, errors = self.requests, output.errors
        sampled = iter(output.tokens)
        for number, epoch, count, samples in zip(
            plan.requests, plan.epochs, plan.token_counts, plan.samples, strict=True
        ):
            request = requests[number]
            request.flights -= 1
            # A row of a sequence that was preempted or ended since does not count as computed.
            if request.epoch == epoch and request.state == "running":
                request.in_flight -= count
                request.computed += count
                self.kv_tokens += count
                if request.computed > request.highest:
                    self._rise(request, now_ns)
            token = next(sampled) if samples else None
            if errors and number in errors:
                self._fail(request, errors[number], now_ns)
            elif token is not None and request.state != "finished":
                self._append(request, token, now_ns)
            if request.state == "finished":
                self._retire(request)
        self.policy.charge(plan, output)

    def roll_back(self, plan: Plan, error: str, now_ns: int) -> None:
        """End every sequence of a step that failed; the service goes on."""
        for number in plan.requests:
            request = self.requests[number]
            request.flights -= 1
            self._fail(request, error, now_ns)
            self._retire(request)

    def take_deltas(self) -> list[Delta]:
        """Return what clients gained since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def take_ended(self) -> list[Request]:
        """Return those that ended, with no step in flight any more, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _rise(self, request: Request, now_ns: int) -> None:
        """Note positions computed for the first time, and the end of the prompt among them."""
        request.highest = request.computed
        if request.computed >= request.prompt_tokens and request.life.prefill_finished is None:
            request.life.prefill_finished = now_ns

    def _append(self, request: Request, token: int, now_ns: int) -> None:
        """Keep a sampled token; end its sequence where the token or its number says so."""
        request.placeholders -= 1
        request.tokens.append(token)
        if request.life.first_token is None:
            request.life.first_token = now_ns
        if token in request.stop_ids:
            self._end(request, "stop", now_ns)
        elif len(request.tokens) > request.computed_max:
            self._end(request, "length", now_ns)
        self._deltas.append(Delta(request.number, [token], request.finish))

    def _fail(self, request: Request, error: str, now_ns: int) -> None:
        """End one sequence with an error, once."""
        if request.state != "finished":
            request.error = error
            self._end(request, "error", now_ns)
            self._deltas.append(Delta(request.number, [], "error", error))

    def _end(self, request: Request, finish: Finish, now_ns: int) -> None:
        """Finish a sequence in any state; its blocks go back now, its rows in flight are dropped.

        Blocks may serve the next launch at once: the device runs launches in order.
        """
        if request.state == "running":
            self._release(request)
        else:
            self.waiting.abandon()
        request.move("finished")
        request.finish = finish
        request.placeholders = 0
        request.life.decided = now_ns
        request.life.freed = now_ns

    def _release(self, request: Request) -> None:
        """Leave the running list and give all blocks back."""
        self.running.remove(request)
        self.pool.release(request.blocks)
        self.kv_tokens -= request.computed
        # Tokens in flight never count as computed: their rows come back late.
        request.counts.dropped += request.in_flight
        request.in_flight = 0
        request.blocks = []

    def _retire(self, request: Request) -> None:
        """Hand an ended sequence over once nothing of it is in flight."""
        if request.state == "finished" and not request.flights:
            del self.requests[request.number]
            self._ended.append(request)

    def _infeasible(self, request: Request) -> str | None:
        """Return why a sequence could never run, even alone."""
        submit = request.submit
        total = request.prompt_tokens + submit.max_tokens
        if request.prompt_tokens < 1 or submit.max_tokens < 1:
            return "a prompt and max_tokens need at least one token"
        if total > self._model_len:
            return f"prompt and max_tokens are {total} tokens; the limit is {self._model_len}"
        return None

    def check(self) -> None:
        """Assert every invariant; for tests, after each step."""
        waiting = self.waiting.requests()
        assert len(waiting) == len(self.waiting)
        assert all(request.state == "running" for request in self.running)
        assert all(request.state in ("waiting", "preempted") for request in waiting)
        assert all(not request.blocks for request in waiting)
        assert self.kv_tokens == sum(request.computed for request in self.running)
        live = len(self.running) + len(waiting)
        in_flight = sum(1 for r in self.requests.values() if r.state == "finished")
        assert len(self.requests) == live + in_flight
        for request in self.requests.values():
            request.check()
            assert self.pool.blocks_for(request.computed) <= max(len(request.blocks), 0) or (
                request.state == "finished"
            )
        self.pool.check([request.blocks for request in self.running])
