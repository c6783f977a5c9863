"""The decoder against transformers, and weights that are complete or refused by name.

Owns the oracle tests: the tiny model in every form a checkpoint takes, and the demo model from the
same dequantized weights in float32. Also every damaged or incomplete checkpoint, each refused in
one line that names the file or the tensor.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model import Decoder
from engine.spec import ModelSpec, SpecError, read_spec
from engine.weights import SAFETENSORS_NAMES, expected_shapes, load_weights, open_source
from kernels.base import AttentionBatch, Cache, DecoderWeights, StepBatch
from kernels.ops import TorchOps
from kernels.sdpa import SdpaBackend
from tests import tiny
from tests.steps import Hand, load

PROMPT = [5, 310, 17, 17, 99, 200, 3, 41, 42, 43, 250, 7, 8, 300, 61]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep PyTorch from spinning on every core beside the tests' other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights_of(path: Path, dtype: str = "f32", positions: int = 8) -> DecoderWeights:
    return load_weights(
        read_spec(str(path)),
        dtype=dtype,
        device="cpu",
        positions=positions,
        pack=TorchOps().pack,
        progress=lambda stage, fraction: None,
    )


def step_of(tokens: list[int]) -> StepBatch:
    """Return one row's whole prompt as a step that wants the logits of every token."""
    count = len(tokens)
    return StepBatch(
        input_ids=torch.tensor(tokens),
        positions=torch.arange(count),
        sample_tokens=torch.arange(count),
        attention=AttentionBatch(
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            context_lengths=torch.tensor([count], dtype=torch.int32),
            slot_mapping=torch.arange(16, 16 + count),
            block_tables=torch.arange(1, 1 + -(-count // 16), dtype=torch.int32)[None],
            query_lengths_host=[count],
            context_lengths_host=[count],
        ),
    )


@torch.inference_mode()
def logits_of(path: Path, tokens: list[int], dtype: str = "f32") -> torch.Tensor:
    """Return our logits of every token of a prompt."""
    weights, backend = weights_of(path, dtype, len(tokens)), SdpaBackend()
    torch_dtype = weights.embedding.dtype
    cache = backend.allocate_kv(weights.shape, 2 + len(tokens) // 16, 16, torch_dtype, "cpu")
    return Decoder(weights, backend, TorchOps()).forward(step_of(tokens), cache)


@torch.inference_mode()
def oracle_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Return transformers' logits of every token of a prompt."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("shape", "extra"),
    [
        (tiny.Shape(), {}),
        (tiny.Shape(tied=False), {}),
        (tiny.Shape(heads=8, kv_heads=4, head_dim=12), {}),
        (tiny.Shape(kv_heads=4), {}),
        (tiny.Shape(kv_heads=1, rope_base=5e5, norm_eps=1e-3), {}),
        (tiny.Shape(), {"rope_parameters": LLAMA3}),
    ],
    ids=["tied", "untied", "wide heads", "all heads", "one head", "llama3 rope"],
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, shape: tiny.Shape, extra: dict[str, object]
) -> None:
    folder = tiny.write(tmp_path / "model", shape=shape)
    config = folder / "config.json"
    tiny.write_json(config, json.loads(config.read_text()) | extra)
    expected = oracle_logits(folder, PROMPT * 4)
    assert (logits_of(folder, PROMPT * 4) - expected).abs().max() < 2e-4
    if not extra:
        file = tiny.write_gguf(tmp_path / "tiny.gguf", shape=shape)
        assert (logits_of(file, PROMPT * 4) - expected).abs().max() < 2e-4


def test_rope_frequencies_of_a_gguf_are_divided_by_its_factors(tmp_path: Path) -> None:
    plain = weights_of(tiny.write_gguf(tmp_path / "plain.gguf")).rotations
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    file = tiny.write_gguf(tmp_path / "scaled.gguf", extra={"rope_freqs.weight": factors})
    scaled = weights_of(file).rotations
    angles = torch.atan2(plain[1, :, 1], plain[1, :, 0]) / torch.from_numpy(factors)
    assert torch.allclose(scaled[1, :, 0], angles.cos(), atol=1e-6)
    assert torch.allclose(scaled[1, :, 1], angles.sin(), atol=1e-6)


def test_bf16_is_near_f32(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    exact, rough = logits_of(folder, PROMPT), logits_of(folder, PROMPT, "bf16")
    assert 0 < (exact - rough).abs().max() < 0.05 * exact.abs().max()


def test_half_precision_checkpoints_load(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    exact = logits_of(folder, PROMPT)
    tensors = {name: torch.from_numpy(value) for name, value in tiny.tensors().items()}
    for dtype in (torch.bfloat16, torch.float16):
        save_torch({k: v.to(dtype) for k, v in tensors.items()}, folder / "model.safetensors")
        assert (logits_of(folder, PROMPT) - exact).abs().max() < 0.05 * exact.abs().max()


class WholeStep(SdpaBackend):
    """A backend that runs the whole step itself, as a native one would: it doubles the logits."""

    name = "whole"

    def step(self, weights: DecoderWeights, batch: StepBatch, cache: Cache) -> torch.Tensor:
        return 2 * Decoder(weights, SdpaBackend(), TorchOps()).forward(batch, cache)


@torch.inference_mode()
def test_a_backend_may_run_the_whole_step(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    weights, backend = weights_of(folder, positions=len(PROMPT)), WholeStep()
    cache = backend.allocate_kv(weights.shape, 4, 16, torch.float32, "cpu")
    logits = Decoder(weights, backend, TorchOps()).forward(step_of(PROMPT), cache)
    assert torch.equal(logits, 2 * logits_of(folder, PROMPT))


# ---- the demo model


@pytest.fixture(scope="module")
def demo_oracle(demo_model: Path) -> LlamaForCausalLM:
    """The demo model in transformers, from the same dequantized weights, in float32."""
    spec = read_spec(str(demo_model))
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.model_len,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_base},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    state = dequantized(spec)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.eval()
    return model


def dequantized(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return a GGUF's tensors by their Hugging Face names, query and key rows in two halves."""
    names = list(expected_shapes(spec, SAFETENSORS_NAMES, has_head=False))
    heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}
    state: dict[str, torch.Tensor] = {}
    with open_source(spec.path) as source:
        for name in names:
            weight = source.load(tiny.gguf_name(name))
            if count := heads.get(name.split(".")[-2]):
                pairs = weight.view(count, spec.head_dim // 2, 2, -1)
                weight = pairs.transpose(1, 2).reshape(weight.shape)
            state[name] = weight
    return state


CHAT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407]
CHAT += [
    19712,
    8182,
    2,
    198,
    1,
    4093,
    198,
    1780,
    314,
    260,
    3575,
    282,
    4649,
    47,
    2,
    198,
    1,
    520,
    9531,
]
CHAT += [198]
"""The model's own system line, 'What is the capital of France?', and the assistant's turn."""


@torch.inference_mode()
def test_the_demo_models_greedy_ids_are_those_of_transformers(
    demo_model: Path, demo_oracle: LlamaForCausalLM
) -> None:
    expected = demo_oracle.generate(
        torch.tensor([CHAT]),
        max_new_tokens=32,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    hand = Hand(load(demo_model, dtype="f32", max_model_len=512))
    row, other = hand.add(CHAT, 32), hand.add(CHAT[::-1], 32)
    hand.finish(row, outputs=32)
    assert row.tokens == expected
    again = hand.add(CHAT, 32)
    hand.finish(again, other, outputs=32, chunk=7)
    assert again.tokens == expected


@torch.inference_mode()
def test_the_demo_models_logits_are_those_of_transformers(
    demo_model: Path, demo_oracle: LlamaForCausalLM
) -> None:
    prompt = CHAT * 5
    expected = demo_oracle(torch.tensor([prompt])).logits[0]
    difference = (logits_of(demo_model, prompt) - expected).abs().max().item()
    assert difference < 5e-4


# ---- checkpoints: whole, or refused by name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "model")


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change the tensors of a folder's one safetensors file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        weights_of(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_tied_model_may_repeat_its_head(folder: Path) -> None:
    expected = logits_of(folder, PROMPT)
    rewrite(folder, lambda all: all.update({"lm_head.weight": all["model.embed_tokens.weight"]}))
    assert torch.equal(logits_of(folder, PROMPT), expected)
    weights = weights_of(folder)
    assert weights.head is weights.embedding, "a head that is the embedding is not held twice"


def test_a_tied_model_with_a_head_of_its_own_is_read_as_transformers_does(folder: Path) -> None:
    other = tiny.tensors(9)["model.embed_tokens.weight"]
    rewrite(folder, lambda all: all.update({"lm_head.weight": other}))
    expected = oracle_logits(folder, PROMPT)
    assert (logits_of(folder, PROMPT) - expected).abs().max() < 2e-4


def test_old_checkpoints_may_carry_rope_frequencies(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    rewrite(folder, lambda all: all.update(extra))
    weights_of(folder)


def drop_layer(all: dict[str, np.ndarray]) -> None:
    for name in [name for name in all if name.startswith("model.layers.2.")]:
        del all[name]


def poison(all: dict[str, np.ndarray]) -> None:
    all["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan


def overflow(all: dict[str, np.ndarray]) -> None:
    all["model.norm.weight"][0] = np.inf


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda all: all.pop("model.norm.weight"), "'model.norm.weight' is missing"),
        (lambda all: all.pop("model.embed_tokens.weight"), "embed_tokens.weight' is missing"),
        (drop_layer, "'model.layers.2.input_layernorm.weight' is missing"),
        (lambda all: all.update({"extra.weight": np.ones(3, np.float32)}), "'extra.weight'"),
        (
            lambda all: all.update({"model.layers.3.mlp.up_proj.weight": np.ones((2, 2))}),
            "'model.layers.3.mlp.up_proj.weight' is not known",
        ),
        (
            lambda all: all.update({"model.norm.weight": np.ones(65, np.float32)}),
            "'model.norm.weight' has shape [65], not [64]",
        ),
        (
            lambda all: all.update({"lm_head.weight": np.ones((64, 320), np.float32)}),
            "'lm_head.weight' has shape [64, 320], not [320, 64]",
        ),
        (poison, "'model.layers.1.mlp.up_proj.weight' holds values that are not finite"),
        (overflow, "'model.norm.weight' holds values that are not finite"),
        (
            lambda all: all.update({"model.norm.weight": np.ones(64, np.int32)}),
            "'model.norm.weight' has type I32",
        ),
    ],
)
def test_an_incomplete_or_foreign_checkpoint_is_refused_by_tensor(
    folder: Path, change: Callable[[dict[str, np.ndarray]], object], cause: str
) -> None:
    rewrite(folder, change)
    message = refusal(folder)
    assert cause in message
    assert str(folder) in message


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model", shape=tiny.Shape(tied=False))
    rewrite(folder, lambda all: all.pop("lm_head.weight"))
    assert "'lm_head.weight' is missing" in refusal(folder)


def test_an_eight_bit_float_checkpoint_is_refused(folder: Path) -> None:
    tensors = {name: torch.from_numpy(value) for name, value in tiny.tensors().items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_torch(tensors, folder / "model.safetensors")
    assert "'model.norm.weight' has type F8_E4M3" in refusal(folder)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda raw: raw[:-1024], "cut short or damaged"),
        (lambda raw: raw[:100], "cut short or damaged"),
        (lambda raw: raw[:4], "cut short or damaged"),
        (lambda raw: b"\xff" * 8 + raw[8:], "cut short or damaged"),
        (lambda raw: b"", "the file is empty"),
        (lambda raw: LFS_POINTER, "a Git LFS pointer"),
    ],
)
def test_a_damaged_safetensors_file_is_named(
    folder: Path, damage: Callable[[bytes], bytes], cause: str
) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert f"{file}: {cause}" in refusal(folder)


def split(folder: Path) -> Path:
    """Turn a folder's one file into two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names = sorted(tensors)
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, folder / file)
    places = {name: files[index % 2] for index, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    tiny.write_json(index, {"metadata": {}, "weight_map": places})
    return index


def test_shards_are_one_model(folder: Path) -> None:
    expected = logits_of(folder, PROMPT)
    split(folder)
    assert torch.equal(logits_of(folder, PROMPT), expected)


def test_shards_that_are_missing_or_elsewhere_are_refused(folder: Path) -> None:
    index = split(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.rename(folder.parent / "elsewhere.safetensors")
    assert f"{shard}: no such file" in refusal(folder)
    tiny.write_json(index, {"weight_map": {"a": "../elsewhere.safetensors"}})
    assert f"{index}: weight_map" in refusal(folder)
    tiny.write_json(index, {})
    assert f"{index}: weight_map" in refusal(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert f"{folder}: 0 safetensors files" in refusal(folder)


def test_a_gguf_with_too_few_layers_is_refused(tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf")
    spec = replace(read_spec(str(file)), layers=4)
    with pytest.raises(SpecError, match=r"'blk\.3\.attn_norm\.weight' is missing"):
        load_weights(
            spec,
            dtype="f32",
            device="cpu",
            positions=8,
            pack=TorchOps().pack,
            progress=lambda stage, fraction: None,
        )


def test_a_gguf_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf")
    raw = bytearray(file.read_bytes())
    raw[-8:-4] = np.float32(np.nan).tobytes()
    file.write_bytes(raw)
    assert "holds values that are not finite" in refusal(file)


def test_progress_is_told_and_ends_at_one(folder: Path) -> None:
    told: list[tuple[str, float]] = []
    load_weights(
        read_spec(str(folder)),
        dtype="f32",
        device="cpu",
        positions=8,
        pack=TorchOps().pack,
        progress=lambda stage, fraction: told.append((stage, fraction)),
    )
    assert [stage for stage, _ in told] == ["loading weights"] * 3
    assert told[-1][1] == 1.0
    assert sorted(told) == told
