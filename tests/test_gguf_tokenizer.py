"""Tokenizers from a GGUF's lists, against their authors' words and against merging by hand.

Owns the tests of server/gguf_tokenizer.py: SentencePiece's merges by score, its bytes and blanks,
and how Qwen's text is split. What the lists must not say is refused by name.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from engine.spec import SpecError, TokenizerMetadata, read_tokenizer_metadata
from server.tokenizer import Tokenizer, build_tokenizer
from tests import families, tiny
from tests.families import SPM_BLANK as BLANK
from tests.families import SPM_TOKENS, SPM_TYPES
from tests.test_text import HOSTILE

METADATA: dict[str, Any] = {
    "kind": "gguf",
    "model": "llama",
    "tokens": SPM_TOKENS,
    "merges": (),
    "token_types": SPM_TYPES,
    "scores": tuple(-float(place) for place in range(len(SPM_TOKENS))),
    "pre": "default",
    "chat_template": None,
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "add_bos": True,
    "folder": None,
    "unknown_token": "<unk>",
    "add_space_prefix": False,
}


def tokenizer(**values: Any) -> Tokenizer:
    return build_tokenizer(TokenizerMetadata(**METADATA | values))


def ids_of(made: Tokenizer, text: str, *, add_special: bool = False) -> list[int]:
    return asyncio.run(made.encode(text, add_special=add_special))


def by_hand(text: str, scores: dict[str, float]) -> list[int]:
    """Merge the neighbours that make the piece of the best score, until none do (llama.cpp)."""
    parts = list(text.replace(" ", BLANK))
    while True:
        made = [
            (-scores[parts[place] + parts[place + 1]], place)
            for place in range(len(parts) - 1)
            if parts[place] + parts[place + 1] in scores
        ]
        if not made:
            break
        _, place = min(made)
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    ids = {token: id for id, token in enumerate(SPM_TOKENS)}
    found: list[int] = []
    for part in parts:
        spelled = [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
        found += [ids[one] for one in spelled]
    return found


def test_pieces_merge_by_their_scores() -> None:
    made = tokenizer()
    pieces = zip(SPM_TOKENS, METADATA["scores"], SPM_TYPES, strict=True)
    scores = {token: score for token, score, kind in pieces if kind == 1}
    draw = random.Random(0)
    letters = [*sorted({char for token in scores for char in token} - {BLANK}), " ", "é", "🙂"]
    texts = ["".join(draw.choices(letters, k=draw.randrange(1, 40))) for _ in range(300)]
    merged = 0
    for text in [*texts, *tiny.CORPUS, *HOSTILE]:
        if "<" in text:
            continue
        ids = ids_of(made, text)
        assert ids == by_hand(text, scores), text
        merged += len(text.encode()) - len(ids)
    assert merged > 300


@pytest.mark.parametrize("prefixed", [False, True])
def test_text_comes_back_whole(prefixed: bool) -> None:
    made = tokenizer(add_space_prefix=prefixed)
    for text in HOSTILE:
        ids = ids_of(made, text)
        detokenizer = made.detokenizer()
        pieces = [detokenizer.add(id) for id in ids]
        joined = "".join(pieces) + detokenizer.finish()
        shown = text.replace(BLANK, " ")
        assert joined == shown, text


def test_a_beginning_and_control_tokens_are_the_models() -> None:
    made = tokenizer()
    assert ids_of(made, "a", add_special=True)[0] == SPM_TOKENS.index("<bos>")
    assert ids_of(tokenizer(add_bos=False), "a", add_special=True) == ids_of(made, "a")
    assert SPM_TOKENS.index("<eos>") in ids_of(made, "a<eos>b")


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported are byte-level BPE"),
        ({"scores": ()}, "tokenizer.ggml.scores has 0 values for"),
        ({"scores": (float("nan"),) * len(SPM_TOKENS)}, "scores holds values that are not finite"),
        ({"token_types": (1,)}, "the lists under tokenizer.ggml do not fit together"),
    ],
)
def test_lists_that_make_no_tokenizer_are_refused(values: dict[str, Any], cause: str) -> None:
    with pytest.raises(SpecError) as caught:
        tokenizer(**values)
    assert cause in str(caught.value)


def test_one_endless_piece_costs_nothing() -> None:
    tokens = (*SPM_TOKENS[:-1], "a" * 10_000_000)
    assert ids_of(tokenizer(tokens=tokens), "aaa")


def test_a_gemma_files_lists_are_read(tmp_path: Path) -> None:
    file = families.write_gguf(tmp_path / "gemma.gguf", families.oracle("gemma3"))
    found = read_tokenizer_metadata(str(file))
    assert (found.model, found.unknown_token, found.add_space_prefix) == ("llama", "<unk>", False)
    text = "The scheduler decides again"
    assert ids_of(build_tokenizer(found), text) == ids_of(tokenizer(), text)


def test_qwens_text_is_split_as_its_authors_do() -> None:
    backend = tiny.tokenizer()
    vocab = backend.get_vocab()
    tokens = tuple(sorted(vocab, key=vocab.__getitem__))
    merges = tiny.merges()
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges)
    ours = tokenizer(
        model="gpt2",
        tokens=tokens,
        token_types=tuple(3 if token in tiny.SPECIALS else 1 for token in tokens),
        merges=tuple(" ".join(pair) for pair in merges),
        pre="qwen2",
        add_bos=False,
    )
    for text in (*HOSTILE, "It's 12345 o'clock,WE'LL see", "Å ﬁ e\u0301"):
        if "<|" not in text:
            assert ids_of(ours, text) == theirs.encode(text, add_special_tokens=False), text
