"""The decoder's weights as a backend packed them, kept on disk: the next start reads them.

Owns what a kept file is named by, so that another model, precision or program never finds it, and
which files are deleted when there are too many. engine/runner.py calls `load` once at start. What
is kept is never needed: a file that is missing, damaged or another user's costs a slower start.
"""

import hashlib
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf.quants
import torch

from engine import family, names, tensor_file, weights
from engine.config import ConfigError, EngineConfig
from engine.kept_folder import KeptFolderError, open_folder
from engine.messages import Trouble
from engine.spec import ModelSpec
from engine.tensor_file import TensorFileError, read_tensors, write_tensors
from engine.weights import Progress, WeightParts, assembled, read_parts
from kernels.base import DecoderWeights, KeptOps, LayerWeights, Ops, PackedWeight

BYTES_MIN = 16 * 2**20
"""What is packed faster than it is found is not kept."""
DISK_FREE_MIN = 2**30
PART_AGE_S = 3600.0
"""A file that is written for so long was left by an engine that was killed."""
MAKERS = (family, gguf.quants, names, tensor_file, weights)
"""Modules whose text decides what the packed weights are: when it changes, all is packed anew."""
READING, KEEPING = "reading packed weights", "keeping packed weights"


def load(spec: ModelSpec, config: EngineConfig, ops: Ops, progress: Progress) -> DecoderWeights:
    """Return the decoder's weights, from the disk if they were packed before.

    `config` is resolved. Raises SpecError as engine/weights.py does, and ConfigError for a file
    that has not what the precision needs.
    """
    assert config.max_model_len is not None
    positions, device = config.max_model_len, config.device
    if not isinstance(ops, KeptOps):
        parts = read_parts(spec, config.dtype, device, ops.pack, progress)
        return assembled(spec, parts, positions, device)
    folder = kept_folder(config)
    path = None if folder is None else folder / _name(spec, config.dtype, ops)
    kept = None if path is None else _kept(path, spec.layers, ops, config, progress)
    if kept is None:
        kept = read_parts(spec, config.dtype, device, ops.pack, progress)
        if config.dtype == "int4":
            _refuse_without_4_bits(spec, kept, ops)
        # A file that was replaced meanwhile has another name by now.
        if path is not None and path.name == _name(spec, config.dtype, ops):
            _keep(path, kept, ops, config, progress)
    return assembled(spec, kept, positions, device)


def _refuse_without_4_bits(spec: ModelSpec, parts: WeightParts, ops: KeptOps) -> None:
    """Raise ConfigError if no weight is in 4 bits: to round others to them costs too much sense."""
    for layer in parts.layers:
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
            if "fours" in ops.tensors(weight):
                return
    raise ConfigError(
        f"--dtype int4: {spec.path} has no weights in 4 bits, as Q4_0 and Q4_1 are; use int8"
    )


def kept_folder(config: EngineConfig) -> Path | None:
    """Return the folder of kept files, made if need be; None where it is not ours alone."""
    if config.packed_cache is None or not config.packed_cache_bytes:
        return None
    try:
        return open_folder(config.packed_cache)
    except KeptFolderError:  # the server has said so
        return None


def _name(spec: ModelSpec, dtype: str, ops: KeptOps) -> str:
    """Return a file name that says which bytes of which model were packed, by which program.

    A file of weights is known by its place, size and instants of change: to read it whole, for its
    hash, can take longer than to pack it.
    """
    digest = hashlib.sha256(repr((spec, dtype, ops.layout, torch.__version__)).encode())
    for module in MAKERS:
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    place = Path(spec.path).resolve()
    files = sorted([*place.glob("*.safetensors"), *place.glob("*.json")]) or [place]
    for file in files:
        status = file.stat()
        instants = (status.st_mtime_ns, status.st_ctime_ns)
        digest.update(repr((str(file), status.st_ino, status.st_size, instants)).encode())
    title = re.sub(r"[^A-Za-z0-9._-]", "_", place.stem)[:40]
    return f"{title}-{dtype}-{digest.hexdigest()[:32]}.packed"


def _kept(
    path: Path, layers: int, ops: KeptOps, config: EngineConfig, progress: Progress
) -> WeightParts | None:
    """Return what the file holds; one that cannot be believed is deleted, and people are told."""
    try:
        tensors = read_tensors(path, config.engine_threads or 1, lambda: progress(READING, 0.5))
        return _restored(tensors, layers, ops)
    except FileNotFoundError:
        return None
    except (TensorFileError, OSError) as error:
        progress(Trouble(f"{path} {_why(error)}: packing anew"), 0.0)
        with suppress(OSError):
            path.unlink()
        return None


def _why(error: TensorFileError | OSError) -> str:
    if isinstance(error, TensorFileError):
        return str(error)
    return f"cannot be read ({error.strerror})"


def _keep(
    path: Path, parts: WeightParts, ops: KeptOps, config: EngineConfig, progress: Progress
) -> None:
    """Write the file, after deleting what was used longest ago; people are told if it cannot be."""
    tensors = _flat(parts, ops)
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size < BYTES_MIN:
        return
    try:
        if size > config.packed_cache_bytes:
            reason = f"--packed-cache-bytes allows {config.packed_cache_bytes}"
        else:
            make_room(path.parent, config.packed_cache_bytes - size)
            if shutil.disk_usage(path.parent).free >= size + DISK_FREE_MIN:
                write_tensors(path, tensors, lambda: progress(KEEPING, 0.5))
                return
            reason = f"{path.parent} would have less than {DISK_FREE_MIN} bytes free"
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror})"
    progress(Trouble(f"{size} bytes of packed weights are not kept: {reason}"), 0.5)


def make_room(folder: Path, bytes_max: int) -> None:
    """Delete kept files, the one unused for longest first, until they are within bytes_max.

    Files that nobody finishes go, too.
    """
    for left in folder.glob("*.part"):
        if time.time() - left.stat().st_mtime > PART_AGE_S:
            left.unlink(missing_ok=True)
    found = [(file.stat(), file) for file in folder.glob("*.packed")]
    total = sum(status.st_size for status, _ in found)
    for status, file in sorted(found, key=lambda one: one[0].st_mtime_ns):
        if total <= bytes_max:
            return
        file.unlink(missing_ok=True)
        total -= status.st_size


# ---- weights as named tensors


def _flat(parts: WeightParts, ops: KeptOps) -> dict[str, torch.Tensor]:
    """Return every tensor of the weights by a name: layers.3.input_norm, layers.3.qkv/values."""
    found: dict[str, torch.Tensor] = {}

    def put(name: str, value: PackedWeight) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif value is not None:
            found.update({f"{name}/{part}": one for part, one in ops.tensors(value).items()})

    for name in ("embedding", "final_norm", "head", "factors"):
        put(name, getattr(parts, name))
    for number, layer in enumerate(parts.layers):
        for one in fields(layer):
            put(f"layers.{number}.{one.name}", getattr(layer, one.name))
    return found


def _restored(tensors: Mapping[str, torch.Tensor], layers: int, ops: KeptOps) -> WeightParts:
    """Return the weights again."""
    packed: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        whole, _, part = name.partition("/")
        packed.setdefault(whole, {})[part] = tensor

    def get(name: str) -> Any:
        found = packed.get(name)
        return found if found is None else found[""] if "" in found else ops.weight(found)

    names = [one.name for one in fields(LayerWeights)]
    return WeightParts(
        embedding=get("embedding"),
        layers=tuple(
            LayerWeights(**{name: get(f"layers.{number}.{name}") for name in names})
            for number in range(layers)
        ),
        final_norm=get("final_norm"),
        head=get("head"),
        factors=get("factors"),
    )
