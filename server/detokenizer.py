"""Text out of tokens, one at a time: what may be shown now, never half a character.

Owns the incremental decoders; server/tokenizer.py makes one for each sequence. The pieces joined
equal the tokenizer's own decoding of all ids, special tokens skipped. A token costs the same early
and late in a text, and no sequence of ids, however absurd, may raise.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
HELD_TOKENS_MAX = 8
"""Tokens held back for a character to complete; UTF-8 needs at most four bytes for one."""


class Detokenizer(Protocol):
    """The text of one sequence as it grows."""

    def add(self, token: int) -> str:
        """Take one token id and return the text that is now certain, perhaps none."""
        ...

    def finish(self) -> str:
        """Return what was held back; bytes that make no character become U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: each token is a few raw bytes of UTF-8, so no context is needed.

    `table` holds the bytes of every id: none for special tokens and for ids without a token.
    """

    __slots__ = ("_decode", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, token: int) -> str:
        """Take one token id and return the text that is now certain, perhaps none."""
        return self._decode(self._table[token]) if 0 <= token < len(self._table) else ""

    def finish(self) -> str:
        """Return what was held back; bytes that make no character become U+FFFD."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other vocabulary: a small window is decoded with and without the new token.

    The window begins at tokens whose text is out already, since such decoders treat the first word
    and runs of byte tokens by their neighbours. `decode` skips special tokens; `silent` are their
    ids, which must not become the window's beginning.
    """

    def __init__(self, decode: Callable[[list[int]], str], silent: frozenset[int]) -> None:
        self._decode = decode
        self._silent = silent
        self._window: list[int] = []
        self._shown_tokens = 0
        self._shown_text = ""  # of the window's first `_shown_tokens` tokens

    def add(self, token: int) -> str:
        """Take one token id and return the text that is now certain, perhaps none."""
        if token in self._silent:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(self._window) - self._shown_tokens
        if held < HELD_TOKENS_MAX and text.endswith(REPLACEMENT):
            return ""
        return self._show(text)

    def finish(self) -> str:
        """Return what was held back; bytes that make no character become U+FFFD."""
        if len(self._window) == self._shown_tokens:
            return ""
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        fresh = text[len(self._shown_text) :]
        if fresh:
            self._window = self._window[self._shown_tokens :]
            self._shown_tokens = len(self._window)
            self._shown_text = self._decode(self._window)
        elif len(self._window) - self._shown_tokens >= HELD_TOKENS_MAX:
            # Tokens without any text: forgotten, so that a long run of them costs nothing.
            del self._window[self._shown_tokens :]
        return fresh
