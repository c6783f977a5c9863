"""The queue in front of the engine as the server sees it: how long, how fast, who may still join.

Owns the sequences submitted and not yet admitted, the bounds on them, and the measured drain that
Retry-After rests on. engine_client.py keeps it true from the records; generation.py asks it before
it submits. Never refuses what a free slot would take at once.
"""

import math
from collections import deque

from telemetry.records import RejectionReason

DRAIN_WINDOW_NS = 15_000_000_000
RETRY_S_MAX = 120


class QueueFull(Exception):
    """The queue takes nothing more now; a retry may succeed after `retry_after_s`."""

    def __init__(self, reason: RejectionReason, retry_after_s: int) -> None:
        super().__init__(reason)
        self.reason: RejectionReason = reason
        self.retry_after_s = retry_after_s


class Queue:
    """Sequences between submit and their first admission; bounded in number and prompt tokens."""

    def __init__(self, *, requests_max: int, tokens_max: int) -> None:
        self.tokens = 0
        self._requests_max = requests_max
        self._tokens_max = tokens_max
        self._waiting: dict[int, int] = {}
        self._left: deque[int] = deque(maxlen=4096)

    def __len__(self) -> int:
        return len(self._waiting)

    def holds(self, request: int) -> bool:
        """Whether a sequence has not been admitted yet."""
        return request in self._waiting

    def check(self, *, sequences: int, tokens: int, slots_free: int, now_ns: int) -> None:
        """Raise QueueFull unless all of these sequences may join; slots_free do not count.

        One request always may join an empty queue, however long its prompts are.
        """
        if len(self._waiting) + sequences > self._requests_max + max(0, slots_free):
            if self._waiting:
                raise QueueFull("queue_full", self.retry_after_s(now_ns))
        elif self._waiting and self.tokens + tokens > self._tokens_max:
            raise QueueFull("queue_tokens", self.retry_after_s(now_ns))

    def joined(self, request: int, prompt_tokens: int) -> None:
        """Take note of a submission."""
        self._waiting[request] = prompt_tokens
        self.tokens += prompt_tokens

    def left(self, request: int, now_ns: int) -> None:
        """Take note of an admission or an end; harmless for one that left before."""
        prompt_tokens = self._waiting.pop(request, None)
        if prompt_tokens is not None:
            self.tokens -= prompt_tokens
            self._left.append(now_ns)

    def clear(self) -> None:
        """Forget everybody: the engine they waited for is gone."""
        self._waiting.clear()
        self.tokens = 0

    def retry_after_s(self, now_ns: int) -> int:
        """Return the seconds in which the queue drains at the rate of the last 15 s."""
        left = self._left
        while left and left[0] < now_ns - DRAIN_WINDOW_NS:
            left.popleft()
        if not left:
            return max(1, min(RETRY_S_MAX, len(self._waiting)))
        # A drain that began late in the window is not slower for that.
        span_s = max(0.5, (now_ns - left[0]) / 1e9)
        seconds = len(self._waiting) * span_s / len(left)
        return max(1, min(RETRY_S_MAX, math.ceil(seconds)))
