"""Seeded bodies for the fuzz: valid ones of every field, spoilt ones, and bytes that are no JSON.

Owns what is sent and where to; tests/fuzz.py sends it. The same seed gives the same bodies. About
half are valid as drawn; what a spoilt one is answered is the server's to say, but never a 500.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from tests import tiny

VOCAB = tiny.Shape.vocab_size
WORDS = (
    *(
        "the",
        " scheduler",
        "a",
        "\n",
        "  ",
        "日本語",
        "👩‍👩‍👧‍👦",
        "é",
        "\u0000",
        "<|im_end|>",
        "\ufeff",
    ),
    *("'; DROP TABLE", "${7*7}", "{{x}}", "%s%n", "\u202e", "😀", "../../etc", "\\u0041"),
)
NUMBERS = (-1, 0, 1, 2, 1.5, -0.5, 319, 320, 2**31, 2**53, 2**63, 2**64, 10**40, 1e308, 5e-324)
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "01", "+1", '"\\ud800"', '"\\x"', "tru", "'a'", "")


@dataclass(frozen=True)
class Body:
    """One request: where to, its bytes, whether it is valid, and whether the client leaves."""

    path: str
    data: bytes
    valid: bool
    streams: bool = False
    leaves: bool = False


class Bodies:
    """Draws one body after another."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def next(self) -> Body:
        draw = self._draw
        path, fields = self._valid()
        kind = draw.random()
        if kind < 0.5:
            leaves = draw.random() < 0.02
            data = json.dumps(fields, ensure_ascii=draw.random() < 0.5).encode()
            return Body(path, data, True, bool(fields.get("stream")), leaves)
        if kind < 0.85:
            return Body(path, self._spoilt(fields), False, bool(fields.get("stream")))
        return Body(path, self._broken(json.dumps(fields).encode()), False)

    def _text(self, most: int = 6) -> str:
        return "".join(self._draw.choices(WORDS, k=self._draw.randint(1, most)))

    def _ids(self) -> list[int]:
        return [self._draw.randrange(VOCAB) for _ in range(self._draw.randint(1, 12))]

    def _valid(self) -> tuple[str, dict[str, Any]]:
        draw = self._draw
        place = draw.random()
        if place < 0.05:
            return "/detokenize", {"tokens": self._ids()}
        if place < 0.1:
            return "/tokenize", {"prompt": self._text()}
        if place < 0.5:
            fields = self._generation(
                messages=[self._message() for _ in range(draw.randint(1, 3))],
                logprobs=draw.choice((None, True, False)),
                max_completion_tokens=draw.choice((None, 1, 2, 4)),
                response_format=draw.choice((None, {"type": "text"})),
                tools=draw.choice((None, [])),
            )
            if fields.get("logprobs"):
                fields["top_logprobs"] = draw.randint(0, 20)
            return "/v1/chat/completions", fields
        texts = [self._text() for _ in range(draw.randint(1, 3))]
        lists = [self._ids() for _ in range(draw.randint(1, 3))]
        fields = self._generation(
            prompt=draw.choice((self._text(), texts, self._ids(), lists)),
            logprobs=draw.choice((None, None, 0, 1, 5, 20)),
            echo=draw.choice((None, None, False, True)),
            best_of=draw.choice((None, 1)),
            suffix=draw.choice((None, "")),
        )
        return "/v1/completions", fields

    def _message(self) -> dict[str, Any]:
        draw = self._draw
        parts = [{"type": "text", "text": self._text()} for _ in range(draw.randint(1, 3))]
        role = draw.choice(("system", "user", "assistant", "developer", "tool"))
        message = {"role": role, "content": draw.choice((self._text(), parts, ""))}
        if draw.random() < 0.2:
            message["name"] = self._text()
        return message

    def _generation(self, **own: Any) -> dict[str, Any]:
        draw = self._draw
        bias = {str(draw.randrange(VOCAB)): draw.uniform(-100, 100) for _ in range(3)}
        drawn = own | {
            "temperature": draw.choice((None, 0, 0.7, 1, 2)),
            "top_p": draw.choice((None, 0.1, 1)),
            "top_k": draw.choice((None, -1, 0, 1, 50)),
            "min_p": draw.choice((None, 0, 0.5, 1)),
            "n": draw.choice((None, None, 1, 2, 3)),
            "seed": draw.choice((None, 0, -1, 2**63 - 1)),
            "stop": draw.choice((None, "a", ["x", "scheduler"], [])),
            "stop_token_ids": draw.choice((None, [], [5, 319])),
            "min_tokens": draw.choice((None, 0, 1)),
            "ignore_eos": draw.choice((None, True, False)),
            "priority": draw.choice((None, 0, -5)),
            "frequency_penalty": draw.choice((None, -2, 2)),
            "presence_penalty": draw.choice((None, -2, 2)),
            "repetition_penalty": draw.choice((None, 0.01, 1, 2)),
            "logit_bias": draw.choice((None, {}, bias)),
            "user": draw.choice((None, self._text())),
            "cache_salt": draw.choice((None, "salt")),
            "stream": draw.choice((None, False, True)),
            "return_token_ids": draw.choice((None, True)),
            "metadata": draw.choice((None, {"a": "b"})),
        }
        if drawn["stream"]:
            options = {"include_usage": draw.choice((None, True)), "continuous_usage_stats": True}
            drawn["stream_options"] = draw.choice((None, options))
        drawn = {name: value for name, value in drawn.items() if draw.random() < 0.35}
        drawn |= {name: own[name] for name in ("messages", "prompt") if name in own}
        return drawn | {"max_tokens": draw.randint(1, 4)}

    def _hostile(self) -> Any:
        draw = self._draw
        kinds = (
            *(None, True, False, "", self._text(), [], {}, [[]], [None], {"": None}, "x" * 5000),
            *draw.sample(NUMBERS, 3),
            [draw.choice(NUMBERS)] * draw.choice((1, 3, 200)),
            {str(draw.choice(NUMBERS)): draw.choice(NUMBERS)},
            [self._text(), 5, None],
        )
        return draw.choice(kinds)

    def _spoilt(self, fields: dict[str, Any]) -> bytes:
        draw = self._draw
        for _ in range(draw.randint(1, 2)):
            name = draw.choice((*fields, *EVERY_NAME))
            if draw.random() < 0.15:
                fields.pop(name, None)
            else:
                fields[name] = self._hostile()
        text = json.dumps(fields, ensure_ascii=draw.random() < 0.5)
        if draw.random() < 0.3:
            raw = draw.choice(RAW)
            text = text[:-1] + f', "{draw.choice(EVERY_NAME)}": {raw}' + "}"
        return text.encode("utf-8", "replace")

    def _broken(self, data: bytes) -> bytes:
        draw = self._draw
        at = draw.randrange(len(data))
        kinds = (
            data[:at],
            data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
            data + data,
            b"\xef\xbb\xbf" + data,
            data.decode().encode("utf-16"),
            b"[" * draw.choice((10, 1_000, 50_000)) + data,
            data[:-1] + b',"x":' + b"[" * 600 + b"]" * 600 + b"}",
            bytes(draw.randrange(256) for _ in range(draw.randrange(64))),
            b'{"prompt":"\xff\xfe\xed\xa0\x80"}',
            draw.choice((b"", b"null", b"5", b'"x"', b"[]", b"{}", b"true", b"\x00")),
        )
        return draw.choice(kinds)


EVERY_NAME = (
    *("model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "max_tokens", "n"),
    *("max_completion_tokens", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("priority", "slo", "stream", "stream_options", "user", "logit_bias", "logprobs", "echo"),
    *("top_logprobs", "response_format", "tools", "tool_choice", "best_of", "suffix", "tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "cache_salt", "unknown"),
    *("add_special_tokens", "chat_template_kwargs", "return_token_ids", "include_metrics"),
)
