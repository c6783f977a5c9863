"""From a model's files to the decoder's weights: complete, well shaped and finite, or an error.

Owns dequantization (through the gguf package) and the fusing of matrices; which tensors there must
be is tensors.py's, the rope table rotation.py's. engine/runner.py calls it once at start. Never
leaves a weight uninitialised and never takes one that is not finite.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from engine.model_files import read_gguf
from engine.rope import Rope
from engine.rotation import rotations
from engine.spec import ModelSpec, SpecError
from engine.tensors import check_shapes, folder_headers
from kernels.base import AttentionShape, DecoderWeights, LayerWeights, PackedWeight
from kernels.native_ops import INT4

Progress = Callable[[str, float], None]


class Pack(Protocol):
    """A set of ops' way to pack a weight [out, in]."""

    def __call__(self, weight: torch.Tensor, *, whole_rows: bool = False) -> PackedWeight:
        """Return the packed weight; whole_rows as kernels/base.py's Ops have it."""
        ...


TORCH_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "int4": INT4,
}
ACTIVATIONS = {torch.int8: torch.bfloat16, INT4: torch.bfloat16}
"""Types of the embedding and the norms where they are not the weights' own."""
STAGE = "loading weights"


class TensorSource(Protocol):
    """A model's tensors by their names in its files."""

    shapes: dict[str, tuple[int, ...]]

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor in float32 or as it is stored."""
        ...


class GgufSource:
    """Tensors of a GGUF file, dequantized to float32."""

    def __init__(self, path: Path) -> None:
        header = read_gguf(path)
        self._tensors = header.tensors
        self._data = np.asarray(np.memmap(path, mode="r"))
        self.shapes = {name: item.shape for name, item in header.tensors.items()}

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor in float32."""
        item = self._tensors[name]
        raw = self._data[item.offset : item.offset + item.size]
        rows = raw.reshape(*item.shape[:-1], -1)
        with np.errstate(all="ignore"):
            values = gguf.dequantize(rows, gguf.GGMLQuantizationType(item.kind))
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]).reshape(item.shape))


class SafetensorsSource:
    """Tensors of one safetensors file, or of the shards that an index names."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, Any] = {}
        for file, found in folder_headers(folder).items():
            handle = _open_safetensors(file, stack)
            self.shapes |= found
            self._handles |= dict.fromkeys(found, handle)

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored."""
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor


def _open_safetensors(file: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="pt", device="cpu"))
    except SafetensorError as error:
        raise SpecError(f"{file}: cut short or damaged: {error}") from error
    except OSError as error:
        raise SpecError(f"{file}: cannot be read: {error.strerror or error}") from error


@contextmanager
def open_source(path: str) -> Iterator[TensorSource]:
    """Open the tensors of a GGUF file or a Hugging Face folder for the time of a with block."""
    place = Path(path)
    with ExitStack() as stack:
        yield SafetensorsSource(place, stack) if place.is_dir() else GgufSource(place)


class _Loader:
    """Loads tensors one by one: checked and converted."""

    def __init__(
        self,
        spec: ModelSpec,
        source: TensorSource,
        target: tuple[torch.dtype, str],
        report: Progress,
    ) -> None:
        self._spec = spec
        self._names = spec.names
        self._source = source
        dtype, self._device = target
        self.dtype = ACTIVATIONS.get(dtype, dtype)
        # Few bits are made of what the file says, not of its bf16.
        self._matrix_dtype = torch.float32 if dtype in ACTIVATIONS else dtype
        self._report = report

    def norm(self, name: str) -> torch.Tensor:
        """Return a norm in the type of activations; one that lacks its offset is kept in float32.

        1 + w in bf16 would lose the bits that w has.
        """
        if not self._names.norm_offset:
            return self._tensor(name, self.dtype)
        return self._tensor(name, torch.float32) + self._names.norm_offset

    def matrix(self, name: str) -> torch.Tensor:
        """Return a weight to be packed."""
        return self._tensor(name, self._matrix_dtype)

    def _tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        value = self._source.load(name)
        if not bool(torch.isfinite(value.sum(dtype=torch.float32))):
            raise SpecError(f"{self._spec.path}: tensor {name!r} holds values that are not finite")
        return value.to(device=self._device, dtype=dtype)

    def layer(self, number: int, pack: Pack) -> LayerWeights:
        """Return one layer's weights, fused and packed."""
        names, form = self._names, self._spec.form
        queries, keys = self._spec.heads, self._spec.kv_heads

        def part(name: str, heads: int = 0) -> torch.Tensor:
            return self._paired(self.matrix(names.weight.format(number, name)), heads)

        def norm(name: str, has: bool, heads: int = 0) -> torch.Tensor | None:
            if not has:
                return None
            return self._paired(self.norm(names.weight.format(number, name)), heads)

        def bias(name: str, heads: int = 0) -> torch.Tensor:
            return self._paired(self._tensor(names.bias.format(number, name), self.dtype), heads)

        qkv = [part(names.query, queries), part(names.key, keys), part(names.value)]
        qkv_bias = output_bias = None
        if form.qkv_bias:
            qkv_bias = [bias(names.query, queries), bias(names.key, keys), bias(names.value)]
        if form.output_bias:
            output_bias = bias(names.output)
        self._report(STAGE, (number + 1) / self._spec.layers)
        return LayerWeights(
            input_norm=self.norm(names.weight.format(number, names.input_norm)),
            qkv=pack(torch.cat(qkv), whole_rows=True),
            output=pack(part(names.output)),
            post_norm=self.norm(names.weight.format(number, names.post_norm)),
            gate_up=pack(torch.cat([part(names.gate), part(names.up)]), whole_rows=True),
            down=pack(part(names.down)),
            qkv_bias=None if qkv_bias is None else torch.cat(qkv_bias),
            output_bias=output_bias,
            query_norm=norm(names.query_norm, form.head_norms, 1),
            key_norm=norm(names.key_norm, form.head_norms, 1),
            attention_out_norm=norm(names.attention_out_norm, form.out_norms),
            feed_out_norm=norm(names.feed_out_norm, form.out_norms),
        )

    def _paired(self, weight: torch.Tensor, heads: int) -> torch.Tensor:
        """Return what rope turns with its pairs adjacent; other weights have no heads to turn."""
        if not heads or self._names.pairs_adjacent:
            return weight
        return interleaved(weight, heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParts:
    """What of the decoder's weights comes from files, packed; the rest follows from the spec.

    factors are what a GGUF file divides rope's frequencies by.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: PackedWeight
    factors: torch.Tensor | None


def load_weights(
    spec: ModelSpec, *, dtype: str, device: str, positions: int, pack: Pack, progress: Progress
) -> DecoderWeights:
    """Read the decoder's weights from spec.path, or raise SpecError naming file and tensor.

    positions is how many the rope tables cover.
    """
    parts = read_parts(spec, dtype, device, pack, progress)
    return assembled(spec, parts, positions, device)


def read_parts(
    spec: ModelSpec, dtype: str, device: str, pack: Pack, progress: Progress
) -> WeightParts:
    """Read, check and pack what the files hold.

    A tied model whose file brings a head of its own keeps that head when it differs from the
    embedding, as transformers does.
    """
    names = spec.names
    with open_source(spec.path) as source:
        has_head = check_shapes(spec, source.shapes)
        loader = _Loader(spec, source, (TORCH_DTYPES[dtype], device), progress)
        embedding = loader.matrix(names.embedding)
        head = loader.matrix(names.head) if has_head else embedding
        if spec.tied_head and torch.equal(head, embedding):
            head = embedding
        return WeightParts(
            embedding=embedding.to(loader.dtype),
            layers=tuple(loader.layer(number, pack) for number in range(spec.layers)),
            final_norm=loader.norm(names.final_norm),
            head=pack(head, whole_rows=True),
            factors=_gguf_factors(spec, source),
        )


def assembled(spec: ModelSpec, parts: WeightParts, positions: int, device: str) -> DecoderWeights:
    """Return the decoder's weights with the tables of its rope for so many positions."""
    form, local = spec.form, None
    if form.local_rope is not None:
        local = _rotations(spec, form.local_rope, positions, None).to(device)
    return DecoderWeights(
        shape=attention_shape(spec),
        norm_eps=spec.norm_eps,
        embedding=parts.embedding,
        layers=parts.layers,
        final_norm=parts.final_norm,
        head=parts.head,
        rotations=_rotations(spec, spec.rope, positions, parts.factors).to(device),
        local_rotations=local,
        activation=form.activation,
        embedding_scale=torch.tensor(form.embedding_scale).to(parts.embedding.dtype).item(),
        logits_cap=form.logits_cap,
    )


def attention_shape(spec: ModelSpec) -> AttentionShape:
    """Return the part of a spec that attention sees, and words for what C++ does not compute."""
    plain = spec.form.query_scale in (None, spec.head_dim**-0.5)
    return AttentionShape(
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        windows=spec.form.windows,
        scale=None if plain else spec.form.query_scale,
        cap=spec.form.attention_cap,
        beyond=spec.form.beyond(),
    )


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from two halves (Hugging Face) to adjacent pairs (GGUF's llamas).

    Row i and row i + head_dim / 2 turn together; scores do not change when queries and keys are
    reordered alike.
    """
    halves = weight.view(heads, 2, len(weight) // heads // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape)


def _gguf_factors(spec: ModelSpec, source: TensorSource) -> torch.Tensor | None:
    """Return what a GGUF file divides rope's frequencies by (its form of llama3 scaling)."""
    name = spec.names.ignored
    if not isinstance(source, GgufSource) or name not in source.shapes:
        return None
    factors = source.load(name)
    if factors.shape != (spec.head_dim // 2,) or not bool((factors > 0).all()):
        raise SpecError(f"{spec.path}: tensor {name!r} does not fit head dimension {spec.head_dim}")
    return factors


def _rotations(
    spec: ModelSpec, rope: Rope, positions: int, factors: torch.Tensor | None
) -> torch.Tensor:
    table = rotations(rope, head_dim=spec.head_dim, positions=positions, factors=factors)
    if not bool(torch.isfinite(table).all()):
        raise SpecError(f"{spec.path}: rope's turns are not finite: {rope}")
    return table
