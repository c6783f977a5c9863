"""From a model's files to the decoder's weights: complete, well shaped and finite, or an error.

Owns dequantization (through the gguf package) and the fusing of matrices; which tensors there must
be is tensors.py's, the rope table rotation.py's. engine/runner.py calls it once at start. Never
leaves a weight uninitialised and never takes one that is not finite.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from engine.model_files import read_gguf
from engine.rotation import rotations
from engine.spec import ModelSpec, SpecError
from engine.tensors import (
    GGUF_NAMES,
    SAFETENSORS_NAMES,
    Names,
    check_shapes,
    read_safetensors_header,
    shards,
)
from kernels.base import AttentionShape, DecoderWeights, LayerWeights, PackedWeight

Progress = Callable[[str, float], None]
Pack = Callable[[torch.Tensor], PackedWeight]

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
ACTIVATIONS = {torch.int8: torch.bfloat16}
"""Types of the embedding and the norms where they are not the weights' own."""
STAGE = "loading weights"


class TensorSource(Protocol):
    """A model's tensors by their names in its files."""

    names: Names
    shapes: dict[str, tuple[int, ...]]
    interleaved: bool
    """Whether query and key rows already have rope's pairs adjacent."""

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor in float32 or as it is stored."""
        ...


class GgufSource:
    """Tensors of a GGUF file, dequantized to float32."""

    names = GGUF_NAMES
    interleaved = True

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

    names = SAFETENSORS_NAMES
    interleaved = False

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, Any] = {}
        for file in shards(folder):
            found = read_safetensors_header(file)
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
        self._source = source
        dtype, self._device = target
        self.dtype = ACTIVATIONS.get(dtype, dtype)
        # Int8 is made of what the file says, not of its bf16.
        self._matrix_dtype = torch.float32 if dtype is torch.int8 else dtype
        self._report = report

    def tensor(self, name: str) -> torch.Tensor:
        """Return the embedding or a norm in the type of activations, on the target's device."""
        return self._tensor(name, self.dtype)

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
        names = self._source.names

        def part(name: str) -> torch.Tensor:
            return self.matrix(names.layer.format(number, name))

        def norm(name: str) -> torch.Tensor:
            return self.tensor(names.layer.format(number, name))

        query, key = part(names.query), part(names.key)
        if not self._source.interleaved:
            query = interleaved(query, self._spec.heads)
            key = interleaved(key, self._spec.kv_heads)
        self._report(STAGE, (number + 1) / self._spec.layers)
        return LayerWeights(
            input_norm=norm(names.input_norm),
            qkv=pack(torch.cat([query, key, part(names.value)])),
            output=pack(part(names.output)),
            post_norm=norm(names.post_norm),
            gate_up=pack(torch.cat([part(names.gate), part(names.up)])),
            down=pack(part(names.down)),
        )


def load_weights(
    spec: ModelSpec, *, dtype: str, device: str, positions: int, pack: Pack, progress: Progress
) -> DecoderWeights:
    """Read the decoder's weights from spec.path, or raise SpecError naming file and tensor.

    positions is how many the rope table covers. A tied model whose file brings a head of its own
    keeps that head when it differs from the embedding, as transformers does.
    """
    with open_source(spec.path) as source:
        has_head = check_shapes(spec, source.names, source.shapes)
        loader = _Loader(spec, source, (TORCH_DTYPES[dtype], device), progress)
        embedding = loader.matrix(source.names.embedding)
        head = loader.matrix(source.names.head) if has_head else embedding
        if spec.tied_head and torch.equal(head, embedding):
            head = embedding
        return DecoderWeights(
            shape=attention_shape(spec),
            norm_eps=spec.norm_eps,
            embedding=embedding.to(loader.dtype),
            layers=tuple(loader.layer(number, pack) for number in range(spec.layers)),
            final_norm=loader.tensor(source.names.final_norm),
            head=pack(head),
            rotations=_rotations(spec, positions, _gguf_factors(spec, source)).to(device),
        )


def attention_shape(spec: ModelSpec) -> AttentionShape:
    """Return the part of a spec that attention sees."""
    return AttentionShape(
        layers=spec.layers, heads=spec.heads, kv_heads=spec.kv_heads, head_dim=spec.head_dim
    )


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from two halves (Hugging Face) to adjacent pairs (GGUF).

    Row i and row i + head_dim / 2 turn together; scores do not change when queries and keys are
    reordered alike.
    """
    rows, hidden = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, hidden)
    return halves.transpose(1, 2).reshape(rows, hidden)


def _gguf_factors(spec: ModelSpec, source: TensorSource) -> torch.Tensor | None:
    """Return what a GGUF file divides rope's frequencies by (its form of llama3 scaling)."""
    name = GGUF_NAMES.ignored
    if not isinstance(source, GgufSource) or name not in source.shapes:
        return None
    factors = source.load(name)
    if factors.shape != (spec.head_dim // 2,) or not bool((factors > 0).all()):
        raise SpecError(f"{spec.path}: tensor {name!r} does not fit head dimension {spec.head_dim}")
    return factors


def _rotations(spec: ModelSpec, positions: int, factors: torch.Tensor | None) -> torch.Tensor:
    table = rotations(spec.rope, head_dim=spec.head_dim, positions=positions, factors=factors)
    if not bool(torch.isfinite(table).all()):
        raise SpecError(f"{spec.path}: rope's turns are not finite: {spec.rope}")
    return table
