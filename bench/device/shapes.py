"""Models of known shapes with random weights: nothing is read, all else is as in an engine.

Owns the shapes (Qwen3-0.6B's, Llama-3.1-8B's, a tiny one), their weights on the device, and the
runner made of them. The parts of the device check use them. Tokens of such a model mean nothing,
its steps cost what those of the real one do.
"""

import gc
from dataclasses import replace

import torch

from bench.device.table import Bench
from engine.config import DeviceFacts, EngineConfig, resolve
from engine.rope import Rope
from engine.rotation import rotations
from engine.runner import ModelRunner
from engine.spec import ModelSpec
from engine.weights import TORCH_DTYPES, attention_shape
from kernels.base import DecoderWeights, LayerWeights
from kernels.select import Choice, choose

TINY = ModelSpec(
    path="tiny",
    architecture="llama",
    layers=1,
    hidden=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    intermediate=96,
    vocab_size=512,
    rope=Rope(),
    norm_eps=1e-5,
    tied_head=True,
    model_len=64,
    bos_id=None,
    eos_ids=(),
    parameters=0,
)
QWEN3_06B = replace(
    TINY,
    path="0.6B",
    layers=28,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=3072,
    vocab_size=151936,
    model_len=4096,
)
LLAMA_8B = replace(
    TINY,
    path="8B",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab_size=128256,
    tied_head=False,
    model_len=4096,
)


def chosen(bench: Bench, spec: ModelSpec, config: EngineConfig) -> Choice:
    """Return the kernels that serve a shape here."""
    return choose(
        config.attention_backend,
        attention_shape(spec),
        device=bench.device,
        dtype=TORCH_DTYPES[config.dtype],
        block_tokens=config.block_size,
    )


def settled(bench: Bench, spec: ModelSpec, **settings: object) -> EngineConfig:
    """Return the configuration in force: what a GPU has by default, in bf16; f32 on a CPU."""
    dtype = "f32" if bench.device == "cpu" else "bf16"
    asked = EngineConfig(
        model=spec.path,
        device=bench.device,
        dtype=dtype,
        enable_prefix_caching=False,
        **settings,  # type: ignore[arg-type]
    )
    return resolve(asked, spec, DeviceFacts(device=bench.device, auto_dtype=dtype, threads=1))


def runner_of(bench: Bench, spec: ModelSpec, config: EngineConfig) -> ModelRunner:
    """Return a runner over random weights, once all of the one before is gone."""
    gc.collect()
    if bench.device == "cuda":
        torch.cuda.empty_cache()
    choice = chosen(bench, spec, config)
    with torch.inference_mode():
        weights = random_weights(bench, spec, choice, TORCH_DTYPES[config.dtype])
        return ModelRunner(config=config, spec=spec, weights=weights, choice=choice)


def random_weights(
    bench: Bench, spec: ModelSpec, choice: Choice, dtype: torch.dtype
) -> DecoderWeights:
    """Return weights that keep activations near 1: products over n values are divided by its root.

    They are made on the device, so that 16 GB of them take a second.
    """
    made = torch.Generator(device=bench.device).manual_seed(7)
    pack, hidden = choice.ops.pack, spec.hidden

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        plain = torch.empty((outputs, inputs), dtype=dtype, device=bench.device)
        return plain.normal_(0.0, inputs**-0.5, generator=made)

    ones = torch.ones(hidden, dtype=dtype, device=bench.device)
    heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=ones,
            qkv=pack(matrix(heads, hidden)),
            output=pack(matrix(hidden, spec.heads * spec.head_dim)),
            post_norm=ones,
            gate_up=pack(matrix(2 * spec.intermediate, hidden)),
            down=pack(matrix(hidden, spec.intermediate)),
        )
        for _ in range(spec.layers)
    )
    embedding = matrix(spec.vocab_size, hidden)
    head = embedding if spec.tied_head else matrix(spec.vocab_size, hidden)
    turns = rotations(spec.rope, head_dim=spec.head_dim, positions=spec.model_len)
    return DecoderWeights(
        shape=attention_shape(spec),
        norm_eps=spec.norm_eps,
        embedding=embedding,
        layers=layers,
        final_norm=ones,
        head=pack(head),
        rotations=turns.to(bench.device),
    )
