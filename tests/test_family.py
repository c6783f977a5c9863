"""What files say of a family: read right when sound, refused by field when not.

Owns the tests of engine/family.py's reading: windows by layer, caps, scales and biases from
config.json and GGUF headers, and the fields that mean what is not computed here.
"""

from pathlib import Path
from typing import Any

import pytest

from engine.family import FAMILIES, Form, family_of_folder
from engine.model_files import Fields, GgufHeader, GgufTensor, SpecError
from engine.names import GEMMA_FOLDER_NAMES, GGUF_HALVES_NAMES, GGUF_NAMES
from engine.spec import _spec_of_gguf, read_spec
from engine.weights import attention_shape
from kernels.base import beyond_a_llama
from tests import tiny

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    **{"hidden_size": 1024, "num_attention_heads": 32, "num_hidden_layers": 4},
    **{"intermediate_size": 96, "vocab_size": 320},
}


def form(tmp_path: Path, kind: str, **values: Any) -> Form:
    """Return the form of a config.json that says no more than this."""
    tiny.write_json(tmp_path / "config.json", {"model_type": kind, **SIZES, **values})
    return read_spec(str(tmp_path)).form


def refusal(tmp_path: Path, kind: str, **values: Any) -> str:
    with pytest.raises(SpecError) as caught:
        form(tmp_path, kind, **values)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_config_leaves_out_is_its_familys(tmp_path: Path) -> None:
    assert form(tmp_path, "llama") == Form()
    assert form(tmp_path, "llama", sliding_window=8) == Form(), "a llama has no windows"
    assert form(tmp_path, "mistral") == Form(windows=(4096,) * 4)
    assert form(tmp_path, "qwen2", sliding_window=8) == Form(qkv_bias=True)
    assert form(tmp_path, "qwen3") == Form(head_norms=True)
    gemma = form(tmp_path, "gemma3_text", num_hidden_layers=7)
    assert gemma.windows == (*(4096,) * 5, 0, 4096)
    assert (gemma.activation, gemma.embedding_scale, gemma.query_scale) == (
        "gelu_tanh",
        32.0,
        1 / 16,
    )
    assert (gemma.attention_cap, gemma.logits_cap) == (None, None)
    spec = read_spec(str(tmp_path))
    assert (spec.head_dim, spec.kv_heads, spec.tied_head) == (256, 4, True)
    assert (spec.rope.base, spec.form.local_rope and spec.form.local_rope.base) == (1e6, 1e4)
    assert spec.names == GEMMA_FOLDER_NAMES
    older = form(tmp_path, "gemma2")
    assert (older.attention_cap, older.logits_cap, older.local_rope) == (50.0, 30.0, None)
    assert older.windows == (4096, 0, 4096, 0)


def test_layers_with_a_window_are_named_counted_or_all(tmp_path: Path) -> None:
    named = {"layer_types": [FULL, SLIDING, FULL, SLIDING], "sliding_window": 8}
    assert form(tmp_path, "qwen3", use_sliding_window=True, **named).windows == (0, 8, 0, 8)
    assert form(tmp_path, "gemma3_text", **named).windows == (0, 8, 0, 8)
    upper = {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 8}
    assert form(tmp_path, "qwen2", **upper).windows == (0, 0, 0, 8)
    assert form(tmp_path, "gemma3_text", sliding_window_pattern=2).windows == (4096, 0, 4096, 0)
    assert form(tmp_path, "mistral", sliding_window=None).windows == ()
    assert form(tmp_path, "gemma3_text", layer_types=[FULL] * 4).local_rope is None


@pytest.mark.parametrize(
    ("kind", "values", "cause"),
    [
        ("gemma3", {}, "model_type is 'gemma3'; supported are llama, mistral, qwen2, qwen3"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_act is 'gelu'; supported are silu"),
        ("gemma3_text", {"hidden_activation": ["x"]}, "hidden_activation is not a text"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma3_text", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is missing"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window is missing"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window is 0"),
        ("gemma3_text", {"sliding_window": 2**40}, "sliding_window is 1099511627776"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
        ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping is not a number"),
        ("qwen3", {"layer_types": [FULL]}, "layer_types does not name 4 layers"),
        ("qwen3", {"layer_types": "x"}, "layer_types does not name 4 layers"),
        ("qwen3", {"layer_types": [FULL] * 3 + [["x"]]}, "layer_types holds ['x']"),
        ("qwen3", {"layer_types": [FULL] * 3 + ["linear_attention"]}, "'linear_attention'"),
        ("qwen3", {"layer_types": [SLIDING] * 4}, "use_sliding_window is not true"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers is -1"),
        ("qwen2", {"attention_bias": True}, "attention_bias is not supported in qwen2"),
        ("llama", {"model_type": 7}, "model_type is not a text"),
    ],
)
def test_a_field_that_means_something_else_is_named(
    tmp_path: Path, kind: str, values: dict[str, Any], cause: str
) -> None:
    assert cause in refusal(tmp_path, kind, **values)


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 3.2 1B": (
        {
            **{
                "model_type": "llama",
                "head_dim": 64,
                "hidden_act": "silu",
                "attention_bias": False,
            },
            **{"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8},
            **{"num_hidden_layers": 16, "mlp_bias": False, "tie_word_embeddings": True},
            "rope_scaling": {
                **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
                **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
            },
        },
        {"windows": (), "beyond": ()},
    ),
    "Mistral 7B v0.1": (
        {
            **{"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32},
            **{"num_hidden_layers": 2, "num_key_value_heads": 8, "sliding_window": 4096},
        },
        {"windows": (4096, 4096), "beyond": ()},
    ),
    "Mistral 7B v0.3": (
        {
            **{"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32},
            **{"num_hidden_layers": 2, "num_key_value_heads": 8, "sliding_window": None},
        },
        {"windows": (), "beyond": ()},
    ),
    "Qwen2.5 0.5B": (
        {
            **{"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14},
            **{"num_key_value_heads": 2, "num_hidden_layers": 24, "max_window_layers": 24},
            **{"sliding_window": 32768, "use_sliding_window": False, "tie_word_embeddings": True},
        },
        {"windows": (), "beyond": ("biases",)},
    ),
    "Qwen3 0.6B": (
        {
            **{"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16},
            **{"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28},
            **{"attention_bias": False, "max_window_layers": 28, "rope_scaling": None},
            **{"sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True},
        },
        {"windows": (), "beyond": ("norms of heads",)},
    ),
    "Gemma 3 1B": (
        {
            **{"model_type": "gemma3_text", "hidden_size": 1152, "num_attention_heads": 4},
            **{"num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 26},
            **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
            **{"query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None},
            **{"rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6},
        },
        {
            "windows": ((*(512,) * 5, 0) * 5)[:26],
            "beyond": (
                *("norms of heads", "norms of what layers add", "gelu"),
                *("scaled embeddings", "two ropes"),
            ),
        },
    ),
}
"""Parts of configurations as their authors publish them, and what is to be read of them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(tmp_path: Path, name: str) -> None:
    config, expected = PUBLISHED[name]
    sizes = {"intermediate_size": 64, "vocab_size": 320, "max_position_embeddings": 131072}
    tiny.write_json(tmp_path / "config.json", sizes | config)
    shape = attention_shape(read_spec(str(tmp_path)))
    assert (shape.windows, shape.beyond) == (expected["windows"], expected["beyond"])
    assert (shape.scale, shape.cap) == (None, None)
    assert bool(beyond_a_llama(shape)) == bool(shape.windows or shape.beyond)


# ---- GGUF

GGUF_SIZES = {
    **{"block_count": 4, "embedding_length": 64, "feed_forward_length": 96},
    **{"context_length": 512, "attention.head_count": 4, "attention.key_length": 16},
    **{"attention.layer_norm_rms_epsilon": 1e-6},
}


def gguf_form(
    architecture: str,
    biases: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    **values: Any,
) -> Form:
    """Return the form of a GGUF header; `__` in a key stands for a dot."""
    named = {key.replace("__", "."): value for key, value in values.items()}
    metadata = {f"{architecture}.{key}": value for key, value in (GGUF_SIZES | named).items()}
    tensors = {name: GgufTensor(name, (16,), 0, 0, 64) for name in biases}
    tensors["token_embd.weight"] = GgufTensor("token_embd.weight", (320, 64), 0, 0, 64)
    metadata |= {"general.architecture": architecture} | (extra or {})
    return _spec_of_gguf(GgufHeader(Path("m.gguf"), metadata, tensors)).form


def test_a_gguf_says_it_by_other_keys() -> None:
    assert gguf_form("llama") == Form()
    assert gguf_form("llama", attention__sliding_window=8).windows == (8,) * 4
    biased = gguf_form("llama", ("blk.0.attn_q.bias", "blk.0.attn_output.bias"))
    assert biased == Form(qkv_bias=True, output_bias=True)
    assert gguf_form("qwen2", attention__sliding_window=8) == Form(qkv_bias=True)
    gemma = gguf_form("gemma3", attention__sliding_window=8, block_count=7)
    assert gemma.windows == (*(8,) * 5, 0, 8)
    assert (gemma.query_scale, gemma.logits_cap) == (None, None)
    assert gemma.local_rope is not None
    assert gemma.local_rope.base == 1e4
    each = gguf_form("gemma3", attention__sliding_window=8, attention__sliding_window_pattern=2)
    assert each.windows == (8, 0, 8, 0)
    listed = {"attention__sliding_window_pattern": [False, True, True, False]}
    assert gguf_form("gemma3", attention__sliding_window=8, **listed).windows == (0, 8, 8, 0)
    assert gguf_form("gemma3", attention__sliding_window=0).windows == ()
    older = gguf_form("gemma2")
    assert (older.attention_cap, older.logits_cap) == (50.0, 30.0)
    assert older.windows == (4096, 0, 4096, 0)


def test_the_largest_gemmas_scale_queries_by_their_width() -> None:
    """Gemma 2 and 3 27B: query_pre_attn_scalar is hidden / heads, which no header says."""
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        assert gguf_form(architecture, block_count=layers).query_scale == (64 / 4) ** -0.5
    assert gguf_form("gemma3", attention__scale=0.5).query_scale == 0.5


@pytest.mark.parametrize(
    ("architecture", "values", "cause"),
    [
        ("gemma", {}, "general.architecture is 'gemma'; supported are llama, qwen2, qwen3, gemma2"),
        ("gemma3", {"attention__sliding_window": -1}, "gemma3.attention.sliding_window is -1"),
        ("gemma3", {"attention__sliding_window_pattern": [True]}, "sliding_window_pattern is not"),
        ("gemma3", {"attention__sliding_window_pattern": [1, 0, 1, 0]}, "pattern is not a list of"),
        ("gemma3", {"attention__sliding_window_pattern": "x"}, "pattern is not a whole number"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "gemma2.final_logit_softcapping is 0.0"),
        ("qwen3", {"attention__scale": float("inf")}, "qwen3.attention.scale is inf"),
        ("qwen3", {"attention__value_length": 8}, "qwen3.attention.value_length other than"),
        ("qwen3", {"rope__dimension_count": 8}, "qwen3.rope.dimension_count other than"),
        ("qwen3", {"expert_count": 8}, "mixtures of experts"),
        ("qwen3", {"attention__head_count_kv": [2, 2]}, "head_count_kv is not a whole number"),
    ],
)
def test_a_header_that_means_something_else_is_named(
    architecture: str, values: dict[str, Any], cause: str
) -> None:
    with pytest.raises(SpecError) as caught:
        gguf_form(architecture, **values)
    assert cause in str(caught.value)


def test_a_part_of_a_split_gguf_is_refused() -> None:
    with pytest.raises(SpecError, match="a part of a split GGUF is not supported"):
        gguf_form("llama", extra={"split.count": 3})


def test_the_table_is_whole() -> None:
    for kind, family in FAMILIES.items():
        assert family_of_folder(Fields(Path("c"), {"model_type": kind})) is family
        assert family.gguf_names in (GGUF_NAMES, GGUF_HALVES_NAMES)
        assert "max_position_embeddings" in family.defaults
    assert len({family.name for family in FAMILIES.values()}) == len(FAMILIES)
