"""The prompts of the latest requests, for a server that was told to show them, and for no other.

Owns a bounded memory from a sequence's id to its prompt's tokens; server/generation.py keeps them
in it, the request log and `GET /v1/requests/{id}` read them. Without --show-prompts there is none.
Must never hold more than it says, and a text is cut: a prompt may be a book.
"""

from collections import OrderedDict

from server.tokenizer import Tokenizer

PROMPTS_MAX = 256
TOKENS_SHOWN = 1000


class Prompts:
    """What the latest sequences were asked, by the sequence's own id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[str, tuple[list[int], int]] = OrderedDict()

    def keep(self, request_id: str, prompt: list[int]) -> None:
        """Remember a prompt's beginning; the oldest one is forgotten for it."""
        self._kept[request_id] = (prompt[:TOKENS_SHOWN], len(prompt))
        if len(self._kept) > PROMPTS_MAX:
            self._kept.popitem(last=False)

    def of(self, request_id: str) -> dict[str, object] | None:
        """Return `text` and how many tokens were left out of it; None of one that is forgotten."""
        kept = self._kept.get(request_id)
        if kept is None:
            return None
        tokens, length = kept
        return {"text": self.text(tokens), "left_out_tokens": length - len(tokens)}

    def text(self, prompt: list[int]) -> str:
        """Return the beginning of a prompt as text, control tokens spelt out."""
        detokenizer = self._tokenizer.detokenizer(special=True)
        return "".join(map(detokenizer.add, prompt[:TOKENS_SHOWN]))
