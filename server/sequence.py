"""One live sequence as the server sees it: what was submitted, and the mailbox of its tokens.

Owns Submission and Sequence. engine_client.py fills the mailbox, generation.py empties it.
Everything here runs on the event loop.
"""

import asyncio
from dataclasses import dataclass

from engine.messages import Delta, SamplingParams, TokenLogprobs, joined
from telemetry.records import Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A sequence to submit: Submit without the integer, which the client gives."""

    request_id: str
    external_id: str | None = None
    parent_id: str | None = None
    tenant: str = "default"
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    priority: int = 0
    slo: str | None = None
    stream: bool = False
    cache_salt: str = ""
    received_at_ns: int


class Sequence:
    """The mailbox of one live sequence: at most one merged delta waits in it.

    `ended` is set once its end is on record, or it is known that none will be.
    """

    def __init__(self, request: int, submission: Submission) -> None:
        self.request = request
        self.request_id = submission.request_id
        self.submission = submission
        self.merged_deltas = 0
        self.received_tokens = 0
        self.cached_tokens = 0  # of the prompt; known with the first token
        self.finish: Finish | None = None
        self.aborted = False
        self.ended = asyncio.Event()
        self._tokens: list[int] = []
        self._error: str | None = None
        self._logprobs: list[TokenLogprobs] | None = None
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._news = asyncio.Event()

    async def take(self) -> Delta:
        """Wait for news and return all that came since; after one with a finish none comes."""
        await self._news.wait()
        self._news.clear()
        tokens, self._tokens = self._tokens, []
        logprobs, self._logprobs = self._logprobs, None
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return Delta(self.request, tokens, self.finish, self._error, logprobs, prompt_logprobs)

    def put_token(self, token: int) -> None:
        """Add one token; what comes after a finish is ignored."""
        if self.finish is not None:
            return
        if self._news.is_set():
            self.merged_deltas += 1
        else:
            self._news.set()
        self._tokens.append(token)
        self.received_tokens += 1

    def put(self, delta: Delta) -> None:
        """Add tokens, and the finish once; what comes after a finish is ignored."""
        if self.finish is not None:
            return
        if delta.tokens and self._news.is_set():
            self.merged_deltas += 1
        self.cached_tokens += delta.cached_tokens
        self._tokens.extend(delta.tokens)
        self._logprobs = joined(self._logprobs, delta.logprobs)
        self._prompt_logprobs = joined(self._prompt_logprobs, delta.prompt_logprobs)
        self.received_tokens += len(delta.tokens)
        self.finish = delta.finish
        self._error = delta.error
        self._news.set()
