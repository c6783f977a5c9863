"""The kernel seam: what every attention backend and every set of fused ops must offer.

Owns the protocols, the packed description of a step, the weights as kernels see them, and the
refusal type. engine/model.py calls through this and nothing else; a backend alone knows its
cache's layout, a set of ops alone its packed weights. Knows no engine, no scheduler: sequences
are rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from kernels.choose import Chooser

Cache = object
"""Keys and values of all layers, laid out as its backend likes; nobody else looks inside."""

Prepared = object
"""What a backend worked out from a step's batch, once for all layers."""

Beat = Callable[[], None]

Activation = Literal["silu", "gelu_tanh"]
"""What the gate of a feed-forward goes through."""

PackedWeight = object
"""A weight matrix as its set of ops likes it; nobody else looks inside."""

TYPE_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "uint4": "int4"}


def type_name(dtype: torch.dtype) -> str:
    """Return what `--dtype` calls a type, PyTorch's word where it has none."""
    name = str(dtype).removeprefix("torch.")
    return TYPE_NAMES.get(name, name)


class BackendError(Exception):
    """A backend asked for by name cannot serve: one line that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of a model, as attention sees them.

    A token of a layer with a window sees that many tokens, itself included; `windows` is empty
    where no layer has one, and 0 stands for none. Scores are multiplied by `scale`, by default
    1 / sqrt(head_dim), then held within a cap by cap x tanh(score / cap). `beyond` names, for a
    backend that runs whole layers, what this model computes that a llama does not.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = ()
    scale: float | None = None
    cap: float | None = None
    beyond: tuple[str, ...] = ()

    def window(self, layer: int) -> int:
        """Return how many tokens a token of this layer sees, 0 for all before it."""
        return self.windows[layer] if self.windows else 0


def beyond_a_llama(shape: AttentionShape) -> tuple[str, ...]:
    """Return, in words, all that a model of this shape computes and a llama does not."""
    more: list[str] = []
    if any(shape.windows):
        more.append(f"a window of {max(shape.windows)} tokens")
    if shape.scale is not None:
        more.append(f"scores scaled by {shape.scale:g}")
    if shape.cap is not None:
        more.append("a cap on scores")
    return (*more, *shape.beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """A step's rows packed one after another; T tokens, R rows. Device tensors are int32/int64.

    Row r owns tokens query_starts[r]..query_starts[r+1] of the pack; they are the last ones of its
    context_lengths[r] tokens (causal, bottom-right aligned). slot_mapping[t] = block x block_tokens
    + offset is where token t's key and value go. Rows of padding point to block 0. The host lists
    say the same without a device read.
    """

    query_starts: torch.Tensor  # [R + 1] int32
    context_lengths: torch.Tensor  # [R] int32
    slot_mapping: torch.Tensor  # [T] int64
    block_tables: torch.Tensor  # [R, blocks of the longest row] int32, padded with block 0
    query_lengths_host: list[int]
    context_lengths_host: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step as the model sees it: T tokens in a pack, S of them wanted as logits."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    sample_tokens: torch.Tensor  # [S] int64, indices into the pack, ascending
    attention: AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. qkv and gate_up are fused by rows, in the order of their names.

    What a llama has not is None where a model has it not either. Query and key norms are over each
    head, before rope; out norms are over what attention and feed-forward add to the residual.
    """

    input_norm: torch.Tensor  # [hidden]
    qkv: PackedWeight  # [(heads + 2 x kv_heads) x head_dim, hidden]
    output: PackedWeight  # [hidden, heads x head_dim]
    post_norm: torch.Tensor  # [hidden]
    gate_up: PackedWeight  # [2 x intermediate, hidden]
    down: PackedWeight  # [hidden, intermediate]
    qkv_bias: torch.Tensor | None = None  # [(heads + 2 x kv_heads) x head_dim]
    output_bias: torch.Tensor | None = None  # [hidden]
    query_norm: torch.Tensor | None = None  # [head_dim]
    key_norm: torch.Tensor | None = None  # [head_dim]
    attention_out_norm: torch.Tensor | None = None  # [hidden]
    feed_out_norm: torch.Tensor | None = None  # [hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A llama-type decoder. Query and key rows are ordered so that rope's pairs are adjacent.

    Layers with a window turn by local_rotations where there are such. Embeddings are multiplied by
    embedding_scale, logits are held within logits_cap as scores within their cap.
    """

    shape: AttentionShape
    norm_eps: float
    embedding: torch.Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    head: PackedWeight  # [vocabulary, hidden]
    rotations: torch.Tensor  # [positions, head_dim / 2, 2] float32: cosine, sine
    local_rotations: torch.Tensor | None = None  # the same shape
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    logits_cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """The norms that a model puts on each head of queries and keys before rope."""

    query: torch.Tensor  # [head_dim]
    key: torch.Tensor  # [head_dim]
    eps: float


class Ops(Chooser, Protocol):
    """Everything of a decoder but attention. Any op may reuse its inputs' memory, weights not."""

    name: str

    def supports(self, device: str, dtype: torch.dtype) -> str | None:
        """Return None, or one line that says why these ops cannot serve."""
        ...

    def pack(self, weight: torch.Tensor, *, whole_rows: bool = False) -> PackedWeight:
        """Return a weight [out, in] in the form that `linear` reads.

        `whole_rows` says that a step of the backend's own has its inputs row by row, not in parts.
        """
        ...

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Return x [T, in] times the transposed weight: [T, out]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x [..., size] over its root mean square, times weight [size]; float32 or x's."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and x + residual."""
        ...

    def rope(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Return x [T, heads, head_dim] with pair i of a head turned by rotations [T, i]."""
        ...

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) x up [T, intermediate] of gate_up [T, 2 x intermediate]."""
        ...

    def gelu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the same with gelu, by its tanh approximation, in place of silu."""
        ...


@runtime_checkable
class KeptOps(Protocol):
    """The optional hook of ops whose packed weights are tensors, which can be kept on disk."""

    layout: str
    """What is different where they lie otherwise."""

    def tensors(self, weight: PackedWeight) -> dict[str, torch.Tensor]:
        """Return what a packed weight consists of, by name."""
        ...

    def weight(self, tensors: dict[str, torch.Tensor]) -> PackedWeight:
        """Return the packed weight that consists of these."""
        ...


class AttentionBackend(Protocol):
    """Paged attention over blocks of block_tokens tokens; block 0 is never a sequence's."""

    name: str

    def supports(
        self, shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
    ) -> str | None:
        """Return None, or one line that says why this backend cannot serve."""
        ...

    def allocate_kv(
        self,
        shape: AttentionShape,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: str,
    ) -> Cache:
        """Return a zeroed cache of `blocks` blocks, block 0 included; dtype is that of its numbers.

        int8 is for an Int8CacheBackend that does not refuse it.
        """
        ...

    def clear_blocks(self, cache: Cache, blocks: list[int]) -> None:
        """Zero these blocks, whose values are not finite: a next owner must not meet them.

        A backend that reads whole blocks multiplies what it masks by 0, and 0 x NaN is NaN.
        """
        ...

    def prepare(self, batch: AttentionBatch, cache: Cache) -> Prepared:
        """Work out, once a step, what `attend` needs in every layer (masks, indices)."""
        ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: Cache,
        prepared: Prepared,
    ) -> torch.Tensor:
        """Write k, v into the cache, then attend with q.

        q is [T, heads, head_dim], k and v [T, kv_heads, head_dim]; returns q's shape.
        """
        ...


@runtime_checkable
class StepBackend(Protocol):
    """The optional hook of a backend that runs a whole step itself, all layers and the head."""

    def serves(self, weights: DecoderWeights) -> bool:
        """Return whether it can run a model whose weights are packed like this."""
        ...

    def step(
        self, weights: DecoderWeights, batch: StepBatch, cache: Cache, beat: Beat
    ) -> torch.Tensor:
        """Return the logits [S, vocabulary] of the tokens in batch.sample_tokens.

        beat is called now and then in a step that takes long: one that goes on is no hang.
        """
        ...

    def logits_of(self, weights: DecoderWeights, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [S, vocabulary] of other tokens of the step that ran last."""
        ...


@runtime_checkable
class Int8CacheBackend(Protocol):
    """The optional hook of a backend that can keep keys and values in int8."""

    def refuses_int8(
        self, shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
    ) -> str | None:
        """Return None, or one line that says why it cannot do so for what it serves."""
        ...


def int8_refusal(
    backend: AttentionBackend,
    shape: AttentionShape,
    device: str,
    dtype: torch.dtype,
    block_tokens: int,
) -> str | None:
    """Return why a backend cannot keep keys and values in int8, None if it can."""
    if not isinstance(backend, Int8CacheBackend):
        return "keeps no keys and values in int8 (--kv-cache-dtype)"
    return backend.refuses_int8(shape, device, dtype, block_tokens)


@runtime_checkable
class FusedBackend(Protocol):
    """The optional hook of a backend that turns and stores a projection's heads as it attends."""

    def attend_qkv(
        self,
        layer: int,
        qkv: torch.Tensor,
        turns: torch.Tensor,
        norms: HeadNorms | None,
        cache: Cache,
        prepared: Prepared,
    ) -> torch.Tensor:
        """Return the attention [T, heads, head_dim] of qkv [T, heads + 2 kv_heads, head_dim].

        Queries and keys are normed, then turned by turns [T, head_dim / 2, 2]; keys and values are
        written into the cache.
        """
        ...


@runtime_checkable
class GraphBackend(Protocol):
    """The optional hook of a backend whose steps of decodes may be captured and replayed.

    A replay repeats what was launched, with the same numbers; what lies in the step's tensors may
    change. So prepare and attend take nothing of the host's lists but what launch_key tells, copy
    nothing from pageable memory and wait for nothing.
    """

    def launch_key(self, batch: AttentionBatch, cache: Cache) -> tuple[int, ...]:
        """Return every integer of the host that the work on this batch takes.

        Batches of one key, in the same memory, differ in what the device's tensors hold alone.
        """
        ...
