"""A seeded tiny llama for tests: a real Hugging Face folder, or a real GGUF file, in a second.

Owns its shape, its weights (a pure function of the seed, numpy only) and its byte-level BPE
tokenizer with a chat template. Any test may write one into its own tmp_path; nothing is fetched.
The rows of special tokens are small, so that greedy text practically never ends by itself.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_IDS = (0, 2)
CORPUS = (
    "The scheduler decides again at every iteration who is in the batch.",
    "A request waits, runs, is preempted, runs again and is finished.",
    "Blocks of the cache are taken, shared, freed and taken again; nothing is lost.",
    "Der Zug fährt früh, die Straße ist naß; 東京は今日も晴れです。 👩‍👩‍👧‍👦 🙂",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are tiny.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The tiny model's sizes; the defaults have grouped heads and an odd number of layers."""

    layers: int = 3
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 96
    vocab_size: int = 320
    model_len: int = 2048
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = True


def write(folder: Path, seed: int = 0, shape: Shape | None = None) -> Path:
    """Write the tiny model as a Hugging Face folder and return that folder."""
    shape = shape or Shape()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config(shape))
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": list(EOS_IDS), "pad_token_id": 0},
    )
    save_file(tensors(seed, shape), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, shape.vocab_size)
    return folder


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def config(shape: Shape) -> dict[str, object]:
    """Return the content of config.json, as transformers 5 writes it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.model_len,
        "rope_parameters": {"rope_theta": shape.rope_base, "rope_type": "default"},
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def tensors(seed: int = 0, shape: Shape | None = None) -> dict[str, Array]:
    """Return the weights by their Hugging Face names, f32."""
    shape = shape or Shape()
    draw = np.random.default_rng(seed)

    def normal(rows: int, columns: int, scale: float) -> Array:
        return (draw.standard_normal((rows, columns)) * scale).astype(np.float32)

    def around_one() -> Array:
        return (1 + 0.1 * draw.standard_normal(shape.hidden)).astype(np.float32)

    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = 1.6 / shape.hidden**0.5
    embedding = normal(shape.vocab_size, shape.hidden, 0.4)
    embedding[: len(SPECIALS)] *= 0.05
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": around_one()}
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        weights[name + "input_layernorm.weight"] = around_one()
        weights[name + "self_attn.q_proj.weight"] = normal(query, shape.hidden, inner)
        weights[name + "self_attn.k_proj.weight"] = normal(key, shape.hidden, inner)
        weights[name + "self_attn.v_proj.weight"] = normal(key, shape.hidden, inner)
        weights[name + "self_attn.o_proj.weight"] = normal(shape.hidden, query, inner)
        weights[name + "post_attention_layernorm.weight"] = around_one()
        weights[name + "mlp.gate_proj.weight"] = normal(shape.intermediate, shape.hidden, inner)
        weights[name + "mlp.up_proj.weight"] = normal(shape.intermediate, shape.hidden, inner)
        weights[name + "mlp.down_proj.weight"] = normal(shape.hidden, shape.intermediate, inner)
    if not shape.tied:
        head = normal(shape.vocab_size, shape.hidden, 0.4)
        head[: len(SPECIALS)] *= 0.05
        weights["lm_head.weight"] = head
    return weights


def tokenizer(vocab_size: int = Shape.vocab_size) -> Tokenizer:
    """Train the byte-level BPE tokenizer: three specials, 256 bytes, the rest merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    if bpe.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus gives {bpe.get_vocab_size()} tokens, not {vocab_size}")
    return bpe


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[1],
            "eos_token": SPECIALS[2],
            "pad_token": SPECIALS[0],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


Stored = Callable[[gguf.GGUFWriter, str, Array], None]
"""Adds one tensor, by its Hugging Face name, in a form of its own."""


def write_gguf(
    file: Path,
    seed: int = 0,
    shape: Shape | None = None,
    extra: dict[str, Array] | None = None,
    stored: Stored | None = None,
) -> Path:
    """Write the same model as one GGUF file (f32), query and key rows permuted as GGUF has them.

    `extra` are further tensors, by their GGUF names.
    """
    shape = shape or Shape()
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.model_len)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    add_gguf_tokenizer(writer, shape.vocab_size)
    for name, weight in tensors(seed, shape).items():
        if stored:
            stored(writer, name, weight)
        else:
            writer.add_tensor(gguf_name(name), gguf_rows(name, weight, shape))
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def merges(vocab_size: int = Shape.vocab_size) -> list[tuple[str, str]]:
    saved = json.loads(tokenizer(vocab_size).to_str())["model"]
    return [(left, right) for left, right in saved["merges"]]


def add_gguf_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    saved = json.loads(tokenizer(vocab_size).to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in saved["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face tensor."""
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{parts[rest]}.weight"
    return parts[stem] + ".weight"


def gguf_rows(name: str, weight: Array, shape: Shape) -> Array:
    """Return a tensor with its rows in a GGUF's order."""
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}.get(name.split(".")[-2])
    return permuted(weight, heads) if heads else weight


def permuted(weight: Array, heads: int) -> Array:
    """Reorder the rows of each head from halves to interleaved pairs (llama.cpp's converter)."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
