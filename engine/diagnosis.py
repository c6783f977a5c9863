"""What this machine can do for an engine, measured and asked without starting one.

Owns the facts about device, kernels and memory bandwidth, and what `auto` stands for here;
`iterscope doctor` prints them. Loads torch. Never loads a model's weights and never changes what
the next engine will find.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from engine.config import ConfigError, EngineConfig, resolve
from engine.device import device_facts, device_name
from engine.kernel_table import measured_for
from engine.spec import ModelSpec
from engine.weights import TORCH_DTYPES, attention_shape
from kernels.base import BackendError
from kernels.measured import ROWS
from kernels.select import choose, refusals_of

COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
COPIES = 5


def device_report(config: EngineConfig) -> dict[str, Any]:
    """Return what the device is and how fast it copies memory; raises ConfigError."""
    device, threads = device_name(config), len(os.sched_getaffinity(0))
    report: dict[str, Any] = {
        "device": device,
        "threads": threads,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "cuda": torch.version.cuda,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        report |= {"name": properties.name, "device_memory_bytes": properties.total_memory}
    torch.set_num_threads(config.engine_threads or threads)
    return report | {"copy_bytes_per_s": copy_bytes_per_s(device)}


def copy_bytes_per_s(device: str) -> float:
    """Return the bytes read and written each second by the best of a few large copies."""
    source = torch.ones(COPY_BYTES[device] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # the first touch of a page is the system's work, not the memory's
    best = min(_seconds(lambda: target.copy_(source), device) for _ in range(COPIES))
    return 2 * COPY_BYTES[device] / best


def _seconds(work: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def kernels_report(config: EngineConfig, spec: ModelSpec) -> dict[str, dict[str, str | None]]:
    """Return why each attention backend and each set of ops refuses to serve; None if it would."""
    facts = device_facts(config, spec)
    chosen_dtype = facts.auto_dtype if config.dtype == "auto" else config.dtype
    backends, ops = refusals_of(
        attention_shape(spec),
        device=facts.device,
        dtype=TORCH_DTYPES[chosen_dtype],
        block_tokens=config.block_size or facts.block_tokens,
    )
    return {"attention_backends": backends, "ops": ops}


def products_report(config: EngineConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return how fast this model's weights are multiplied here, by type; nothing on a GPU.

    `products_gflop_s` has a rate for each count of rows in `products_rows`, and `products_steady`
    says whether they were measured on a quiet machine.
    """
    if device_name(config) != "cpu":
        return {}
    found = {dtype: measured_for(dtype, spec) for dtype in TORCH_DTYPES}
    return {
        "products_rows": list(ROWS),
        "products_gflop_s": {dtype: one.rates for dtype, one in found.items()},
        "products_steady": all(one.steady for one in found.values()),
    }


def chosen(config: EngineConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return every engine setting as it would be in force for this model; raises ConfigError."""
    resolved = resolve(config, spec, device_facts(config, spec))
    try:
        choice = choose(
            resolved.attention_backend,
            attention_shape(spec),
            device=resolved.device,
            dtype=TORCH_DTYPES[resolved.dtype],
            block_tokens=resolved.block_size,
            int8_cache=resolved.kv_cache_dtype == "int8",
        )
    except BackendError as error:
        raise ConfigError(f"--attention-backend: {error}") from error
    found = asdict(resolved) | {"attention_backend": choice.backend.name}
    if resolved.device == "cuda" and not (config.kv_blocks or config.kv_cache_memory):
        found |= dict.fromkeys(("kv_blocks", "kv_cache_memory", "max_model_len"), "measured")
    return found
