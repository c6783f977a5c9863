"""The shapes of OpenAI's answers: chat and completion, in one piece and in chunks of a stream.

Owns the JSON that /v1 endpoints write; server/streaming.py and server/openai_api.py call it. Pure
functions of what they are given: knows no engine, no socket and no clock. The bytes around a
chunk's text are made once for each sequence, since a stream writes them for every token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Endpoint = Literal["chat", "completions"]

DONE = b"data: [DONE]\n\n"
BREAKS = (
    (b"\xc2\x85", rb"\u0085"),
    (b"\xe2\x80\xa8", rb"\u2028"),
    (b"\xe2\x80\xa9", rb"\u2029"),
)
"""Next line, line and paragraph separator in UTF-8, and their escapes."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How one HTTP request wants to be answered."""

    endpoint: Endpoint
    id: str
    created: int
    model: str
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of an answer: each prompt counts once, every choice's output counts.

    `cached_tokens` of the prompts were not computed but found in the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def plain(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One finished choice."""

    index: int
    text: str
    finish_reason: str
    prompt: list[int]
    tokens: list[int]
    logprobs: dict[str, Any] | None = None


def event(value: Any) -> bytes:
    """Return one server-sent event with the JSON of `value`."""
    return b"data: " + _one_line(_encode(value)) + b"\n\n"


def _one_line(data: bytes) -> bytes:
    """Return JSON without the three characters at which some clients break lines.

    They may stand in JSON as they are, and an event ends at a line feed alone; but clients that
    split text by Python's splitlines would read half an event.
    """
    for char, escaped in BREAKS:
        if char in data:
            data = data.replace(char, escaped)
    return data


class ChunkWriter:
    """Makes the chunks of one choice of a stream."""

    def __init__(self, style: Style, index: int, prompt: list[int]) -> None:
        self._style = style
        self._index = index
        self._prompt = prompt
        self._opened = False
        chat = style.endpoint == "chat"
        head = {
            "id": style.id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": style.created,
            "model": style.model,
        }
        text = b'"delta":{"content":' if chat else b'"text":'
        self._before = b"data: " + _encode(head)[:-1] + b',"choices":[{"index":%d,' % index + text
        self._after = b'},"logprobs":' if chat else b',"logprobs":'
        self._null_usage = b',"usage":null}\n\n' if style.include_usage else b"}\n\n"
        self._head = head

    def text(
        self,
        text: str,
        tokens: list[int],
        usage: Usage | None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """Return the chunk of a piece of text, the role before the first.

        `usage` is only looked at where each chunk carries it.

        Nothing when there is no text, nor tokens or logprobs to tell.
        """
        style = self._style
        if not text and not (style.token_ids and tokens) and logprobs is None:
            return b""
        opening = self._open()
        ids = b',"token_ids":' + _encode(tokens) if style.token_ids else b""
        return b"".join(
            (
                opening,
                self._before,
                _one_line(_encode(text)),
                self._after,
                b"null" if logprobs is None else _one_line(_encode(logprobs)),
                b',"finish_reason":null',
                ids,
                b"}]",
                self._usage(usage),
            )
        )

    def finish(self, reason: str, usage: Usage | None) -> bytes:
        """Return the chunk that ends the choice."""
        empty: dict[str, Any] = {"delta": {}} if self._style.endpoint == "chat" else {"text": ""}
        choice = {"index": self._index} | empty | {"logprobs": None, "finish_reason": reason}
        return self._open() + self._whole(choice, usage)

    def _open(self) -> bytes:
        """Return what comes before a choice's first chunk: the role of a chat's answer."""
        if self._opened:
            return b""
        self._opened = True
        choice: dict[str, Any] = {"index": self._index, "logprobs": None, "finish_reason": None}
        if self._style.endpoint == "chat":
            choice["delta"] = {"role": "assistant", "content": ""}
        elif not self._style.token_ids:
            return b""
        else:
            choice["text"] = ""
        if self._style.token_ids:
            choice["prompt_token_ids"] = self._prompt
        return self._whole(choice, None)

    def _whole(self, choice: dict[str, Any], usage: Usage | None) -> bytes:
        return b"data: " + _encode(self._head | {"choices": [choice]})[:-1] + self._usage(usage)

    def _usage(self, usage: Usage | None) -> bytes:
        if usage is None or not self._style.continuous_usage:
            return self._null_usage
        return b',"usage":' + _encode(usage.plain()) + b"}\n\n"


def closing(style: Style, usage: Usage, receipt: dict[str, Any] | None = None) -> bytes:
    """Return what ends a stream: usage and receipt if they were asked for, then [DONE]."""
    if not style.include_usage and receipt is None:
        return DONE
    chat = style.endpoint == "chat"
    chunk: dict[str, Any] = {
        "id": style.id,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": style.created,
        "model": style.model,
        "choices": [],
    }
    if style.include_usage:
        chunk["usage"] = usage.plain()
    if receipt is not None:
        chunk["metrics"] = receipt
    return event(chunk) + DONE


def whole(
    style: Style,
    choices: Sequence[Finished],
    usage: Usage,
    receipt: dict[str, Any] | None = None,
) -> bytes:
    """Return the body of an answer in one piece."""
    chat = style.endpoint == "chat"
    body: dict[str, Any] = {
        "id": style.id,
        "object": "chat.completion" if chat else "text_completion",
        "created": style.created,
        "model": style.model,
        "choices": [_choice(style, choice) for choice in choices],
        "usage": usage.plain(),
    }
    if receipt is not None:
        body["metrics"] = receipt
    return _encode(body)


def _choice(style: Style, choice: Finished) -> dict[str, Any]:
    shown: dict[str, Any] = {"index": choice.index}
    if style.endpoint == "chat":
        shown["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
    else:
        shown["text"] = choice.text
    shown |= {"logprobs": choice.logprobs, "finish_reason": choice.finish_reason}
    if style.token_ids:
        shown |= {"prompt_token_ids": choice.prompt, "token_ids": choice.tokens}
    return shown
