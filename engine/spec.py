"""What a model is, read from its metadata without torch: shape, limits, tokens that end a text.

Owns ModelSpec and its readers for a GGUF header and for a Hugging Face folder; used by the engine
(to build the model) and by the server (limits, tokenizer, chat template). Never reads weights and
never trusts a file: what is missing or absurd is a SpecError naming the file and the cause.
"""

from dataclasses import dataclass


class SpecError(Exception):
    """The model's files cannot be used: one line naming the file and the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a llama-type decoder and the facts of its vocabulary."""

    path: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    rope_base: float
    norm_eps: float
    tied_head: bool
    model_len: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    parameters: int
