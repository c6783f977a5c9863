"""Tokenizers from the lists in a GGUF's header: byte-level BPE, and SentencePiece's BPE by scores.

Owns how those lists become a tokenizers.Tokenizer, and which of llama.cpp's names for splitting
text are known; server/tokenizer.py calls it. Believes no list: what does not fit is a SpecError, or
an error of the library that its caller turns into one.
"""

import math

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from engine.model_files import brief
from engine.spec import SpecError, TokenizerMetadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Kinds of token in tokenizer.ggml.token_type; those from 2 to 4 are matched whole."""

BLANK = "\u2581"
"""How SentencePiece writes a blank."""

PIECE_CHARS_MAX = 128
"""Pieces above this are reached by no merge; no vocabulary has one that is text."""

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2_NAMES = frozenset({"gpt-2", "gpt2", "phi-2"})
DIGIT_NAMES = frozenset({"smollm", "starcoder", "refact", "command-r"})
LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})
QWEN2_NAMES = frozenset({"qwen2", "deepseek-r1-qwen"})


def tokenizer_of_gguf(metadata: TokenizerMetadata) -> Backend:
    """Return the tokenizer that the lists describe."""
    if metadata.model == "gpt2":
        backend = _byte_level(metadata)
    elif metadata.model == "llama":
        backend = _sentencepiece(metadata)
    else:
        raise SpecError(
            f"tokenizer.ggml.model is {metadata.model!r}; supported are byte-level BPE (gpt2) "
            "and SentencePiece BPE (llama)"
        )
    whole = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(metadata.tokens, metadata.token_types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in whole if token.special])
    backend.add_tokens([token for token in whole if not token.special])
    if metadata.add_bos and metadata.bos_token is not None:
        bos = metadata.bos_token
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            special_tokens=[(bos, metadata.tokens.index(bos))],
        )
    return backend


# ---- byte-level BPE


def _byte_level(metadata: TokenizerMetadata) -> Backend:
    merges = [tuple(merge.split(" ")) for merge in metadata.merges]
    try:
        model = models.BPE(
            vocab={token: id for id, token in enumerate(metadata.tokens)},
            merges=[(left, right) for left, right in merges],
            ignore_merges=metadata.pre in LLAMA3_NAMES,
        )
    except Exception as error:  # the library raises nothing more precise
        raise SpecError(f"tokenizer.ggml.merges cannot be used: {brief(error)}") from error
    backend = Backend(model)
    if metadata.pre in QWEN2_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(metadata.pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Return how a GGUF's `tokenizer.ggml.pre` splits text before merging (llama.cpp's names)."""
    if name in GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in DIGIT_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([digits, byte_level])
    if name in LLAMA3_NAMES | QWEN2_NAMES:
        pattern = Regex(LLAMA3_WORDS if name in LLAMA3_NAMES else QWEN2_WORDS)
        words = pre_tokenizers.Split(pattern, behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, byte_level])
    known = ", ".join(sorted(GPT2_NAMES | DIGIT_NAMES | LLAMA3_NAMES | QWEN2_NAMES))
    raise SpecError(f"tokenizer.ggml.pre is {name!r}; supported are {known}")


# ---- SentencePiece


def _sentencepiece(metadata: TokenizerMetadata) -> Backend:
    """Return BPE whose merges go by the score of what they make, with bytes for what is unknown."""
    if len(metadata.scores) != len(metadata.tokens):
        raise SpecError(
            f"tokenizer.ggml.scores has {len(metadata.scores)} values for "
            f"{len(metadata.tokens)} tokens"
        )
    backend = Backend(
        models.BPE(
            vocab={token: id for id, token in enumerate(metadata.tokens)},
            merges=merges_by_score(metadata),
            unk_token=metadata.unknown_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    blanks = normalizers.Replace(" ", BLANK)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(BLANK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if metadata.add_space_prefix else []),
        ]
    )
    if metadata.add_space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), blanks])
    else:
        backend.normalizer = blanks
    return backend


def merges_by_score(metadata: TokenizerMetadata) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a piece, the best score of what it makes first."""
    pieces = {
        token: score
        for token, score, kind in zip(
            metadata.tokens, metadata.scores, metadata.token_types, strict=True
        )
        if kind in (NORMAL, USER_DEFINED)
    }
    if not all(map(math.isfinite, pieces.values())):
        raise SpecError("tokenizer.ggml.scores holds values that are not finite")
    found: list[tuple[float, str, str]] = []
    for piece, score in pieces.items():
        if len(piece) <= PIECE_CHARS_MAX:
            for place in range(1, len(piece)):
                left, right = piece[:place], piece[place:]
                if left in pieces and right in pieces:
                    found.append((-score, left, right))
    found.sort(key=lambda one: one[0])
    return [(left, right) for _, left, right in found]
