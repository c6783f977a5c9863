"""What is asked: token ids with exact counts, shared beginnings, or real texts.

Owns the making of prompts from seeds and the real ones that lie in bench/data; bench/lab/make.py
calls it. Ids of one salt never repeat those of another by more than chance, so that no prefix cache
helps unless a beginning is shared on purpose. Must never read a model.
"""

import gzip
import json
import random
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

TEXTS = Path(__file__).parents[1] / "data" / "quality.jsonl.gz"
FIRST_ID = 300
IDS_BELOW = 32_000
"""Ids that the tokenizers of common models all have and that are plain text there."""


def ids(count: int, salt: str, below: int = IDS_BELOW) -> list[int]:
    """Return so many random token ids."""
    pick = random.Random(salt)
    first = min(FIRST_ID, below // 2)
    return [first + int(pick.random() * (below - first)) for _ in range(count)]


def shared(blocks: Iterable[object], block_tokens: int, count: int, below: int) -> list[int]:
    """Return `count` ids of blocks: those of the same name begin with the same ids everywhere."""
    found: list[int] = []
    for block in blocks:
        if len(found) >= count:
            break
        found += ids(block_tokens, f"block-{block}", below)
    short = count - len(found)
    return (
        found + ids(short, f"end-{len(found)}-{found[-4:]}", below) if short > 0 else found[:count]
    )


@lru_cache(maxsize=8)
def texts(source: str) -> tuple[str, ...]:
    """Return the real prompts of gsm8k, mt_bench, vicuna_bench or humaneval; empty if unknown."""
    with gzip.open(TEXTS, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    found = [str(line["text"]) for line in lines if line["source"] == source]
    # Questions alone: an answer that stands in the prompt is none to ask for.
    return tuple(text.split("\n")[0] if source == "gsm8k" else text for text in found)
