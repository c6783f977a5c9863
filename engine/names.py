"""What files call a decoder's tensors, and the ways in which they store them.

Owns the names in Hugging Face folders and in GGUF files and where families differ; engine/family.py
picks a row's, engine/tensors.py and engine/weights.py read by them. Knows no file and no shape.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of tensors; `weight` and `bias` have places for the layer's number and the part.

    pairs_adjacent: query and key rows that rope turns together lie side by side, not half a head
    apart. norm_offset: what is to be added to every norm's weights.
    """

    embedding: str
    final_norm: str
    head: str
    weight: str
    bias: str
    input_norm: str
    query: str
    key: str
    value: str
    output: str
    query_norm: str
    key_norm: str
    attention_out_norm: str
    post_norm: str
    gate: str
    up: str
    down: str
    feed_out_norm: str
    ignored: str
    pairs_adjacent: bool
    norm_offset: float = 0.0


FOLDER_NAMES = Names(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    weight="model.layers.{}.{}.weight",
    bias="model.layers.{}.{}.bias",
    input_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    attention_out_norm="",
    post_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    feed_out_norm="",
    ignored="rotary_emb.inv_freq",
    pairs_adjacent=False,
)
GEMMA_FOLDER_NAMES = replace(
    FOLDER_NAMES,
    attention_out_norm="post_attention_layernorm",
    post_norm="pre_feedforward_layernorm",
    feed_out_norm="post_feedforward_layernorm",
    norm_offset=1.0,
)
"""Gemma's own weights are what a norm is above 1; GGUF's converter has added it."""

GGUF_NAMES = Names(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    weight="blk.{}.{}.weight",
    bias="blk.{}.{}.bias",
    input_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    output="attn_output",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    attention_out_norm="post_attention_norm",
    post_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    feed_out_norm="post_ffw_norm",
    ignored="rope_freqs.weight",
    pairs_adjacent=True,
)
GGUF_HALVES_NAMES = replace(GGUF_NAMES, pairs_adjacent=False)
"""llama.cpp's converter reorders the rows of llamas alone."""
