"""One sequence in the engine: its tokens, how far they are computed, and the life it has had.

Owns Request and its closed table of moves. The scheduler is the one writer; policies and core only
read. No phases: what a step may compute is known - computed - in flight, whatever the reason.
Never holds text, tensors or anything of another sequence.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.kv import block_digests, root_digest
from engine.messages import SamplingParams, Submit
from engine.rows import ID_BYTES, PLACEHOLDER, address_of
from engine.table import NEVER, Table
from telemetry.records import CancelCause, Finish, RequestEnd, RequestStart

Ids = npt.NDArray[np.int32]
NO_SLOT = 2**62
"""The slot of a sequence that has left: its cells are somebody else's, and read as an error."""

State = Literal["waiting", "running", "preempted", "finished"]

MOVES: dict[State, tuple[State, ...]] = {
    "waiting": ("running", "finished"),
    "running": ("preempted", "finished"),
    "preempted": ("running", "finished"),
    "finished": (),
}
"""Every legal move of a sequence; `Request.move` asserts it."""


@dataclass(slots=True)
class Life:
    """Instants of one sequence, in ns since the server's start, None until reached."""

    received: int
    arrived: int
    admitted: int | None = None
    first_scheduled: int | None = None
    prefill_finished: int | None = None
    first_token: int | None = None
    cancel_requested: int | None = None
    decided: int | None = None
    freed: int | None = None


@dataclass(slots=True)
class Counts:
    """Tokens and events of one sequence, summed over its life.

    At every step: tokens scheduled so far = computed + in flight - cached + lost + dropped.
    """

    cached: int = 0
    cached_first: int = 0
    lost: int = 0
    lost_last: int = 0
    recomputed: int = 0
    dropped: int = 0
    preemptions: int = 0
    iterations: int = 0
    output: int = 0


class Cell:
    """A counter of a sequence that stands in the table, at the sequence's slot."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __get__(self, request: "Request", kind: type | None = None) -> int:
        value: int = request.table.cells[self._column][request.slot]
        return value

    def __set__(self, request: "Request", value: int) -> None:
        request.table.cells[self._column][request.slot] = value


@dataclass(slots=True, eq=False)
class Request:
    """A sequence. `ids` begins with `tokens`, `read` of them; what follows is room for more.

    `known` counts them and the placeholders of samples whose step is not committed. `computed`
    tokens have their keys and values in `blocks`; up to `planned` they are computed or in flight.
    `highest` is the most ever computed: positions below it are recompute. `flights` counts
    uncommitted rows, those of lost epochs included; `stop_ids` end it when sampled; `arrival`
    orders it among all others. `digests` names the content of its full blocks as far as anybody
    asked; the first `named` blocks are in the index. Counters that every step changes are cells of
    the table. `leader` is the sibling that came first with
    the same prompt and computes it for all. `scored` tokens of the prompt have had their
    log-probabilities told, the first, which has none, among them.
    """

    submit: Submit
    life: Life
    number: int
    arrival: tuple[int, int]
    sampling: SamplingParams
    table: Table
    slot: int
    ids: Ids
    is_plain: bool = True
    stop_ids: frozenset[int] = frozenset()
    rank: tuple[int, ...] = ()
    group: str = ""
    state: State = "waiting"
    prompt_tokens: int = 0
    computed_max: int = 0
    scored: int = 1
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    named: int = 0
    leader: "Request | None" = None
    counts: Counts = field(default_factory=Counts)
    finish: Finish | None = None
    cancel_cause: CancelCause | None = None
    error: str | None = None
    undelivered: int = 0

    epoch = Cell("epoch")
    known = Cell("known")
    read = Cell("read")
    planned = Cell("planned")
    computed = Cell("computed")
    highest = Cell("highest")
    flights = Cell("flights")
    iterations = Cell("iterations")
    _limit = Cell("limit")
    _decided = Cell("decided")
    _room = Cell("room")
    _nameable = Cell("nameable")
    _ids_at = Cell("ids")

    @classmethod
    def create(
        cls, submit: Submit, arrived_at_ns: int, *, eos_ids: frozenset[int], table: Table
    ) -> "Request":
        """Return a waiting sequence for a submission."""
        sampling = submit.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        prompt_tokens = len(submit.prompt)
        computed_max = prompt_tokens + submit.max_tokens - 1
        ids: Ids = np.array(submit.prompt, dtype=np.int32)
        return cls(
            submit=submit,
            life=Life(received=submit.received_at_ns, arrived=arrived_at_ns),
            number=submit.request,
            arrival=(arrived_at_ns, submit.request),
            sampling=sampling,
            table=table,
            slot=table.take(
                prompt=prompt_tokens,
                limit=computed_max,
                last=submit.prompt[-1] if submit.prompt else PLACEHOLDER,
            ),
            ids=ids,
            is_plain=sampling.is_plain,
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | eos_ids,
            prompt_tokens=prompt_tokens,
            computed_max=computed_max,
        )

    @property
    def may_share(self) -> bool:
        """Whether it may take its prompt's blocks from others: scoring a prompt computes it all."""
        return self.sampling.prompt_logprobs is None

    @property
    def tokens(self) -> Ids:
        """The ids of its prompt and of every sampled token that the host has read, not a copy."""
        return self.ids[: self.read]

    @property
    def placeholders(self) -> int:
        """Tokens sampled, or about to be, that the host has not read."""
        return self.known - self.read

    @property
    def in_flight(self) -> int:
        """Tokens planned and not committed."""
        return self.planned - self.computed

    @property
    def pending(self) -> int:
        """Tokens that the next step may compute: known and neither computed nor in flight.

        The last token a sequence may generate is never computed: nothing follows it.
        """
        return min(self.known, self.computed_max) - self.planned

    @property
    def output_tokens(self) -> int:
        """Tokens sampled and kept."""
        return self.read - self.prompt_tokens

    def digests_of(self, blocks: int, block_tokens: int) -> list[bytes]:
        """Return the digests of its first full blocks; all their tokens must have been read."""
        digests = self.digests
        if (known := len(digests)) < blocks:
            parent = digests[-1] if digests else root_digest(self.submit.cache_salt)
            tokens = self.ids[known * block_tokens : blocks * block_tokens]
            digests.extend(block_digests(parent, tokens.tobytes(), block_tokens * ID_BYTES))
        return digests[:blocks]

    def hold(self, blocks: Collection[int], block_tokens: int) -> None:
        """Put blocks at the end of its table."""
        self.blocks.extend(blocks)
        self._room = len(self.blocks) * block_tokens

    def make_room(self) -> None:
        """Have room for the ids of all that it may generate, as it has once it runs."""
        room = self.prompt_tokens + self.submit.max_tokens
        if len(self.ids) < room:
            ids = np.zeros(room, dtype=np.int32)
            ids[: len(self.ids)] = self.ids
            self.ids = ids
            self._ids_at = address_of(ids)

    def let_go(self) -> list[int]:
        """Return its blocks, which it holds no longer."""
        blocks, self.blocks = self.blocks, []
        self._room, self._nameable = 0, NEVER
        return blocks

    def note_named(self, blocks: int, block_tokens: int) -> None:
        """Note that its first `blocks` blocks are in the index; a prompt's next follows when full.

        Blocks of generated text are named when they are let go: until then nobody asks for them.
        """
        self.named = blocks
        following = (blocks + 1) * block_tokens
        self._nameable = following if following <= self.prompt_tokens else NEVER

    def decide(self, finish: Finish, now_ns: int) -> None:
        """Know how it ends: nothing more of it will be computed or kept."""
        self.finish = finish
        self.life.decided = now_ns
        self.known = self.read
        self._limit, self._decided = 0, 1

    def leave(self) -> None:
        """Give its slot back; what the record of its end needs is kept."""
        self.counts.iterations, self.counts.output = self.iterations, self.output_tokens
        self.table.give_back(self.slot)
        self.slot = NO_SLOT

    def move(self, state: State) -> None:
        """Change state; an illegal move is our mistake."""
        assert state in MOVES[self.state], f"{self.number}: {self.state} -> {state}"
        self.state = state

    def token_ids(self, start: int, count: int) -> list[int]:
        """Return the ids at positions start..start+count, placeholders as PLACEHOLDER."""
        ids: list[int] = self.tokens[start : start + count].tolist()
        return ids + [PLACEHOLDER] * (count - len(ids))


def start_record(request: Request) -> RequestStart:
    """Return the record of a sequence entering the queue."""
    submit = request.submit
    return RequestStart(
        request=submit.request,
        request_id=submit.request_id,
        external_id=submit.external_id,
        parent_id=submit.parent_id,
        tenant=submit.tenant,
        arrived_at_ns=request.life.arrived,
        prompt_tokens=request.prompt_tokens,
        max_tokens=submit.max_tokens,
        priority=submit.priority,
        slo=submit.slo,
        stream=submit.stream,
    )


def end_record(request: Request, released_at_ns: int) -> RequestEnd:
    """Return the one record of a sequence's end."""
    submit, life, counts = request.submit, request.life, request.counts
    assert request.finish is not None
    assert life.decided is not None
    return RequestEnd(
        request=submit.request,
        request_id=submit.request_id,
        external_id=submit.external_id,
        parent_id=submit.parent_id,
        tenant=submit.tenant,
        received_at_ns=life.received,
        arrived_at_ns=life.arrived,
        admitted_at_ns=life.admitted,
        first_scheduled_at_ns=life.first_scheduled,
        prefill_finished_at_ns=life.prefill_finished,
        first_token_at_ns=life.first_token,
        cancel_requested_at_ns=life.cancel_requested,
        decided_at_ns=life.decided,
        freed_at_ns=life.freed,
        released_at_ns=released_at_ns,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=counts.cached_first,
        output_tokens=counts.output,
        recomputed_tokens=counts.recomputed,
        dropped_tokens=counts.dropped,
        wasted_tokens=request.undelivered,
        preemptions=counts.preemptions,
        iterations=counts.iterations,
        finish=request.finish,
        cancel_cause=request.cancel_cause,
        error=request.error,
    )
