"""One sequence on its way to a client: its tokens become text, and its text ends where it should.

Owns the text side of a sequence (decoder, stop strings, counts) and the stamps of its Delivery.
server/generation.py makes one for each choice; server/streaming.py feeds it and writes what it
gives. Must not know how an answer is shaped, and never counts a token as delivered too early.
"""

from collections import deque
from collections.abc import Sequence as Several
from typing import NamedTuple

from engine.messages import Delta
from server.detokenizer import Detokenizer
from server.echo import Echo
from server.logprobs import Scored
from server.sequence import Sequence
from server.stop_strings import StopStrings
from telemetry.records import Delivery, Finish

STALL_NS = 1_000_000
"""A write that took longer than this waited for the client; shorter ones are our own work."""


class Piece(NamedTuple):
    """What one delta adds to an answer: text that may be shown, tokens that count, their scores.

    There are scores where they were asked for, those of an echoed prompt first.
    """

    text: str
    tokens: list[int]
    scores: Several[Scored] = ()


class Choice:
    """The answer that one sequence becomes."""

    def __init__(
        self,
        index: int,
        sequence: Sequence,
        detokenizer: Detokenizer,
        *,
        stops: tuple[str, ...],
        silent: frozenset[int],
        echo: Echo | None = None,
    ) -> None:
        """Make an empty answer; `silent` are token ids that end a text without being part of it."""
        self.index = index
        self.sequence = sequence
        self.finish_reason: Finish | None = None
        self.error: str | None = None
        self.output_tokens = 0
        self.released_tokens = 0  # their text was handed out by `add`
        self.delivered_tokens = 0  # their text was written
        self.writing_since_ns = 0  # 0 while no write is under way
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = sequence.submission.sampling.min_tokens
        self._silent = silent
        self._echo = echo
        self._offset = 0  # characters that tokens made, shown or held
        self._ends: deque[int] = deque()  # text ends of the tokens not released yet
        self._last_end = 0
        self._made_chars = 0
        self._released_chars = 0
        self._first_write_at_ns: int | None = None
        self._last_write_at_ns: int | None = None
        self._stall_ns = 0
        self._bytes = 0

    def add(self, delta: Delta) -> Piece:
        """Take in new tokens; return what they add to the answer.

        Sets finish_reason when the answer is complete; then nothing more may be added. Tokens
        after the one that completed a stop string are left out.
        """
        pieces: list[str] = []
        scores: list[Scored] = []
        if self._echo is not None:
            text, scores = self._echo.add(delta)
            pieces.append(text)
            self._offset += len(text)
            if self._echo.alone:
                self._end_alone(delta)
                return Piece(text, [], scores)
        taken = 0
        for token in delta.tokens:
            if delta.logprobs is not None:
                scores.append(Scored(token, delta.logprobs[taken], self._offset))
            taken += 1
            piece = "" if token in self._silent else self._detokenizer.add(token)
            self._offset += len(piece)
            if self._show(piece, pieces):
                break
        tokens = delta.tokens[:taken]
        if self.finish_reason is None and delta.finish is not None:
            self._end(delta, pieces)
        return Piece("".join(pieces), tokens, scores)

    def _end_alone(self, delta: Delta) -> None:
        """End an answer that is its prompt alone: the token that ended the work is no part of it.

        The engine computes nothing without sampling once.
        """
        self.error = delta.error
        self.finish_reason = "length" if delta.finish == "stop" else delta.finish

    def _show(self, piece: str, pieces: list[str]) -> bool:
        """Pass one token's text through the stop strings; True when one was met."""
        self.output_tokens += 1
        if self._stops is None:
            pieces.append(piece)
            self.released_tokens = self.output_tokens
            return False
        met = False
        self._made_chars += len(piece)
        self._ends.append(self._made_chars)
        if self.output_tokens > self._min_tokens:
            piece, met = self._stops.add(piece)
        pieces.append(piece)
        self._release(len(piece), met)
        return met

    def _release(self, count: int, met: bool) -> None:
        self._released_chars += count
        ends = self._ends
        while ends and ends[0] <= self._released_chars:
            self._last_end = ends.popleft()
            self.released_tokens += 1
        if met:
            self.finish_reason = "stop"
            # A token that the stop string cuts in two was shown in part: it was not wasted.
            self.released_tokens += bool(ends) and self._last_end < self._released_chars

    def _end(self, delta: Delta, pieces: list[str]) -> None:
        self.error = delta.error
        self.finish_reason = delta.finish
        rest = self._detokenizer.finish()
        if self._stops is not None:
            fresh, met = self._stops.add(rest)
            if not met:
                last, met = self._stops.finish()
                fresh += last
            rest = fresh
            if met and self.finish_reason == "length":
                self.finish_reason = "stop"
        pieces.append(rest)
        self.released_tokens = self.output_tokens

    def wrote(self, count: int, began_ns: int, now_ns: int) -> None:
        """Book a write of `count` bytes that carried all text released so far."""
        self.delivered_tokens = self.released_tokens
        if self._first_write_at_ns is None:
            self._first_write_at_ns = now_ns
        self._last_write_at_ns = now_ns
        self._bytes += count
        if now_ns - began_ns > STALL_NS:
            self._stall_ns += now_ns - began_ns

    def delivery(self, *, tokenized_at_ns: int, submitted_at_ns: int) -> Delivery:
        """Return the server's record of the sequence."""
        return Delivery(
            request=self.sequence.request,
            received_at_ns=self.sequence.submission.received_at_ns,
            tokenized_at_ns=tokenized_at_ns,
            submitted_at_ns=submitted_at_ns,
            first_write_at_ns=self._first_write_at_ns,
            last_write_at_ns=self._last_write_at_ns,
            stall_ns=self._stall_ns,
            merged_deltas=self.sequence.merged_deltas,
            bytes=self._bytes,
        )

    @property
    def first_write_at_ns(self) -> int | None:
        """Return when the first of its output was written."""
        return self._first_write_at_ns
