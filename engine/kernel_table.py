"""Which ops multiply a model's weights, by a measurement that is made once for a machine and kept.

Owns the file of rates: what it is named by, and that a damaged one is measured anew. What a busy
machine gave serves this run alone.
engine/runner.py asks once at start, where no C++ step runs the whole model; `iterscope doctor`
shows the rates. Only a server keeps rates: without a folder the order of kernels/select.py's table
stands, which is the same in every run.
"""

import hashlib
import json
import math
import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.packed import kept_folder
from engine.spec import ModelSpec
from engine.weights import ACTIVATIONS, TORCH_DTYPES
from kernels import native
from kernels.base import StepBackend
from kernels.measured import (
    ROWS,
    VALUES_MIN,
    MeasuredOps,
    Measurement,
    Rates,
    fastest,
    measure,
    shape_name,
)
from kernels.select import Choice, serving

FILES_MAX = 32
BYTES_MAX = 2**20


def fitted(choice: Choice, config: EngineConfig, spec: ModelSpec) -> Choice:
    """Return the choice with the ops that are fastest here for this model's weights."""
    folder = None if config.device != "cpu" else kept_folder(config)
    if folder is None or isinstance(choice.backend, StepBackend):
        return choice
    candidates = serving(config.device, TORCH_DTYPES[config.dtype])
    if len(candidates) < 2 or not (shapes := shapes_of(spec)):
        return choice
    path = folder / _name(config, shapes)
    rates = _kept(path, list(candidates), shapes)
    if rates is None:
        measured = measured_for(config.dtype, spec)
        rates = measured.rates
        if measured.steady:
            _keep(path, rates)
    winners = {fastest(rates, shape_name(*shape)) for shape in shapes}
    if len(winners) == 1 and (winner := winners.pop()):
        return replace(choice, ops=candidates[winner])
    return replace(choice, ops=MeasuredOps(candidates, rates))


def measured_for(dtype: str, spec: ModelSpec) -> Measurement:
    """Return how fast each set of ops that serves this type on a CPU multiplies for this model."""
    kind = TORCH_DTYPES[dtype]
    with torch.inference_mode():
        return measure(serving("cpu", kind), shapes_of(spec), ACTIVATIONS.get(kind, kind))


def shapes_of(spec: ModelSpec) -> set[tuple[int, int]]:
    """Return outputs and inputs of the weights that are large enough to matter."""
    heads, keys = spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    found = {
        (heads + keys, spec.hidden),
        (spec.hidden, heads),
        (2 * spec.intermediate, spec.hidden),
        (spec.hidden, spec.intermediate),
        (spec.vocab_size, spec.hidden),
    }
    return {shape for shape in found if math.prod(shape) >= VALUES_MIN}


def _name(config: EngineConfig, shapes: set[tuple[int, int]]) -> str:
    """Return a file name that says what was measured, on which processor, by which libraries."""
    processor = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        processor += "".join(line for line in lines if line.startswith(("model name", "flags")))
    told = (processor, torch.__version__, native.version(), config.dtype, config.engine_threads)
    digest = hashlib.sha256(repr((*told, sorted(shapes), ROWS)).encode())
    return f"{config.dtype}-{digest.hexdigest()[:32]}.rates"


def _kept(path: Path, names: list[str], shapes: set[tuple[int, int]]) -> Rates | None:
    """Return the rates of a file, None unless it has a sound one for each shape and each ops."""
    try:
        if path.stat().st_size > BYTES_MAX:
            return None
        rates: Rates = json.loads(path.read_text(encoding="utf-8"))
        for shape in shapes:
            found = rates[shape_name(*shape)]
            sound = [
                len(found[name]) == len(ROWS) and all(0 < rate < math.inf for rate in found[name])
                for name in names
            ]
            if len(found) != len(names) or not all(sound):
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rates


def _keep(path: Path, rates: Rates) -> None:
    """Write the file whole, and delete the oldest where there are too many."""
    with suppress(OSError):
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(rates, file)
        Path(scratch).replace(path)
        others = sorted(path.parent.glob("*.rates"), key=lambda other: other.stat().st_mtime_ns)
        for other in others[:-FILES_MAX]:
            other.unlink(missing_ok=True)
