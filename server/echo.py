"""The prompt as the beginning of an answer, as the completions endpoint may be asked for.

Owns the text of one prompt and where each of its tokens begins; server/generation.py makes one for
a choice that echoes, server/choice.py puts it before the output. Prompts are shown with their
special tokens, but for those that the tokenizer put in front of a text.
"""

from engine.messages import Delta
from server.detokenizer import Detokenizer
from server.logprobs import Scored


class Echo:
    """One prompt on its way into its answer, piece by piece as its scores come.

    `chars` of its text were given. `alone` says that nothing but the prompt is wanted.
    """

    def __init__(
        self,
        prompt: list[int],
        detokenizer: Detokenizer,
        *,
        hidden: int,
        scored: bool,
        alone: bool,
    ) -> None:
        """Make the echo of a prompt; its first `hidden` tokens have no text."""
        self.alone = alone
        self.chars = 0
        self._prompt = prompt
        self._detokenizer = detokenizer
        self._hidden = hidden
        self._scored = scored
        self._given = 0

    def add(self, delta: Delta) -> tuple[str, list[Scored]]:
        """Return what this delta makes known: scored tokens, or all when the output begins."""
        if self._given == len(self._prompt):
            return "", []
        found = iter(delta.prompt_logprobs or [])
        end = self._given + len(delta.prompt_logprobs or [])
        if not self._given:
            end += 1  # the first token is not scored
        if not self._scored or delta.tokens or delta.finish:
            end = len(self._prompt)
        pieces: list[str] = []
        scores: list[Scored] = []
        for index in range(self._given, end):
            token = self._prompt[index]
            if self._scored:
                scores.append(Scored(token, next(found, None) if index else None, self.chars))
            piece = "" if index < self._hidden else self._detokenizer.add(token)
            self._put(piece, pieces)
        self._given = end
        if end == len(self._prompt):
            self._put(self._detokenizer.finish(), pieces)
        return "".join(pieces), scores

    def _put(self, piece: str, pieces: list[str]) -> None:
        pieces.append(piece)
        self.chars += len(piece)
