"""Logits of a whole prompt, ours and transformers', for tests that compare the two.

Owns the shortest way from a model's path to logits: weights in plain PyTorch ops, no runner and no
sampler; one row in one step, or rows in steps as an engine computes them, chunks and decodes over a
paged cache. Used by the tests of model, families and weights.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from engine.model import Decoder
from engine.spec import read_spec
from engine.weights import load_weights
from kernels.base import AttentionBackend, AttentionBatch, DecoderWeights, StepBatch
from kernels.ops import TorchOps
from kernels.sdpa import SdpaBackend

PROMPT = [5, 310, 17, 17, 99, 200, 3, 41, 42, 43, 250, 7, 8, 300, 61]


def weights_of(path: Path, dtype: str = "f32", positions: int = 8) -> DecoderWeights:
    return load_weights(
        read_spec(str(path)),
        dtype=dtype,
        device="cpu",
        positions=positions,
        pack=TorchOps().pack,
        progress=lambda stage, fraction: None,
    )


def step_of(tokens: list[int]) -> StepBatch:
    """Return one row's whole prompt as a step that wants the logits of every token."""
    count = len(tokens)
    return StepBatch(
        input_ids=torch.tensor(tokens),
        positions=torch.arange(count),
        sample_tokens=torch.arange(count),
        attention=AttentionBatch(
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            context_lengths=torch.tensor([count], dtype=torch.int32),
            slot_mapping=torch.arange(16, 16 + count),
            block_tables=torch.arange(1, 1 + -(-count // 16), dtype=torch.int32)[None],
            query_lengths_host=[count],
            context_lengths_host=[count],
        ),
    )


@torch.inference_mode()
def logits_of(path: Path, tokens: list[int], dtype: str = "f32") -> torch.Tensor:
    """Return our logits of every token of a prompt."""
    weights, backend = weights_of(path, dtype, len(tokens)), SdpaBackend()
    torch_dtype = weights.embedding.dtype
    cache = backend.allocate_kv(weights.shape, 2 + len(tokens) // 16, 16, torch_dtype, "cpu")
    return Decoder(weights, backend, TorchOps()).forward(step_of(tokens), cache)


@torch.inference_mode()
def oracle_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Return transformers' logits of every token of a prompt."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@dataclass(frozen=True)
class Part:
    """So many next tokens of a row in one step."""

    row: int
    count: int


@torch.inference_mode()
def logits_in_steps(
    path: Path,
    rows: list[list[int]],
    steps: list[list[Part]],
    backend: AttentionBackend,
    dtype: str = "f32",
) -> list[torch.Tensor]:
    """Return the logits of every token of every row, computed in these steps over a paged cache.

    Blocks of 16 tokens are dealt to the rows in turn, so that none lies in order.
    """
    weights = weights_of(path, dtype, max(map(len, rows)))
    cache = backend.allocate_kv(weights.shape, 400, 16, weights.embedding.dtype, "cpu")
    decoder = Decoder(weights, backend, TorchOps())
    width = -(-max(map(len, rows)) // 16)
    tables = [[1 + place * len(rows) + row for place in range(width)] for row in range(len(rows))]
    computed = [0] * len(rows)
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    for parts in steps:
        spans = [(part.row, computed[part.row], computed[part.row] + part.count) for part in parts]
        logits = decoder.forward(_packed_step(rows, tables, spans), cache)
        counts = [part.count for part in parts]
        for part, one in zip(parts, logits.split(counts), strict=True):
            found[part.row].append(one)
            computed[part.row] += part.count
    assert computed == [len(row) for row in rows], "the steps do not compute every token"
    return [torch.cat(one) for one in found]


def _packed_step(
    rows: list[list[int]], tables: list[list[int]], spans: list[tuple[int, int, int]]
) -> StepBatch:
    places = [(row, place) for row, start, stop in spans for place in range(start, stop)]
    counts = [stop - start for _, start, stop in spans]
    ends = [stop for _, _, stop in spans]
    width = -(-max(ends) // 16)
    return StepBatch(
        input_ids=torch.tensor([rows[row][place] for row, place in places]),
        positions=torch.tensor([place for _, place in places]),
        sample_tokens=torch.arange(len(places)),
        attention=AttentionBatch(
            query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
            context_lengths=torch.tensor(ends).int(),
            slot_mapping=torch.tensor(
                [tables[row][place // 16] * 16 + place % 16 for row, place in places]
            ),
            block_tables=torch.tensor([tables[row][:width] for row, _, _ in spans]).int(),
            query_lengths_host=counts,
            context_lengths_host=ends,
        ),
    )
