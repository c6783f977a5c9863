"""What people wrote stays text: a message that spells a control token does not become one.

Owns the marks that are put into such spellings before a chat template renders them, and taken out
when its text becomes tokens; server/openai_api.py puts them in, server/tokenizer.py takes them out.
The template's own control tokens carry no mark. Must cost nothing where nobody spells one.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MARK_HEAD = 0xE000
MARK_CHARS = 12
"""A mark is this many characters of private use, drawn anew: nobody can have written it before."""


def mark_controls(
    messages: Sequence[Mapping[str, Any]], spelled: re.Pattern[str] | None
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Return messages with a mark in each text that spells a control token, and the mark.

    `spelled` finds such texts. Without any the messages come back as they are, with no mark.
    Nesting is bounded by the JSON decoder's own limit; raises RecursionError beyond.
    """
    if spelled is None or not any(map(spelled.search, _texts(list(messages)))):
        return messages, ""
    mark = chr(MARK_HEAD) + "".join(
        chr(MARK_HEAD + 1 + secrets.randbelow(1024)) for _ in range(MARK_CHARS)
    )
    return _marked(list(messages), spelled, mark), mark


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _marked(value: Any, spelled: re.Pattern[str], mark: str) -> Any:
    if isinstance(value, str):
        return spelled.sub(lambda found: found[0][0] + mark + found[0][1:], value)
    if isinstance(value, Mapping):
        return {
            _marked(key, spelled, mark): _marked(inner, spelled, mark)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_marked(inner, spelled, mark) for inner in value]
    return value
