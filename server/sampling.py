"""From a body's fields to the engine's parameters: how tokens are chosen and what is told of them.

Owns the translation and the checks that need the vocabulary; server/openai_api.py calls it with
bodies that server/schemas.py has decoded. Must raise nothing but ApiError.
"""

import secrets

from engine.messages import SamplingParams
from server.errors import invalid
from server.schemas import ChatRequest, CompletionRequest, GenerationRequest


def check_tokens(body: GenerationRequest, vocab_size: int) -> None:
    """Refuse token ids that the model does not have: they would index what is not there."""
    for name, tokens in (
        ("stop_token_ids", body.stop_token_ids or ()),
        ("logit_bias", body.logit_bias or ()),
    ):
        if any(not 0 <= token < vocab_size for token in tokens):
            raise invalid(name, f"a token id is outside the vocabulary of {vocab_size} tokens")


def sampling_of(body: GenerationRequest) -> SamplingParams:
    """Return the parameters of a checked body; a client that gave no seed gets one."""
    logprobs = _logprobs(body)
    echo = isinstance(body, CompletionRequest) and body.echo
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=tuple((body.logit_bias or {}).items()),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
    )


def _logprobs(body: GenerationRequest) -> int | None:
    """Return how many alternatives are told with each token, None when nothing is."""
    if isinstance(body, ChatRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    if not isinstance(body, CompletionRequest) or body.logprobs is False:
        return None
    return None if body.logprobs is None else int(body.logprobs)
