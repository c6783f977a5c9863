"""What crosses the wall between server and engine, in both directions, frozen.

Owns the control channel's vocabulary; engine/loop.py and server/engine_client.py speak it, as
MessagePack over ZeroMQ. Iterations do not pass here: they go, already encoded as JSON, through the
lossy records channel. Nothing in this file may hold text of a prompt or know of HTTP.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from telemetry.records import CancelCause, Fault, Finish, RequestEnd, RequestStart, Run, StepModel

Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one sequence are chosen, and what is told of them; temperature 0 is greedy.

    `seed` is always set (the server draws one when the client gave none): the token at output
    index i depends on logits, seed and i alone, never on the batch. `top_k` 0, `top_p` 1, `min_p`
    0, penalties 0 and `repetition_penalty` 1 are off. `logit_bias` holds each token once.
    `logprobs` None is off, else how many of the most probable tokens come with each one's own;
    `prompt_logprobs` says the same of the prompt's tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def is_plain(self) -> bool:
        """Whether logits and parameters are all it takes, and the token alone is told."""
        told = (self.logprobs, self.prompt_logprobs)
        return told == (None, None) and not self.logit_bias and not self.penalizes


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability under the model's own logits, before any parameter changes them.

    top_tokens and top_logprobs are aligned, the most probable first. All numbers are finite.
    """

    logprob: float
    top_tokens: list[int] = []
    top_logprobs: list[float] = []


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One sequence for the engine's queue. `prompt` holds at least one valid token id.

    Only sequences of the same cache_salt reuse each other's KV blocks.
    """

    request: int
    request_id: str
    external_id: str | None = None
    parent_id: str | None = None
    tenant: str = "default"
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    priority: Priority = 0
    slo: str | None = None
    stream: bool = False
    cache_salt: str = ""
    received_at_ns: int


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End a sequence early: a stop string was found, or somebody cancelled. Idempotent.

    `delivered_tokens` is how many output tokens reached the client; the rest count as wasted.
    """

    request: int
    finish: Literal["stop", "cancelled", "error"]
    cancel_cause: CancelCause | None = None
    error: str | None = None
    delivered_tokens: int = 0


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Leave the loop; what still runs ends as cancelled (shutdown)."""


Command = Submit | Abort | Shutdown


class Trouble(str):
    """A stage's name that says what went wrong without ending the start."""

    __slots__ = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Start-up news for people: what the engine is doing and how far it is (0..1).

    `trouble` says that the stage is a Trouble: people get it as a warning.
    """

    stage: str
    fraction: float
    trouble: bool = False


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine serves. `run` carries the effective limits; the server completes its identity."""

    run: Run


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine cannot start: one line that says what to do. It exits after sending this."""

    error: str


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Tokens a sequence gained since the last report; `finish` is set on its last one.

    `logprobs` are those of `tokens`, one each, None for a sequence that did not ask; those of the
    prompt come in pieces, in order, from its second token on. `cached_tokens` of the prompt were
    found in the prefix cache at its first admission; told once, beside its first token.
    """

    request: int
    tokens: list[int]
    finish: Finish | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0


class Gains(msgspec.Struct, frozen=True, array_like=True):
    """What clients gained in a step: `requests` and `tokens` are aligned, one new token each.

    `deltas` hold all that is more than a token, and come after those.
    """

    requests: list[int] = []
    tokens: list[int] = []
    deltas: list[Delta] = []

    def each(self) -> Iterator[Delta]:
        """Yield everything as deltas, in order."""
        for request, token in zip(self.requests, self.tokens, strict=True):
            yield Delta(request, [token])
        yield from self.deltas


def joined(
    earlier: list[TokenLogprobs] | None, later: list[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    """Return what two deltas of one sequence say together."""
    if earlier is None or later is None:
        return earlier if later is None else later
    return earlier + later


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """Everything reliable since the last report; unsent reports merge and are never dropped.

    Gains may be delivered at once. Records are published only when the iteration
    numbered `after_step` has been received, or `lost_through_step` >= `after_step` says that it
    was dropped, so an end never overtakes the record of its own last step.
    """

    after_step: int
    lost_through_step: int = 0
    gains: Gains = Gains()
    starts: list[RequestStart] = []
    ends: list[RequestEnd] = []
    faults: list[Fault] = []
    step_models: list[StepModel] = []


News = Progress | Ready | Failed | Report
