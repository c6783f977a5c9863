"""Which tensors a model must have, and what its files say they hold, without reading a weight.

Owns the names that tensors have in GGUF and safetensors files, the shapes that a spec asks for, and
the reading of safetensors headers. The server checks a model with it before any engine is started,
engine/weights.py before it loads. Knows no torch, and believes no file.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model_files import JSON_BYTES_MAX, SpecError, read_gguf, read_json, refuse_pointer
from engine.spec import ModelSpec

Shapes = Mapping[str, tuple[int, ...]]

SAFETENSORS_TYPES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
"""Types of values that are taken, with the bytes of one."""


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


def shards(folder: Path) -> list[Path]:
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


def read_safetensors_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a safetensors file; all lie in the file, none on another.

    The format: eight bytes of header length, the header as JSON, the values (safetensors' README).
    """
    try:
        length = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            refuse_pointer(file, start + opened.read(64))
            opened.seek(8)
            (size,) = struct.unpack("<Q", start) if len(start) == 8 else (0,)
            if not 2 <= size <= length - 8:
                raise SpecError(f"{file}: cut short or damaged: a header of {size} bytes")
            if size > JSON_BYTES_MAX:
                raise SpecError(
                    f"{file}: damaged: a header of {size} bytes, above {JSON_BYTES_MAX}"
                )
            header = json.loads(opened.read(size))
    except OSError as error:
        raise SpecError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise SpecError(f"{file}: cut short or damaged: its header is not JSON") from None
    if not isinstance(header, dict):
        raise SpecError(f"{file}: damaged: its header is not a JSON object")
    header.pop("__metadata__", None)
    places = sorted(_place(file, name, entry) for name, entry in header.items())
    end = 0
    for begin, stop, name in places:
        if begin != end or stop > length - 8 - size:
            raise SpecError(f"{file}: cut short or damaged: tensor {name!r:.60} lies outside of it")
        end = stop
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def _place(file: Path, name: str, entry: Any) -> tuple[int, int, str]:
    """Return where a tensor begins and stops, and its name, once all that is said of it fits."""
    entry = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str) or kind not in SAFETENSORS_TYPES:
        known = ", ".join(SAFETENSORS_TYPES)
        raise SpecError(f"{file}: tensor {name!r:.60} has type {kind!s:.20}; supported are {known}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise SpecError(f"{file}: damaged: shape or place of tensor {name!r:.60}")
    begin, stop = offsets
    if stop - begin != math.prod(shape) * SAFETENSORS_TYPES[kind]:
        raise SpecError(f"{file}: damaged: tensor {name!r:.60} does not fill its place")
    return begin, stop, name


def _are_sizes(value: Any) -> bool:
    """Whether it is a short list of whole numbers that are no absurd sizes."""
    if not isinstance(value, list) or len(value) > 8:
        return False
    return all(type(item) is int and 0 <= item < 2**48 for item in value)


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


def check_shapes(spec: ModelSpec, names: Names, shapes: Shapes) -> bool:
    """Raise SpecError for a tensor that is missing, of a wrong shape, or unknown.

    Returns whether the file has a head of its own: an untied model must, a tied one may.
    """
    has_head = not spec.tied_head or names.head in shapes
    expected = expected_shapes(spec, names, has_head)
    for name, shape in expected.items():
        found = shapes.get(name)
        if found is None:
            raise SpecError(f"{spec.path}: tensor {name!r} is missing")
        if found != shape:
            raise SpecError(
                f"{spec.path}: tensor {name!r} has shape {list(found)}, not {list(shape)}"
            )
    for name in shapes:
        if name not in expected and not name.endswith(names.ignored):
            raise SpecError(f"{spec.path}: tensor {name!r} is not known to a llama model")
    return has_head


def check_tensors(spec: ModelSpec) -> None:
    """Raise SpecError unless the files at spec.path say that every tensor is there and fits."""
    place = Path(spec.path)
    if not place.is_dir():
        found = {name: item.shape for name, item in read_gguf(place).tensors.items()}
        check_shapes(spec, GGUF_NAMES, found)
        return
    shapes: dict[str, tuple[int, ...]] = {}
    for file in shards(place):
        shapes |= read_safetensors_header(file)
    check_shapes(spec, SAFETENSORS_NAMES, shapes)
