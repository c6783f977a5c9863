"""The decoder against transformers: the same logits, the same greedy text.

Owns the oracle tests: the tiny model in every shape a llama takes, and the demo model from the same
dequantized weights in float32; also the hook of a backend that runs whole steps.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file as save_torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model import Decoder
from engine.names import FOLDER_NAMES
from engine.spec import ModelSpec, read_spec
from engine.tensors import expected_shapes
from engine.weights import open_source
from kernels.base import Cache, DecoderWeights, StepBatch
from kernels.ops import TorchOps
from kernels.sdpa import SdpaBackend
from tests import tiny
from tests.oracle import PROMPT, logits_of, oracle_logits, step_of, weights_of
from tests.steps import Hand, load

pytestmark = pytest.mark.usefixtures("one_thread")


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

    def serves(self, weights: DecoderWeights) -> bool:
        return True

    def step(
        self, weights: DecoderWeights, batch: StepBatch, cache: Cache, beat: object
    ) -> torch.Tensor:
        self.hidden = Decoder(weights, SdpaBackend(), TorchOps()).hidden(batch, cache)
        return self.logits_of(weights, batch.sample_tokens)

    def logits_of(self, weights: DecoderWeights, tokens: torch.Tensor) -> torch.Tensor:
        return 2 * Decoder(weights, SdpaBackend(), TorchOps()).logits(self.hidden, tokens)


@torch.inference_mode()
def test_a_backend_may_run_the_whole_step(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    weights, backend = weights_of(folder, positions=len(PROMPT)), WholeStep()
    cache = backend.allocate_kv(weights.shape, 4, 16, torch.float32, "cpu")
    decoder = Decoder(weights, backend, TorchOps())
    logits, others_of = decoder.forward_all(step_of(PROMPT), cache)
    assert torch.equal(logits, 2 * logits_of(folder, PROMPT))
    assert torch.equal(others_of(step_of(PROMPT).sample_tokens), logits)


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
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.base},
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
    names = list(expected_shapes(spec, FOLDER_NAMES, has_head=False))
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
