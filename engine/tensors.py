"""Which tensors a model must have, and what its files say they hold, without reading a weight.

Owns the shapes that a spec asks for and the reading of safetensors headers and of the index of
shards. The server checks a model with it before any engine is started,
engine/weights.py before it loads. Knows no torch, and believes no file.
"""

import json
import math
import struct
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.model_files import JSON_BYTES_MAX, SpecError, read_gguf, read_json, refuse_pointer
from engine.names import Names
from engine.spec import ModelSpec

Shapes = Mapping[str, tuple[int, ...]]

SAFETENSORS_TYPES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
"""Types of values that are taken, with the bytes of one."""
SHARDS_MAX = 4096


def folder_headers(folder: Path) -> dict[Path, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors in each safetensors file of a folder, no tensor in two.

    With an index those are the files that it names, and each holds what it says of it.
    """
    index = folder / "model.safetensors.index.json"
    placed = _placed(index) if index.exists() else {}
    files = sorted({folder / name for name in placed.values()}) or [_only_file(folder)]
    for file in files:
        if not file.is_file():
            raise SpecError(f"{file}: no such file")
    headers = {file: read_safetensors_header(file) for file in files}
    holders: dict[str, Path] = {}
    for file, shapes in headers.items():
        for name in shapes:
            if name in holders:
                raise SpecError(f"{file}: tensor {name!r:.60} is in {holders[name].name} too")
            holders[name] = file
    for name, file_name in placed.items():
        if name not in headers[folder / file_name]:
            raise SpecError(f"{index}: tensor {name!r:.60} is not in {file_name:.60}")
    return headers


def _placed(index: Path) -> dict[str, str]:
    """Return the name of the file that each tensor lies in; all are plain names of this folder."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise SpecError(f"{index}: weight_map is missing or empty")
    for tensor, name in listed.items():
        if not _is_shard_name(name):
            raise SpecError(
                f"{index}: weight_map puts {tensor!r:.60} into {name!r:.60}, "
                "not a .safetensors file of this folder"
            )
    if len(set(listed.values())) > SHARDS_MAX:
        raise SpecError(f"{index}: weight_map names more than {SHARDS_MAX} files")
    return listed


def _is_shard_name(name: object) -> bool:
    if not isinstance(name, str) or "\0" in name or "\\" in name or len(name) > 255:
        return False
    return Path(name).name == name and name.endswith(".safetensors")


def _only_file(folder: Path) -> Path:
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise SpecError(f"{folder}: {len(files)} safetensors files and no model.safetensors")
    return files[0]


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
    table = (spec.vocab_size, spec.hidden)
    shapes: dict[str, tuple[int, ...]] = {names.embedding: table, names.final_norm: (spec.hidden,)}
    if has_head:
        shapes[names.head] = table
    matrices, biases = _matrices(spec, names), _biases(spec, names)
    norms = _norms(spec, names)
    for layer in range(spec.layers):
        shapes |= {names.weight.format(layer, part): shape for part, shape in norms.items()}
        shapes |= {names.weight.format(layer, part): shape for part, shape in matrices.items()}
        shapes |= {names.bias.format(layer, part): matrices[part][:1] for part in biases}
    return shapes


def _matrices(spec: ModelSpec, names: Names) -> dict[str, tuple[int, int]]:
    hidden, inner = spec.hidden, spec.intermediate
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        names.query: (query, hidden),
        names.key: (key, hidden),
        names.value: (key, hidden),
        names.output: (hidden, query),
        names.gate: (inner, hidden),
        names.up: (inner, hidden),
        names.down: (hidden, inner),
    }


def _biases(spec: ModelSpec, names: Names) -> tuple[str, ...]:
    """Return the matrices that have a bias."""
    projected = (names.query, names.key, names.value) if spec.form.qkv_bias else ()
    return (*projected, names.output) if spec.form.output_bias else projected


def _norms(spec: ModelSpec, names: Names) -> dict[str, tuple[int, ...]]:
    sizes = {names.input_norm: spec.hidden, names.post_norm: spec.hidden}
    if spec.form.head_norms:
        sizes |= {names.query_norm: spec.head_dim, names.key_norm: spec.head_dim}
    if spec.form.out_norms:
        sizes |= {names.attention_out_norm: spec.hidden, names.feed_out_norm: spec.hidden}
    return {name: (size,) for name, size in sizes.items()}


def check_shapes(spec: ModelSpec, shapes: Shapes) -> bool:
    """Raise SpecError for a tensor that is missing, of a wrong shape, or unknown.

    Returns whether the file has a head of its own: an untied model must, a tied one may.
    """
    has_head = not spec.tied_head or spec.names.head in shapes
    expected = expected_shapes(spec, spec.names, has_head)
    for name, shape in expected.items():
        found = shapes.get(name)
        if found is None:
            raise SpecError(f"{spec.path}: tensor {name!r} is missing")
        if found != shape:
            raise SpecError(
                f"{spec.path}: tensor {name!r} has shape {list(found)}, not {list(shape)}"
            )
    for name in shapes:
        if name not in expected and not name.endswith(spec.names.ignored):
            kind = spec.architecture
            raise SpecError(f"{spec.path}: tensor {name!r} is not known to a {kind} model")
    return has_head


def check_tensors(spec: ModelSpec) -> None:
    """Raise SpecError unless the files at spec.path say that every tensor is there and fits."""
    place = Path(spec.path)
    if place.is_dir():
        check_shapes(spec, ChainMap(*folder_headers(place).values()))
    else:
        check_shapes(spec, {name: item.shape for name, item in read_gguf(place).tensors.items()})
