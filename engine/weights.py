"""From a model's files to the decoder's weights: complete, well shaped and finite, or an error.

Owns the names that tensors have in GGUF and safetensors files, dequantization (through the gguf
package), the fusing of matrices and the rope table. engine/runner.py calls it once at start.
Never leaves a weight uninitialised and never ignores a tensor it does not know.
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

from engine.model_files import read_gguf, read_json, refuse_pointer
from engine.spec import ModelSpec, RopeScaling, SpecError
from kernels.base import AttentionShape, DecoderWeights, LayerWeights, PackedWeight

Progress = Callable[[str, float], None]
Pack = Callable[[torch.Tensor], PackedWeight]

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
SAFETENSORS_DTYPES = ("F32", "F16", "BF16", "F64")
STAGE = "loading weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a file format calls its tensors; `layer` has a place for the layer's number."""

    embedding: str
    final_norm: str
    head: str
    layer: str
    input_norm: str
    query: str
    key: str
    value: str
    output: str
    post_norm: str
    gate: str
    up: str
    down: str
    ignored: str


SAFETENSORS_NAMES = Names(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{}.{}.weight",
    input_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    post_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    ignored="rotary_emb.inv_freq",
)
GGUF_NAMES = Names(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer="blk.{}.{}.weight",
    input_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    output="attn_output",
    post_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    ignored="rope_freqs.weight",
)


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
        for file in _shards(folder):
            handle = _open_safetensors(file, stack)
            for name in handle.keys():  # noqa: SIM118  a safetensors handle is no dict
                view = handle.get_slice(name)
                if view.get_dtype() not in SAFETENSORS_DTYPES:
                    raise SpecError(f"{file}: tensor {name!r} has type {view.get_dtype()}")
                self.shapes[name] = tuple(view.get_shape())
                self._handles[name] = handle

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored."""
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor


def _shards(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: those of its index, or its one file."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        listed = read_json(index).get("weight_map")
        names = sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
        if not names or any(Path(name).name != name for name in names):
            raise SpecError(f"{index}: weight_map does not name files of this folder")
        files = [folder / name for name in names]
    else:
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise SpecError(f"{folder}: {len(files)} safetensors files and no model.safetensors")
    for file in files:
        if not file.is_file():
            raise SpecError(f"{file}: no such file")
    return files


def _open_safetensors(file: Path, stack: ExitStack) -> Any:
    try:
        with file.open("rb") as start:
            refuse_pointer(file, start.read(64))
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


def expected_shapes(spec: ModelSpec, names: Names, has_head: bool) -> dict[str, tuple[int, ...]]:
    """Return every tensor that the decoder reads, by its name in the file, with its shape."""
    hidden, inner = spec.hidden, spec.intermediate
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    table = (spec.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {names.embedding: table, names.final_norm: (hidden,)}
    if has_head:
        shapes[names.head] = table
    for layer in range(spec.layers):
        for part, shape in (
            (names.input_norm, (hidden,)),
            (names.query, (query, hidden)),
            (names.key, (key, hidden)),
            (names.value, (key, hidden)),
            (names.output, (hidden, query)),
            (names.post_norm, (hidden,)),
            (names.gate, (inner, hidden)),
            (names.up, (inner, hidden)),
            (names.down, (hidden, inner)),
        ):
            shapes[names.layer.format(layer, part)] = shape
    return shapes


def check_shapes(spec: ModelSpec, source: TensorSource) -> bool:
    """Raise SpecError for a tensor that is missing, of a wrong shape, or unknown.

    Returns whether the file has a head of its own: an untied model must, a tied one may.
    """
    names = source.names
    has_head = not spec.tied_head or names.head in source.shapes
    expected = expected_shapes(spec, names, has_head)
    for name, shape in expected.items():
        found = source.shapes.get(name)
        if found is None:
            raise SpecError(f"{spec.path}: tensor {name!r} is missing")
        if found != shape:
            raise SpecError(
                f"{spec.path}: tensor {name!r} has shape {list(found)}, not {list(shape)}"
            )
    for name in source.shapes:
        if name not in expected and not name.endswith(names.ignored):
            raise SpecError(f"{spec.path}: tensor {name!r} is not known to a llama model")
    return has_head


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
        self._dtype, self._device = target
        self._report = report

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the file in the target's type, on its device."""
        value = self._source.load(name)
        if not bool(torch.isfinite(value.sum(dtype=torch.float32))):
            raise SpecError(f"{self._spec.path}: tensor {name!r} holds values that are not finite")
        return value.to(device=self._device, dtype=self._dtype)

    def layer(self, number: int, pack: Pack) -> LayerWeights:
        """Return one layer's weights, fused and packed."""
        names = self._source.names

        def part(name: str) -> torch.Tensor:
            return self.tensor(names.layer.format(number, name))

        query, key = part(names.query), part(names.key)
        if not self._source.interleaved:
            query = interleaved(query, self._spec.heads)
            key = interleaved(key, self._spec.kv_heads)
        self._report(STAGE, (number + 1) / self._spec.layers)
        return LayerWeights(
            input_norm=part(names.input_norm),
            qkv=pack(torch.cat([query, key, part(names.value)])),
            output=pack(part(names.output)),
            post_norm=part(names.post_norm),
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
        has_head = check_shapes(spec, source)
        loader = _Loader(spec, source, (TORCH_DTYPES[dtype], device), progress)
        embedding = loader.tensor(source.names.embedding)
        head = loader.tensor(source.names.head) if has_head else embedding
        if spec.tied_head and torch.equal(head, embedding):
            head = embedding
        return DecoderWeights(
            shape=attention_shape(spec),
            norm_eps=spec.norm_eps,
            embedding=embedding,
            layers=tuple(loader.layer(number, pack) for number in range(spec.layers)),
            final_norm=loader.tensor(source.names.final_norm),
            head=pack(head),
            rotations=rotations(spec, positions, _gguf_factors(spec, source)).to(device),
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


def rotations(spec: ModelSpec, positions: int, factors: torch.Tensor | None) -> torch.Tensor:
    """Return cosine and sine of each position and pair: [positions, head_dim / 2, 2] float32.

    Pair i turns by position x base^(-2 i / head_dim) (Su et al., 2021), computed in float32 as
    transformers does, since models were trained with that rounding.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / spec.rope_base**exponents
    if spec.rope_scaling:
        frequencies = scaled(frequencies, spec.rope_scaling)
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.arange(positions).float()[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Return Llama 3.1's frequencies: low ones divided, high ones kept, a ramp between."""
    turns = scaling.original_model_len * frequencies / (2 * torch.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (share + (1 - share) / scaling.factor)
