"""The engine's configuration: what an operator may ask, and what `resolve` makes of it.

Owns every engine setting with its help; the command line and the docs are made from these fields,
which carry vLLM's names where the meaning is the same. `resolve` removes every `auto` and None,
or raises ConfigError naming the flag. Knows no torch: the device's facts are handed in.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from engine.spec import ModelSpec

POLICY_NAMES = ("decode_first", "fcfs", "priority", "fair", "slo")
BATCHING_MODES = ("continuous", "static", "dynamic")
ISOLATIONS = ("none", "tenant")
KV_BLOCKS_MAX = 2**31 - 2
"""Block numbers are int32, and one block is for rows of padding."""
THREADS_MAX = 1024
BLOCK_TOKENS = 16
DTYPES = ("auto", "f32", "bf16", "int8", "int4")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = (
    *("auto", "native", "flash_attn", "triton", "sdpa", "reference", "per_request"),
)
"""The names in kernels/select.py, known before anything of it is loaded."""
GRAPHS = ("auto", "on", "off")
KV_CACHE_MEMORY = 2**30
BUCKETS = (1, 2, 4, *range(8, 257, 8))
"""Rows of the decode steps that a GPU has graphs for."""
KV_TYPES = ("auto", "f32", "bf16", "int8")
KV_AUTO = {"f32": "f32", "bf16": "bf16", "int8": "int8", "int4": "int8"}
"""The type of keys and values that stands for `auto` beside each dtype."""
KV_SCALE_BYTES = 4
"""Of each token's key and value of a head in int8."""


class ConfigError(Exception):
    """The operator asked for something that cannot be: one line naming the flag."""


def setting(
    help: str, default: Any, choices: tuple[str, ...] = (), *, auto: int | None = None
) -> Any:
    """Return a dataclass field that carries its help and choices for the command line.

    auto is the number that the word stands for there.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "auto": auto})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; None means: choose for me."""

    model: str = setting("model file (GGUF), folder (Hugging Face), or 'demo'", "demo")
    max_model_len: int | None = setting("context limit in tokens", None)
    max_num_seqs: int = setting("most sequences running at once", 64)
    max_num_batched_tokens: int = setting("token budget of one step", 512)
    block_size: int = setting(
        "tokens in one KV block; auto (0) is 256 where flash-attn serves on a GPU, else 16",
        BLOCK_TOKENS,
        auto=0,
    )
    kv_blocks: int | None = setting("KV blocks that requests may use", None)
    kv_cache_memory: int | None = setting(
        "bytes for the KV cache; by default 1 GiB, on a GPU what a worst step leaves free", None
    )
    gpu_memory_utilization: float = setting("share of a GPU's memory to use, at most", 0.9)
    batching: str = setting("how batches form", "continuous", BATCHING_MODES)
    window_ms: int = setting("milliseconds a dynamic batch waits for company", 50)
    static_max_tokens: int = setting("max_tokens of requests without one, in fixed batches", 256)
    loop_depth: int | None = setting(
        "steps in flight; 2 plans the next before this one is done, as a GPU has it", None
    )
    scheduling_policy: str = setting("who goes first", "decode_first", POLICY_NAMES)
    enable_prefix_caching: bool = setting("reuse KV blocks of equal prompt beginnings", True)
    prefix_cache_isolation: str = setting("who shares cached blocks", "none", ISOLATIONS)
    enable_chunked_prefill: bool = setting("let a prompt span several steps", True)
    long_prefill_tokens: int | None = setting("most prompt tokens of one request a step", None)
    partial_prefills_max: int | None = setting("most prompts computed in part at a time", None)
    tenant_seqs_max: int | None = setting("most running sequences of one tenant (fair)", None)
    tenant_weights: str = setting("shares of tenants (fair): name=weight, comma separated", "")
    tenants_max: int = setting("most tenants told apart (fair); the rest share one line", 1000)
    priority_age_ms: int = setting("waiting that makes up for one level of priority", 10_000)
    ttft_ms: float = setting("time to first token that slo aims at, ms", 1000.0)
    tpot_ms: float = setting("time per later token that slo aims at, ms", 100.0)
    policy_preemptions_max: int = setting("most preemptions by policy in one step", 1)
    dtype: str = setting("weight and activation type", "auto", DTYPES)
    kv_cache_dtype: str = setting(
        "type of keys and values; auto: int8 beside int8 and int4, else that of activations",
        "auto",
        KV_TYPES,
    )
    device: str = setting("where the model runs", "auto", DEVICES)
    attention_backend: str = setting("attention kernels", "auto", ATTENTION_BACKENDS)
    decode_buckets: str = setting(
        "row counts to pad decode steps to, comma separated; auto: 1, 2, 4, 8, 16, 24 ... on a GPU",
        "auto",
    )
    graphs: str = setting("replay captured decode steps; auto: on a GPU", "auto", GRAPHS)
    nvtx: bool = setting("mark steps for NVIDIA's profilers", False)
    engine_threads: int | None = setting("threads of the CPU engine", None)
    packed_cache: str | None = setting("folder that keeps packed weights for the next start", None)
    packed_cache_bytes: int = setting("most bytes kept there; 0 keeps none", 8 * 2**30)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Return the decode buckets, ascending."""
        if self.decode_buckets == "auto":
            return ()
        return tuple(sorted({int(part) for part in self.decode_buckets.split(",") if part}))

    @property
    def weights(self) -> dict[str, float]:
        """Return tenants' weights by name."""
        pairs = (part.split("=") for part in self.tenant_weights.split(",") if part)
        return {name: float(weight) for name, weight in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What the device decides: its name, what `auto` stands for, bytes for the KV cache.

    pool_bytes None is the default; a GPU's are measured once the model is there.
    """

    device: str
    auto_dtype: str
    threads: int
    pool_bytes: int | None = None
    block_tokens: int = BLOCK_TOKENS


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: str) -> int:
    """Return the bytes of keys and values one token holds over all layers."""
    head = {
        "f32": 4 * spec.head_dim,
        "bf16": 2 * spec.head_dim,
        "int8": spec.head_dim + KV_SCALE_BYTES,
    }
    return 2 * spec.layers * spec.kv_heads * head[kv_dtype]


def _kv_dtype(config: EngineConfig, dtype: str) -> str:
    """Return the type of keys and values in force; raise ConfigError where none computes so."""
    if (asked := config.kv_cache_dtype) == "auto":
        return KV_AUTO[dtype]
    own = ("f32",) if dtype == "f32" else ("bf16", "int8")
    if asked not in own:
        raise ConfigError(
            f"--kv-cache-dtype {asked}: beside --dtype {dtype} it may be {' or '.join(own)}"
        )
    return asked


def resolve(config: EngineConfig, spec: ModelSpec, facts: DeviceFacts) -> EngineConfig:
    """Return the configuration in force: no None, no auto (attention_backend excepted).

    The effective max_model_len is min(asked, model, pool tokens). With chunked prefill off a step
    must hold the longest prompt, so max_num_batched_tokens is raised to it. The attention backend
    is chosen by kernels/select.py, which also says why others refused.
    """
    check_engine(config)
    dtype = facts.auto_dtype if config.dtype == "auto" else config.dtype
    block_size = config.block_size or facts.block_tokens
    kv_dtype = _kv_dtype(config, dtype)
    block_bytes = kv_bytes_per_token(spec, kv_dtype) * block_size
    pool_bytes = config.kv_cache_memory or facts.pool_bytes or KV_CACHE_MEMORY
    blocks = config.kv_blocks or pool_bytes // block_bytes
    if blocks < 2 or (config.kv_cache_memory and blocks > KV_BLOCKS_MAX):
        raise ConfigError(
            f"--kv-cache-memory {pool_bytes} holds {blocks} KV blocks of "
            f"{block_bytes} bytes; it must be 2 to {KV_BLOCKS_MAX}"
        )
    pool_tokens = blocks * block_size
    model_len = min(config.max_model_len or spec.model_len, spec.model_len, pool_tokens)
    budget = config.max_num_batched_tokens
    if not config.enable_chunked_prefill:
        budget = max(budget, model_len)
    on_gpu = facts.device == "cuda"
    graphs = ("on" if on_gpu else "off") if config.graphs == "auto" else config.graphs
    buckets = config.decode_buckets
    if buckets == "auto":
        wanted = buckets_of(config.max_num_seqs) if graphs == "on" else ()
        buckets = ",".join(map(str, wanted))
    return replace(
        config,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        device=facts.device,
        block_size=block_size,
        decode_buckets=buckets,
        graphs=graphs,
        loop_depth=config.loop_depth or (2 if on_gpu else 1),
        kv_cache_memory=pool_bytes,
        kv_blocks=blocks,
        max_model_len=model_len,
        max_num_batched_tokens=budget,
        engine_threads=config.engine_threads or facts.threads,
    )


def _check_shares(config: EngineConfig) -> None:
    """Raise ConfigError for a share that is none."""
    if not 0.05 <= config.gpu_memory_utilization <= 1:
        raise ConfigError("--gpu-memory-utilization must lie within 0.05 and 1")
    try:
        weights = config.weights
    except ValueError:
        raise ConfigError("--tenant-weights must be name=number, separated by commas") from None
    if not all(0 < weight < math.inf for weight in weights.values()):
        raise ConfigError("--tenant-weights must be above 0")


def buckets_of(rows_max: int) -> tuple[int, ...]:
    """Return the buckets that steps of up to so many rows need; larger steps have none."""
    return tuple(size for before, size in pairwise((0, *BUCKETS)) if before < rows_max)


def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError for the first setting that no model and no device could make right."""
    for flag, low in (
        ("max_model_len", 2),
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("block_size", 0),
        ("kv_blocks", 2),
        ("kv_cache_memory", 1),
        ("engine_threads", 1),
        ("window_ms", 0),
        ("static_max_tokens", 1),
        ("loop_depth", 1),
        ("long_prefill_tokens", 1),
        ("partial_prefills_max", 1),
        ("tenant_seqs_max", 1),
        ("tenants_max", 1),
        ("priority_age_ms", 1),
        ("policy_preemptions_max", 0),
        ("packed_cache_bytes", 0),
        ("ttft_ms", 0),
        ("tpot_ms", 0),
    ):
        value = getattr(config, flag)
        if value is not None and not value >= low:  # not-a-number is below nothing
            raise ConfigError(f"{flag_name(flag)} must be at least {low}, not {value}")
    for flag, choices in (
        ("batching", BATCHING_MODES),
        ("scheduling_policy", POLICY_NAMES),
        ("dtype", DTYPES),
        ("kv_cache_dtype", KV_TYPES),
        ("prefix_cache_isolation", ISOLATIONS),
        ("device", DEVICES),
        ("attention_backend", ATTENTION_BACKENDS),
        ("graphs", GRAPHS),
    ):
        value = getattr(config, flag)
        if value not in choices:
            raise ConfigError(f"{flag_name(flag)} must be one of {', '.join(choices)}, not {value}")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is below --max-num-seqs "
            f"{config.max_num_seqs}: every running sequence needs a token a step"
        )
    try:
        buckets = config.buckets
    except ValueError:
        raise ConfigError("--decode-buckets must be auto, or numbers with commas") from None
    _check_shares(config)
    if config.dtype != "auto":
        _kv_dtype(config, config.dtype)
    for flag, high in (("engine_threads", THREADS_MAX), ("kv_blocks", KV_BLOCKS_MAX)):
        if (getattr(config, flag) or 1) > high:
            raise ConfigError(f"{flag_name(flag)} must be at most {high}")
    if (config.loop_depth or 1) > 2:
        raise ConfigError("--loop-depth must be 1 or 2")
    if buckets and (buckets[0] < 1 or buckets[-1] > 1024):
        raise ConfigError("--decode-buckets must lie within 1 and 1024")


def flag_name(field_name: str) -> str:
    """Return the command line flag of a config field."""
    return "--" + field_name.replace("_", "-")
