"""The roster: every live sequence, who runs, who waits, what each holds, and how each one ends.

Owns the running list, the waiting line and the blocks that sequences hold; engine/scheduler.py is
the one caller and decides, this module keeps the books: whatever ends a sequence, in any state, its
blocks go back once, its client is told once, and it is handed over once nothing of it is in flight.
"""

from collections import Counter
from itertools import compress

import numpy as np

from engine.kv import KVPool
from engine.messages import Delta, Gains, TokenLogprobs
from engine.plan import Plan, StepOutput
from engine.policies import Policy
from engine.request import Request
from engine.rows import Landing, Reservation, Vector
from engine.running import Running
from engine.table import Table
from engine.waiting import WaitingLine
from telemetry.records import Finish


class Roster:
    """Sequences by number. With `fixed`, rows that ended stay until the whole batch leaves.

    With `caching` full blocks are named, so that others may share them.
    """

    def __init__(self, *, pool: KVPool, policy: Policy, fixed: bool, caching: bool) -> None:
        self.requests: dict[int, Request] = {}
        self.table = Table(pool.block_tokens)
        self.running = Running(policy.running_key)
        self.waiting = WaitingLine()
        self.kv_tokens = 0
        self.held = 0
        self.histories = 0  # live sequences whose sampling is not plain
        self._pool = pool
        self._policy = policy
        self._fixed = fixed
        self._caching = caching
        self._stop_ids: Counter[int] = Counter()  # of all live sequences
        self._stops: Vector = np.zeros(0, dtype=np.int64)  # these ids
        self._gains = Gains()
        self._ended: list[Request] = []

    def enter(self, request: Request) -> None:
        """Put a new sequence in line."""
        assert request.number not in self.requests, f"{request.number} is already here"
        self._policy.joins(request)
        self._follow(request)
        self.requests[request.number] = request
        self.histories += not request.is_plain
        self._count_stops(request, 1)
        self.waiting.push(request)

    def regroup(self, request: Request, group: str) -> None:
        """Let the first of its line stand in another one."""
        self.waiting.remove(request)
        request.group = group
        self.waiting.push(request)

    def _follow(self, request: Request) -> None:
        """Let a sequence of several with one prompt wait for the first of them to compute it."""
        if request.submit.parent_id is None:
            return
        for other in reversed(self.requests.values()):
            if other.submit.parent_id != request.submit.parent_id:
                return
            if other.submit.prompt == request.submit.prompt:
                request.leader = other.leader or other
                return

    def start(self, request: Request, hits: list[int], blocks: list[int], now_ns: int) -> int:
        """Make the first in line run with these shared and own blocks; return its cached tokens."""
        self.waiting.remove(request)
        request.move("running")
        request.hold(hits + blocks, self._pool.block_tokens)
        request.make_room()
        if self._caching:
            request.note_named(len(hits), self._pool.block_tokens)
        cached = len(hits) * self._pool.block_tokens
        request.computed = request.planned = cached
        request.highest = max(request.highest, cached)
        self.kv_tokens += cached
        request.counts.cached += cached
        # A hit may be longer than what was lost: others went on with the same text.
        request.counts.recomputed += max(0, request.counts.lost_last - cached)
        request.counts.lost_last = 0
        if request.life.admitted is None:
            request.counts.cached_first = cached
            request.life.admitted = request.life.first_scheduled = now_ns
        self.running.add(request)
        return cached

    def stop(self, request: Request) -> None:
        """Preempt: take a running sequence's blocks and computed tokens, put it back in line."""
        request.move("preempted")
        request.counts.preemptions += 1
        request.counts.lost += request.computed
        request.counts.lost_last = request.computed
        self._release(request)
        request.epoch += 1
        request.computed = request.planned = 0
        self.waiting.push(request)

    def take_gains(self) -> Gains:
        """Return what clients gained since the last call."""
        gains, self._gains = self._gains, Gains()
        return gains

    def take_ended(self) -> list[Request]:
        """Return those that ended, with no step in flight any more, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def widen(self, places: Vector, blocks: list[int]) -> None:
        """Give one block more to each of these running sequences, for the token that it needs."""
        rows = self.running.rows
        for place, block in zip(places.tolist(), blocks, strict=True):
            rows[place].blocks.append(block)

    def name_blocks(self, request: Request) -> None:
        """Let others find the blocks that are full now: their keys and values are written."""
        full, named = request.computed // self._pool.block_tokens, request.named
        digests = request.digests_of(full, self._pool.block_tokens)
        self._pool.name(request.blocks[named:full], digests[named:])
        request.note_named(full, self._pool.block_tokens)

    def land(self, plan: Plan, step: Reservation, output: StepOutput, now_ns: int) -> None:
        """Take a step's results in: counts and tokens of all rows, then what is due in some."""
        rows = plan.rows
        landing = self.table.land(step, output.tokens, self._stops)
        self.kv_tokens += landing.computed
        for place in landing.full.tolist():
            self.name_blocks(rows[place])
        self._tell(plan, step, landing, output)
        for place in landing.due.tolist():
            request = rows[place]
            if request.finish is None:
                self._judge(request, now_ns)
            if request.finish is not None:
                self.settle(request, now_ns)

    def _tell(self, plan: Plan, step: Reservation, landing: Landing, output: StepOutput) -> None:
        """Tell the sampled tokens that are kept."""
        numbers, tokens = plan.requests, output.tokens
        if landing.kept_count < len(numbers):
            tokens = list(compress(tokens, landing.kept[step.samples].tolist()))
            numbers = list(compress(numbers, landing.kept.tolist()))
        gains, logprobs = self._gains, output.logprobs
        if not logprobs:
            gains.requests.extend(numbers)
            gains.tokens.extend(tokens)
            return
        for number, token in zip(numbers, tokens, strict=True):
            told = [logprobs[number]] if number in logprobs else None
            gains.deltas.append(Delta(number, [token], logprobs=told))

    def _judge(self, request: Request, now_ns: int) -> None:
        """End a sequence where its newest token or the number of them says so."""
        newest, life = int(request.tokens[-1]), request.life
        if life.first_token is None:
            # The step that samples the first token is the one that computes the prompt's end.
            life.first_token = life.prefill_finished = now_ns
            if cached := request.counts.cached_first:
                self._gains.deltas.append(Delta(request.number, [], cached_tokens=cached))
        if newest in request.stop_ids:
            self.end(request, "stop", now_ns)
        elif request.read > request.computed_max:
            self.end(request, "length", now_ns)

    def score_prompts(self, found: dict[int, tuple[int, list[TokenLogprobs]]]) -> None:
        """Tell clients what prompts' tokens were worth, each once however often it is computed."""
        for number, (first, logprobs) in found.items():
            request = self.requests[number]
            fresh = logprobs[request.scored - first :]
            assert first <= request.scored, "a prompt's tokens were computed out of order"
            if fresh and request.finish is None:
                request.scored += len(fresh)
                self._gains.deltas.append(Delta(number, [], prompt_logprobs=fresh))

    def fail_rows(self, errors: dict[int, str], now_ns: int) -> None:
        """End the sequences whose rows came back wrong; their tokens are void."""
        for number, error in errors.items():
            self.fail(self.requests[number], error, now_ns)

    def fail_row(self, request: Request, error: str, now_ns: int) -> None:
        """End the sequence of a row that comes back from no step."""
        self.fail(request, error, now_ns)
        self.drop_row(request, now_ns)

    def take_back(self, request: Request, count: int, sampled: bool) -> None:
        """Let a live sequence be as if its row had never been: tokens in flight, and the sampled.

        count is 0 for a row of a lost epoch, which was taken back when it was preempted.
        """
        request.planned -= count
        request.counts.dropped += count
        if sampled:
            request.known -= 1
            if not request.placeholders:
                self.table.cells["last"][request.slot] = int(request.tokens[-1])

    def drop_row(self, request: Request, now_ns: int) -> None:
        """Expect a row back no longer."""
        request.flights -= 1
        self.settle(request, now_ns)

    def fail(self, request: Request, error: str, now_ns: int) -> None:
        """End one sequence with an error, once; nobody may reuse what it computed."""
        if request.finish is None:
            self._pool.forget(request.blocks)
            request.error = error
            self.end(request, "error", now_ns)

    def end(self, request: Request, finish: Finish, now_ns: int) -> None:
        """Decide a sequence's finish in any state. In a fixed batch its row stays till the end.

        Tokens in flight never count as computed: their rows come back late.
        """
        request.decide(finish, now_ns)
        if request.state != "running":
            self.waiting.remove(request)
            self._free(request, now_ns)
        elif self._fixed:
            request.counts.dropped += request.in_flight
            request.planned = request.computed
            self.held += 1
        else:
            self._release(request)
            self._free(request, now_ns)

    def _free(self, request: Request, now_ns: int) -> None:
        """Finish a decided sequence that holds nothing any more, and tell its client."""
        request.move("finished")
        self._policy.leaves(request)
        request.life.freed = now_ns
        self._gains.deltas.append(Delta(request.number, [], request.finish, request.error))

    def settle(self, request: Request, now_ns: int) -> None:
        """Hand an ended sequence over once nothing of it is in flight.

        A fixed batch leaves whole, when the last of its rows is decided; blocks may serve the next
        launch at once, since the device runs launches in order.
        """
        if self.held and self.held == len(self.running):
            for other in list(self.running.rows):
                self._release(other)
                self._free(other, now_ns)
                self._retire(other)
            self.held = 0
        self._retire(request)

    def _release(self, request: Request) -> None:
        """Leave the running list and give all blocks back, named unless they went wrong."""
        if self._caching and request.finish != "error":
            self.name_blocks(request)
        self.running.remove(request)
        self._pool.release(request.let_go())
        self.kv_tokens -= request.computed
        request.counts.dropped += request.in_flight
        request.planned = request.computed

    def _count_stops(self, request: Request, change: int) -> None:
        """Keep the ids that may end any live sequence."""
        counts, kinds = self._stop_ids, len(self._stop_ids)
        for token in request.stop_ids:
            counts[token] += change
            if not counts[token]:
                del counts[token]
        if len(counts) != kinds:
            self._stops = np.array(list(counts), dtype=np.int64)

    def _retire(self, request: Request) -> None:
        """Forget a finished sequence whose last row has come back."""
        if request.number not in self.requests or request.state != "finished":
            return
        if not request.flights:
            del self.requests[request.number]
            self.histories -= not request.is_plain
            self._count_stops(request, -1)
            request.leave()
            self._ended.append(request)
