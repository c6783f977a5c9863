"""Text in and out of tokens: encoding, incremental decoding and stop strings.

The tokenizers are real ones: the tiny model's, the demo model's, and a small one whose decoder is
not byte-level. The oracle is the library's own decoding of all ids at once.
"""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from engine.spec import SpecError, TokenizerMetadata, read_tokenizer_metadata
from server.detokenizer import HELD_TOKENS_MAX, REPLACEMENT, Detokenizer
from server.tokenizer import LONG_CHARS, Tokenizer, build_tokenizer, byte_of_char
from tests import tiny

HOSTILE = (
    "for LLMs. It is",
    "a    b",
    "\n\n  x",
    "   leading",
    "\ttabs\t\tand\r\nreturns\r",
    "def f(x):\n        return x  # eight spaces\n",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🇩🇪 letters, 👍🏽 tone",
    "ภาษาไทยไม่มีช่องว่าง",
    "日本語のテキスト、句読点。",
    "العربية من اليمين \u202eإلى\u202c اليسار",
    "Z̷̡͎̪̓a̵̙̅l̴̰͝g̸̬͗o̷͕̍",
    "\u0000\u0001\u001b[31mred\u001b[0m\u007f",
    "\ufeffBOM, \u200bzero width, \u2028line\u2029paragraph, \u00a0hard",
    "\ufffd a replacement character that was really there \ufffd",
    "'; DROP TABLE requests; -- <script>alert(1)</script> ${7*7} {{7*7}} %s %n",
    "<|im_end|> special looking <|endoftext|> text",
    "ÅÅ ﬁ ﷽ 𝕳𝖊𝖑𝖑𝖔 𐍈 \U0010ffff",  # noqa: RUF001
    "",
)


@pytest.fixture(scope="module")
def tiny_backend() -> Backend:
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def demo_metadata(demo_model: Path) -> TokenizerMetadata:
    return read_tokenizer_metadata(str(demo_model))


@pytest.fixture(scope="module")
def demo(demo_metadata: TokenizerMetadata) -> Tokenizer:
    return build_tokenizer(demo_metadata)


def sentencepiece_like() -> Backend:
    """Return a tokenizer with a decoder that looks at neighbours: blanks, bytes, first word."""
    pieces = ["<unk>", "<s>", "</s>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁the", "▁scheduler", "the", "a", "b", ".", "é", "日", "▁▁", "▁a"]
    backend = Backend(models.BPE({piece: id for id, piece in enumerate(pieces)}, []))
    backend.add_special_tokens([AddedToken(text, special=True) for text in pieces[:3]])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def streamed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """Return the pieces a stream would carry, the flush at the end included."""
    return [detokenizer.add(id) for id in ids] + [detokenizer.finish()]


def random_sequences(vocab_size: int, count: int, length: int) -> Iterator[list[int]]:
    draw = random.Random(20261129)
    for _ in range(count):
        yield [draw.randrange(vocab_size) for _ in range(length)]


# ---- decoding


@pytest.mark.parametrize("text", HOSTILE)
def test_pieces_joined_equal_the_text(tiny_backend: Backend, text: str) -> None:
    ids = tiny_backend.encode(text, add_special_tokens=False).ids
    pieces = streamed(Tokenizer(tiny_backend).detokenizer(), ids)
    assert "".join(pieces) == tiny_backend.decode(ids, skip_special_tokens=True)
    if "<|" not in text:
        assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_comes_whole_or_not_at_all(tiny_backend: Backend) -> None:
    family = "👩‍👩‍👧‍👦"
    char_of = {byte: char for char, byte in byte_of_char().items()}
    ids = [tiny_backend.token_to_id(char_of[byte]) for byte in family.encode()]
    pieces = streamed(Tokenizer(tiny_backend).detokenizer(), ids)
    assert [piece for piece in pieces if piece] == list(family)


def test_every_token_alone_decodes_as_the_library_does(tiny_backend: Backend) -> None:
    tokenizer = Tokenizer(tiny_backend)
    for id in range(tiny.Shape.vocab_size + 10):
        want = tiny_backend.decode([id], skip_special_tokens=True)
        assert "".join(streamed(tokenizer.detokenizer(), [id])) == want


def test_two_thousand_random_sequences_never_raise(demo: Tokenizer, demo_metadata: object) -> None:
    """Specials, half characters and ids beyond the vocabulary included."""
    assert isinstance(demo_metadata, TokenizerMetadata)
    oracle = build_tokenizer(demo_metadata)._backend
    for ids in random_sequences(len(demo_metadata.tokens) + 100, 2000, 64):
        pieces = streamed(demo.detokenizer(), ids)
        assert "".join(pieces) == oracle.decode(ids, skip_special_tokens=True)


def test_random_bytes_become_the_same_replacements(tiny_backend: Backend) -> None:
    """Ids 3 to 258 are the bare bytes: nearly every sequence of them is invalid UTF-8."""
    tokenizer = Tokenizer(tiny_backend)
    for ids in random_sequences(259, 2000, 24):
        want = tiny_backend.decode(ids, skip_special_tokens=True)
        assert "".join(streamed(tokenizer.detokenizer(), ids)) == want


def test_an_unfinished_character_shows_only_at_the_end(tiny_backend: Backend) -> None:
    half = tiny_backend.encode("🙂").ids[:-1]
    detokenizer = Tokenizer(tiny_backend).detokenizer()
    assert "".join(map(detokenizer.add, half)) == ""
    assert detokenizer.finish() == REPLACEMENT


@pytest.mark.parametrize(
    "pieces",
    [
        ["▁the", "▁scheduler", "."],
        ["▁", "▁the", "▁▁", "a"],
        ["<s>", "▁the", "</s>", "▁scheduler"],
        ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "▁a"],
        ["▁a", "<0xE6>", "<0x97>", "<0xA5>", "<0xE6>", "<0x97>", "<0xA5>", "b"],
        ["<0xC3>", "a"],
        ["</s>", "▁the", "<unk>"],
    ],
)
def test_other_decoders_join_to_the_whole(pieces: list[str]) -> None:
    backend = sentencepiece_like()
    ids = [backend.token_to_id(piece) for piece in pieces]
    joined = "".join(streamed(Tokenizer(backend).detokenizer(), ids))
    assert joined == backend.decode(ids, skip_special_tokens=True)


def test_other_decoders_never_raise_and_never_hold_much() -> None:
    backend = sentencepiece_like()
    tokenizer = Tokenizer(backend)
    for ids in random_sequences(backend.get_vocab_size() + 5, 300, 64):
        detokenizer = tokenizer.detokenizer()
        for id in ids:
            detokenizer.add(id)
        assert len(vars(detokenizer)["_window"]) <= 3 * HELD_TOKENS_MAX


@pytest.mark.parametrize(
    "backend", [tiny.tokenizer(), sentencepiece_like()], ids=["bytes", "window"]
)
def test_a_token_costs_the_same_late_in_a_text(backend: Backend) -> None:
    """No blanks and no sentence ends: what makes naive decoders go back to the start."""
    detokenizer = Tokenizer(backend).detokenizer()
    token = backend.token_to_id("a")

    def cost_s() -> float:
        begin = time.thread_time()
        for _ in range(2000):
            detokenizer.add(token)
        return time.thread_time() - begin

    first = min(cost_s() for _ in range(3))
    for _ in range(20):
        cost_s()
    late = min(cost_s() for _ in range(3))
    assert late < 3 * first + 0.002


# ---- encoding


def test_ids_of_a_gguf_equal_those_of_its_folder(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "folder")
    file = tiny.write_gguf(tmp_path / "tiny.gguf")
    by_folder = build_tokenizer(read_tokenizer_metadata(str(folder)))
    by_file = build_tokenizer(read_tokenizer_metadata(str(file)))
    for text in HOSTILE:
        want = asyncio.run(by_folder.encode(text, add_special=True))
        assert asyncio.run(by_file.encode(text, add_special=True)) == want


def test_digits_stand_alone_in_the_demo_model(demo: Tokenizer) -> None:
    ids = asyncio.run(demo.encode("Hello 123 world<|im_end|>", add_special=True))
    assert ids == [19556, 216, 33, 34, 35, 905, 2]


def test_an_unknown_pre_tokenizer_is_refused_by_name(demo_metadata: TokenizerMetadata) -> None:
    fields = {name: getattr(demo_metadata, name) for name in demo_metadata.__slots__}
    with pytest.raises(SpecError, match=r"tokenizer\.ggml\.pre is 'chatglm-bpe'; supported are"):
        build_tokenizer(TokenizerMetadata(**(fields | {"pre": "chatglm-bpe"})))
    with pytest.raises(SpecError, match=r"tokenizer\.ggml\.model is 't5'"):
        build_tokenizer(TokenizerMetadata(**(fields | {"model": "t5"})))


def test_bos_is_added_when_the_gguf_says_so(demo_metadata: TokenizerMetadata) -> None:
    fields = {name: getattr(demo_metadata, name) for name in demo_metadata.__slots__}
    tokenizer = build_tokenizer(TokenizerMetadata(**(fields | {"add_bos": True})))
    plain = asyncio.run(tokenizer.encode("hi", add_special=False))
    assert asyncio.run(tokenizer.encode("hi", add_special=True)) == [1, *plain]
    assert asyncio.run(tokenizer.encode("", add_special=True)) == [1]


def test_a_broken_tokenizer_file_is_one_line(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "broken")
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(SpecError, match=r"tokenizer\.json: cannot be used"):
        build_tokenizer(read_tokenizer_metadata(str(folder)))


@pytest.mark.parametrize("text", [*HOSTILE, "word " * 500, "a" * 4000])
def test_the_floor_never_exceeds_the_count(demo: Tokenizer, text: str) -> None:
    assert demo.tokens_floor(text) <= len(asyncio.run(demo.encode(text, add_special=False)))


def test_a_text_that_cannot_fit_is_known_by_its_bytes(demo: Tokenizer) -> None:
    begin = time.thread_time()
    assert demo.tokens_floor("word " * 1_000_000) > 8192
    assert time.thread_time() - begin < 0.1


def test_a_long_text_leaves_the_event_loop_free(demo: Tokenizer) -> None:
    text = "word and word " * 20_000
    assert len(text) > LONG_CHARS

    async def turns_while_encoding() -> tuple[int, list[int]]:
        work = asyncio.create_task(demo.encode(text, add_special=False))
        turns = 0
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        return turns, await work

    turns, ids = asyncio.run(turns_while_encoding())
    assert turns > 100
    assert len(ids) == 60_001
    assert "tokenizer" in {thread.name.partition("_")[0] for thread in threading.enumerate()}
