"""The queue in front of the engine as the server sees it: how long, how fast, who may still join.

Owns the sequences submitted and not yet admitted, the bounds on them (all, and each tenant's), and
Retry-After. engine_client.py keeps it true from the records; generation.py asks it before it
submits. Never refuses what a free slot would take at once.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from server.config import ServerConfig
from server.drain_rate import DrainRate
from server.errors import ApiError, overloaded
from telemetry.records import Finish, Iteration, RejectionReason

RETRY_S_MAX = 120
EARLIEST, SPREAD = 0.5, 1.25
"""Who is refused is told a moment between these shares of the time the queue needs to drain: from
when half of it has gone, each a little after the one before, over once and a quarter that time."""
PROMISES_MAX = 4096
FULL: Mapping[RejectionReason, str] = MappingProxyType(
    {
        "queue_full": "too many requests wait",
        "queue_tokens": "too many tokens wait",
        "queue_bytes": "too many bytes of requests are held",
        "tenant_limit": "too much of this tenant waits",
    }
)


class QueueFull(Exception):
    """The queue takes nothing more now; a retry may succeed after `retry_after_s`."""

    def __init__(self, reason: RejectionReason, retry_after_s: float) -> None:
        super().__init__(reason)
        self.reason: RejectionReason = reason
        self.retry_after_s = retry_after_s

    def answer(self) -> ApiError:
        """Return the 429 that the client gets."""
        message = FULL[self.reason]
        return overloaded(message, code=self.reason, retry_after_s=self.retry_after_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Most sequences and prompt tokens that may wait: of all, and of one tenant (None: no own)."""

    requests_max: int
    tokens_max: int
    tenant_requests_max: int | None = None
    tenant_tokens_max: int | None = None


def limits_of(config: ServerConfig) -> QueueLimits:
    """Return the limits that the configuration asks for."""
    return QueueLimits(
        requests_max=config.max_queue_requests,
        tokens_max=config.max_queue_tokens,
        tenant_requests_max=config.max_tenant_requests,
        tenant_tokens_max=config.max_tenant_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What wants to join: so many sequences of a tenant, with so many prompt tokens together."""

    tenant: str
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """One sequence in the queue."""

    tenant: str
    prompt_tokens: int
    max_tokens: int


class Queue:
    """Sequences between submit and their first admission; bounded in number and prompt tokens."""

    def __init__(self, limits: QueueLimits, now_ns: Callable[[], int]) -> None:
        self.tokens = 0
        self._limits = limits
        self._now_ns = now_ns
        self._slots = 1
        self._waiting: dict[int, Waiting] = {}
        self._work_tokens = 0
        self._tenants: dict[str, list[int]] = {}
        self._rate = DrainRate()
        self._promises: deque[tuple[int, int]] = deque()
        self._promised = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def holds(self, request: int) -> bool:
        """Whether a sequence has not been admitted yet."""
        return request in self._waiting

    def check(self, asked: Asked, *, slots: int, slots_free: int) -> None:
        """Raise QueueFull unless all of these sequences may join; slots_free do not count.

        One request always may join an empty queue, however long its prompts are.
        """
        self._slots = slots
        if not self._waiting:
            return
        limits, free = self._limits, max(0, slots_free)
        own_sequences, own_tokens = self._tenants.get(asked.tenant, (0, 0))
        if len(self._waiting) + asked.sequences > limits.requests_max + free:
            reason: RejectionReason = "queue_full"
        elif self.tokens + asked.tokens > limits.tokens_max:
            reason = "queue_tokens"
        elif own_sequences and (
            _exceeds(own_sequences + asked.sequences - free, limits.tenant_requests_max)
            or _exceeds(own_tokens + asked.tokens, limits.tenant_tokens_max)
        ):
            reason = "tenant_limit"
        else:
            return
        raise QueueFull(reason, self.retry_after_s(asked.sequences))

    def joined(self, request: int, waiting: Waiting) -> None:
        """Take note of a submission."""
        self._waiting[request] = waiting
        self._count(waiting, 1)

    def stepped(self, iteration: Iteration) -> None:
        """Take note of what an iteration admitted, and of the work it did."""
        for request in iteration.admitted:
            if waiting := self._leave(request):
                self._rate.began(request, waiting.max_tokens)
        self._rate.stepped(
            rows=iteration.running,
            waiting=iteration.waiting,
            tokens=iteration.decode_tokens,
            time_ns=iteration.end_at_ns - iteration.begin_at_ns,
        )

    def ended(self, request: int, output_tokens: int, finish: Finish) -> None:
        """Take note of an end, of a sequence that ran or of one that never did."""
        self._leave(request)
        whole = finish in ("stop", "length")
        self._rate.ended(request, output_tokens if whole else None)

    def clear(self) -> None:
        """Forget everybody: the engine they waited for is gone."""
        self._waiting.clear()
        self._tenants.clear()
        self._rate.clear()
        self.tokens = self._work_tokens = 0

    def retry_after_s(self, sequences: int = 1) -> float:
        """Return when so many sequences should find room, from the measured drain.

        Each refusal is told a later moment than the one before, so that those who come back do
        not all meet again at the door.
        """
        now_ns = self._now_ns()
        while self._promises and self._promises[0][0] <= now_ns:
            self._promised -= self._promises.popleft()[1]
        drain_s = self._rate.seconds(self._work_tokens, self._slots)
        turn = self._promised / max(1, len(self._waiting)) % SPREAD
        retry_s = min(float(RETRY_S_MAX), max(0.001, drain_s * (EARLIEST + turn)))
        if len(self._promises) < PROMISES_MAX:
            # Ordered well enough: a promise behind a later one only counts a little too long.
            self._promises.append((now_ns + int(math.ceil(retry_s) * 1e9), sequences))
            self._promised += sequences
        return retry_s

    def _leave(self, request: int) -> Waiting | None:
        """Take a sequence out, None for one that left before."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self._count(waiting, -1)
        return waiting

    def _count(self, waiting: Waiting, sign: int) -> None:
        self.tokens += sign * waiting.prompt_tokens
        self._work_tokens += sign * waiting.max_tokens
        own = self._tenants.setdefault(waiting.tenant, [0, 0])
        own[0] += sign
        own[1] += sign * waiting.prompt_tokens
        if not own[0]:
            del self._tenants[waiting.tenant]


def _exceeds(count: int, most: int | None) -> bool:
    return most is not None and count > most
