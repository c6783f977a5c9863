"""What the device is, and which precision and how many threads `auto` stands for on it.

Owns the facts that engine/config.py's resolve needs of machine and model. engine/build.py asks once
at an engine's start, `iterscope doctor` at any time. Never allocates anything on the device.
"""

import os

import torch

from engine.config import BLOCK_TOKENS, ConfigError, DeviceFacts, EngineConfig
from engine.spec import ModelSpec
from engine.weights import TORCH_DTYPES, attention_shape
from kernels import native
from kernels.base import BackendError
from kernels.flash_attn import PAGE_TOKENS
from kernels.native_ops import TILE, threads
from kernels.native_step import refusal_of as native_refusal
from kernels.select import choose


def keep_to(cpu: str) -> None:
    """Let this process run no better C++ than for a CPU of this kind: a bench asks for it."""
    if cpu not in native.TARGETS:
        raise ConfigError(f"no kind of CPU {cpu!r}; there are {', '.join(native.TARGETS)}")
    native.keep_to(cpu)


def step_profile(on: bool) -> dict[str, int]:
    """Return where the time of C++ steps went since the last call, ns by part; a bench asks."""
    return threads().profile(on)


def device_name(config: EngineConfig) -> str:
    """Return the device asked for, or the best one; raise ConfigError when it is not there."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no CUDA device here")
    return config.device


def device_facts(config: EngineConfig, spec: ModelSpec) -> DeviceFacts:
    """Return what device and model decide, or raise ConfigError when the device is not there."""
    device = device_name(config)
    threads = len(os.sched_getaffinity(0))
    auto_dtype = "bf16" if device == "cuda" else _fastest_dtype(config, spec)
    block_tokens = BLOCK_TOKENS
    if device == "cuda" and config.attention_backend in ("auto", "flash_attn"):
        dtype = auto_dtype if config.dtype == "auto" else config.dtype
        block_tokens = _flash_attn_tokens(spec, TORCH_DTYPES[dtype])
    return DeviceFacts(
        device=device, auto_dtype=auto_dtype, threads=threads, block_tokens=block_tokens
    )


def _flash_attn_tokens(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the tokens of flash-attn's pages where it serves, else of a block as usual."""
    shape, page = attention_shape(spec), PAGE_TOKENS
    try:
        choose("flash_attn", shape, device="cuda", dtype=dtype, block_tokens=page)
    except BackendError:
        return BLOCK_TOKENS
    return page


def _fastest_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    """Return int8 where C++ serves a llama, whose perplexity is within 1 % (bench/quality.py).

    Of other models int8's cost is not known: bf16 where C++ serves, else f32.
    Without C++, bf16 is a little faster than f32 and changes every answer with its neighbours.
    """
    asked = config.attention_backend in ("auto", "native", "per_request")
    in_tiles = spec.hidden % TILE == 0 and spec.intermediate % TILE == 0
    if not asked or not in_tiles:
        return "f32"
    shape = attention_shape(spec)
    if native_refusal(shape, "cpu", torch.int8, config.block_size):
        return "f32"
    return "bf16" if shape.beyond else "int8"
