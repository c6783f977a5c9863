"""Log-probabilities as OpenAI's two endpoints show them.

Owns the shapes of `logprobs` in chats and completions; server/choice.py collects the scores,
server/streaming.py has them shown. Distinct tokens have distinct names: what is no whole character
is shown by its bytes. Pure functions: knows no engine and no socket.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.messages import TokenLogprobs
from server.tokenizer import Tokenizer


class Scored(NamedTuple):
    """A token of an answer: its score, None for the first of a prompt, and where its text begins.

    `offset` counts characters of the answer's text.
    """

    token: int
    score: TokenLogprobs | None
    offset: int


def shown_in_chat(scores: Sequence[Scored], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_name(token),
            "logprob": logprob,
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = []
    for token, score, _ in scores:
        assert score is not None
        top = zip(score.top_tokens, score.top_logprobs, strict=True)
        content.append(one(token, score.logprob) | {"top_logprobs": [one(*pair) for pair in top]})
    return {"content": content, "refusal": None}


def shown_in_completion(scores: Sequence[Scored], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion: the token itself is always among the top."""
    name = tokenizer.token_name
    top: list[dict[str, float] | None] = []
    for token, score, _ in scores:
        if score is None:
            top.append(None)
            continue
        pairs = zip(score.top_tokens, score.top_logprobs, strict=True)
        top.append(
            {name(other): logprob for other, logprob in pairs} | {name(token): score.logprob}
        )
    return {
        "text_offset": [offset for _, _, offset in scores],
        "token_logprobs": [score.logprob if score else None for _, score, _ in scores],
        "tokens": [name(token) for token, _, _ in scores],
        "top_logprobs": top,
    }
