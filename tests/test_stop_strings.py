"""Where a text ends: stop strings against a search in the whole text, and what counts as delivered.

However the text was cut into tokens and deltas, the result is the same.
"""

import random
import time

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from engine.messages import Delta, SamplingParams
from server.choice import Choice
from server.sequence import Sequence, Submission
from server.stop_strings import StopStrings
from server.tokenizer import Tokenizer
from tests import tiny


@pytest.fixture(scope="module")
def tiny_backend() -> Backend:
    return tiny.tokenizer()


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Return where a search in the whole text cuts it: the oracle."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def fed(pieces: list[str], stops: tuple[str, ...]) -> tuple[list[str], bool]:
    """Return what a stream writes, piece by piece, and whether a stop string was met."""
    matcher = StopStrings(stops)
    written = []
    for piece in pieces:
        text, met = matcher.add(piece)
        written.append(text)
        if met:
            return written, True
    text, met = matcher.finish()
    return [*written, text], met


@pytest.mark.parametrize(
    ("pieces", "stops"),
    [
        (["one two three"], ("two",)),  # inside one token
        (["one t", "wo three"], ("two",)),  # across two
        (["one t", "w", "o three"], ("two",)),  # across three
        (["one two"], ("o",)),  # the first character
        (["line\n", "\nnext"], ("\n\n",)),
        (["abd abc"], ("abc", "abd", "abe", "ab!")),  # a shared prefix
        (["aab", "aac"], ("aaac", "aac")),  # a failed start inside the held text
        (["never"], ("two", "x")),
        (["ends in tw"], ("two",)),  # held back to the end, then given
        (["abcd"], ("abcd", "c")),  # the earlier one wins
        (["abc", "x"], ("abcd", "c")),  # it does not come: the later one counts
        (["abc"], ("abcd", "c")),  # the text ends while in doubt
        (["aaaa"], ("aa",)),
        (["日", "本語です"], ("語で",)),
        (["x\ufffdy"], ("\ufffd",)),
    ],
)
def test_the_text_is_cut_where_a_search_would(pieces: list[str], stops: tuple[str, ...]) -> None:
    written, met = fed(pieces, stops)
    assert ("".join(written), met) == cut("".join(pieces), stops)


def test_the_cut_does_not_depend_on_the_pieces() -> None:
    draw = random.Random(7)
    for _ in range(3000):
        text = "".join(draw.choices("ab", k=draw.randrange(1, 14)))
        stops = tuple(
            "".join(draw.choices("ab", k=draw.randrange(1, 6))) for _ in range(draw.randrange(1, 5))
        )
        marks = sorted(draw.sample(range(len(text) + 1), draw.randrange(0, min(4, len(text)))))
        pieces = [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]
        written, met = fed(pieces, stops)
        assert ("".join(written), met) == cut(text, stops), (pieces, stops)


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopStrings(("END OF TEXT", "ENDING"))
    assert matcher.add("so END") == ("so ", False)
    assert matcher.add(" OF") == ("", False)
    assert matcher.add(" LINK") == ("END OF LINK", False)


def test_a_character_costs_the_same_whatever_was_asked() -> None:
    """Sixteen stops of a thousand characters, and a text that nearly matches all the time."""
    stops = tuple("a" * 999 + chr(ord("b") + index) for index in range(16))
    matcher = StopStrings(stops)

    def cost_s() -> float:
        begin = time.thread_time()
        for _ in range(500):
            matcher.add("aaaa")
        return time.thread_time() - begin

    first = min(cost_s() for _ in range(3))
    for _ in range(10):
        cost_s()
    assert min(cost_s() for _ in range(3)) < 3 * first + 0.002


# ---- a choice: decoder and stop strings together, and what counts as delivered


def choice_of(backend: Backend, stops: tuple[str, ...] = (), min_tokens: int = 0) -> Choice:
    sampling = SamplingParams(min_tokens=min_tokens)
    submission = Submission(
        request_id="r", prompt=[1], max_tokens=100, sampling=sampling, received_at_ns=0
    )
    detokenizer = Tokenizer(backend).detokenizer()
    return Choice(0, Sequence(1, submission), detokenizer, stops=stops, silent=frozenset({2}))


def test_a_choice_is_the_same_however_its_deltas_merge(tiny_backend: Backend) -> None:
    ids = tiny_backend.encode("one two three four").ids
    seen = set()
    for size in (1, 2, 3, len(ids)):
        choice = choice_of(tiny_backend, ("three",))
        texts = []
        for begin in range(0, len(ids), size):
            texts.append(choice.add(Delta(1, ids[begin : begin + size]))[0])
            if choice.finish_reason:
                break
        seen.add(("".join(texts), choice.finish_reason, choice.output_tokens))
    assert len(seen) == 1
    assert next(iter(seen))[:2] == ("one two ", "stop")


def test_tokens_past_a_stop_string_were_not_delivered(tiny_backend: Backend) -> None:
    ids = [tiny_backend.token_to_id(char) for char in "xyZZab"]
    choice = choice_of(tiny_backend, ("ZZ",))
    assert choice.add(Delta(1, ids)) == ("xy", ids[:4], [])
    assert (choice.finish_reason, choice.output_tokens, choice.released_tokens) == ("stop", 4, 2)
    assert choice.delivered_tokens == 0
    choice.wrote(2, 0, 1)
    assert choice.delivered_tokens == 2


def test_a_token_shown_in_part_was_delivered(tiny_backend: Backend) -> None:
    backend = Backend(models.BPE({"xxab": 0, "cyy": 1}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    choice = choice_of(backend, ("bcy",))
    assert choice.add(Delta(1, [0, 1]))[0] == "xxa"
    assert (choice.finish_reason, choice.released_tokens) == ("stop", 1)


def test_a_stop_string_counts_only_after_min_tokens(tiny_backend: Backend) -> None:
    ids = [tiny_backend.token_to_id(char) for char in "aZbZc"]
    choice = choice_of(tiny_backend, ("Z",), min_tokens=3)
    assert choice.add(Delta(1, ids))[0] == "aZb"
    assert (choice.finish_reason, choice.output_tokens) == ("stop", 4)


def test_an_end_token_is_no_text_but_counts(tiny_backend: Backend) -> None:
    plain = tiny_backend.token_to_id("Z")
    choice = choice_of(tiny_backend)
    assert choice.add(Delta(1, [plain, 2], "stop")) == ("Z", [plain, 2], [])
    assert (choice.finish_reason, choice.output_tokens, choice.released_tokens) == ("stop", 2, 2)


def test_text_held_for_a_stop_string_comes_out_at_the_end(tiny_backend: Backend) -> None:
    ids = [tiny_backend.token_to_id(char) for char in "abZ"]
    choice = choice_of(tiny_backend, ("ZZ",))
    assert choice.add(Delta(1, ids))[0] == "ab"
    assert choice.add(Delta(1, [], "length"))[0] == "Z"
    assert (choice.finish_reason, choice.released_tokens) == ("length", 3)
