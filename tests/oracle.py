"""Logits of a whole prompt, ours and transformers', for tests that compare the two.

Owns the shortest way from a model's path to logits: weights in plain PyTorch ops, one row, one
step, no runner and no sampler. Used by the tests of model and weights.
"""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from engine.model import Decoder
from engine.spec import read_spec
from engine.weights import load_weights
from kernels.base import AttentionBatch, DecoderWeights, StepBatch
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
