"""Tiny random models of each family that is served, made by transformers itself.

Owns their configurations, their weights (every bias and norm far from its initial value, or a test
would not see it), and their GGUF files, named by the gguf package's own table. A model is small
enough to be made in each test's tmp_path; their tokenizer is tests/tiny.py's, but in
Gemma's GGUF files SentencePiece's lists.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests import tiny

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": tiny.Shape.vocab_size,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 12
SPM_BLANK = "\u2581"
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 8.0}


@dataclass(frozen=True)
class Made:
    """A model in transformers, and what its configuration says beside the sizes."""

    family: str
    config: dict[str, Any]


MODELS: dict[str, Made] = {
    "llama": Made("Llama", {"tie_word_embeddings": False}),
    "llama with biases": Made("Llama", {"attention_bias": True}),
    "llama, linear rope": Made("Llama", {"rope_parameters": {"rope_theta": 1e4, **LINEAR}}),
    "llama, yarn": Made("Llama", {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
    "mistral": Made("Mistral", {"sliding_window": WINDOW}),
    "mistral without a window": Made("Mistral", {"sliding_window": None}),
    "qwen2": Made("Qwen2", {"head_dim": 16}),
    "qwen2, tied": Made("Qwen2", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2 with windows": Made(
        "Qwen2",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "qwen3": Made("Qwen3", {"tie_word_embeddings": True}),
    "qwen3 with biases and yarn": Made(
        "Qwen3", {"attention_bias": True, "rope_parameters": {"rope_theta": 1e6, **YARN}}
    ),
    "qwen3 with windows": Made(
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
        },
    ),
    "gemma2": Made(
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma2 without caps": Made(
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": Made(
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 40,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3, linear rope": Made(
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "rope_parameters": {
                FULL: {"rope_theta": 5e4, **LINEAR},
                SLIDING: {"rope_theta": 2e3, "rope_type": "default"},
            },
        },
    ),
}


def oracle(name: str, **sizes: int) -> Any:
    """Return the model in transformers, with plain attention and random weights."""
    made = MODELS[name]
    config_name = made.family + ("TextConfig" if made.family == "Gemma3" else "Config")
    config = getattr(transformers, config_name)(**SIZES | made.config | sizes)
    config._attn_implementation = "eager"
    model = getattr(transformers, made.family + "ForCausalLM")(config)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=draw)
            if weight.dim() == 2:
                weight.copy_(drawn * (0.5 if "embed" in key else 1.6 / weight.shape[1] ** 0.5))
            else:
                offset = 1.0 if key.endswith("norm.weight") and "Gemma" not in made.family else 0.0
                weight.copy_(offset + 0.3 * drawn)
    return model.eval()


def write(folder: Path, model: Any) -> Path:
    """Write a model as transformers does, with a tokenizer, and return the folder."""
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder, tiny.Shape.vocab_size)
    return folder


# ---- GGUF

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def write_gguf(file: Path, model: Any) -> Path:
    """Write the same model as llama.cpp's converter does: names, norms, the order of rows."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    _add_rope(writer, config)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if config.model_type.startswith("gemma"):
        writer.add_float32(writer.arch + ".attention.scale", config.query_pre_attn_scalar**-0.5)
        writer.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])
        if config.attn_logit_softcapping:
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type.startswith("gemma"):
        _add_sentencepiece(writer)
    else:
        tiny.add_gguf_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(name, _converted(key, weight, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _sentencepiece() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return as many tokens as the models have, and their kinds: pieces of the tests' corpus."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    text = " ".join(tiny.CORPUS[:3]).replace(" ", SPM_BLANK)
    pieces: Counter[str] = Counter()
    for size in (2, 3, 4):
        pieces.update(text[place : place + size] for place in range(len(text) - size))
    most = [piece for piece, _ in pieces.most_common(60)]
    letters = sorted(set("".join(most)))
    tokens += [*most[: SIZES["vocab_size"] - len(tokens) - len(letters)], *letters]
    return tuple(tokens), (3, 3, 3, 2, *[6] * 256, *[1] * (len(tokens) - 260))


SPM_TOKENS, SPM_TYPES = _sentencepiece()


def _add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(SPM_TOKENS))
    writer.add_token_scores([-float(place) for place in range(len(SPM_TOKENS))])
    writer.add_token_types(list(SPM_TYPES))
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def _add_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if SLIDING in rope:
        writer.add_float32(writer.arch + ".rope.freq_base_swa", rope[SLIDING]["rope_theta"])
        rope = rope[FULL]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _converted(key: str, weight: torch.Tensor, config: Any) -> np.ndarray:
    value = weight.float().numpy()
    if config.model_type.startswith("gemma") and key.endswith("norm.weight"):
        return value + np.float32(1)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(key.split(".")[-2])
    if count is None or config.model_type not in ("llama", "mistral"):
        return value
    return tiny.permuted(value.reshape(len(value), -1), count).reshape(value.shape)
