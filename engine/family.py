"""The families of decoders that are served: a row says how each departs from a llama.

Owns Form, the table, and the reading of what a form needs from config.json or a GGUF header;
engine/spec.py calls it. Adding a family is adding a row, if it computes nothing that
engine/model.py does not. Knows no torch; what is not known of a file is a SpecError, never a guess.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.model_files import Fields, GgufHeader
from engine.names import (
    FOLDER_NAMES,
    GEMMA_FOLDER_NAMES,
    GGUF_HALVES_NAMES,
    GGUF_NAMES,
    Names,
)
from engine.rope import MODEL_LEN_MAX, Rope

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""What config.json calls what a gate goes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a decoder computes beside the products and norms that all have; defaults are a llama's.

    head_norms: queries and keys have a norm over each head before rope. out_norms: attention and
    feed-forward have one before they join the residual. query_scale is 1 / sqrt(head_dim) if None.
    windows: how many tokens each layer sees, itself included, 0 for all; local_rope turns in those
    with a window. A cap holds scores or logits within cap x tanh(value / cap).
    """

    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    out_norms: bool = False
    embedding_scale: float = 1.0
    query_scale: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    windows: tuple[int, ...] = ()
    local_rope: Rope | None = None

    def beyond(self) -> tuple[str, ...]:
        """Return, in words, what of it is outside attention and no llama's."""
        words = {
            "biases": self.qkv_bias,
            "a bias of attention's output": self.output_bias,
            "norms of heads": self.head_norms,
            "norms of what layers add": self.out_norms,
            "gelu": self.activation != "silu",
            "scaled embeddings": self.embedding_scale != 1.0,
            "a cap on logits": self.logits_cap is not None,
            "two ropes": self.local_rope is not None,
        }
        return tuple(word for word, has in words.items() if has)


LLAMA = Form()

Windowed = Callable[[Fields, int], tuple[bool, ...]]
"""Which layers have a window, of config.json and the number of layers."""


def _no_layer(_: Fields, layers: int) -> tuple[bool, ...]:
    return (False,) * layers


def _every_layer(fields: Fields, layers: int) -> tuple[bool, ...]:
    return (fields.content.get("sliding_window") is not None,) * layers


def _upper_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Qwen: those from max_window_layers on, where use_sliding_window says so."""
    used = fields.flag("use_sliding_window")
    lowest = fields.integer("max_window_layers", 2**16, 28, low=0)
    named = _named_layers(fields, layers)
    if named and any(named) and not used:
        raise fields.fail(f"layer_types holds {SLIDING} and use_sliding_window is not true")
    return named or tuple(used and layer >= lowest for layer in range(layers))


def _all_but_each(pattern: int) -> Windowed:
    """Gemma: each n-th layer sees all."""

    def windowed(fields: Fields, layers: int) -> tuple[bool, ...]:
        each = fields.integer("sliding_window_pattern", 2**16, pattern)
        return _named_layers(fields, layers) or _pattern(each, layers)

    return windowed


def _pattern(each: int, layers: int) -> tuple[bool, ...]:
    """Return all layers but each n-th; all for 0."""
    return tuple(not each or (layer + 1) % each != 0 for layer in range(layers))


def _named_layers(fields: Fields, layers: int) -> tuple[bool, ...] | None:
    """Return what layer_types says, None where it is absent."""
    named = fields.content.get("layer_types")
    if named is None:
        return None
    if not isinstance(named, list) or len(named) != layers:
        raise fields.fail(f"layer_types does not name {layers} layers")
    for one in named:
        if one not in (FULL, SLIDING):
            raise fields.fail(f"layer_types holds {one!r:.60}, neither {FULL} nor {SLIDING}")
    return tuple(one == SLIDING for one in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row: what a family is called, how it departs from a llama, what its files leave out.

    defaults are transformers' for keys absent from config.json. local_base is the rope base of
    layers with a window, None if all have one rope. scaled_scores: scores follow
    query_pre_attn_scalar and may be capped, logits too. gguf_pattern: in a GGUF that states a
    window all layers have it but each n-th, 0 for all layers, None for none; models with
    gguf_wide_layers layers scale queries by hidden / heads, which a GGUF does not say.
    """

    name: str
    architecture: str
    names: Names = FOLDER_NAMES
    gguf_names: Names = GGUF_HALVES_NAMES
    defaults: Mapping[str, object] = field(default_factory=dict)
    windowed: Windowed = _no_layer
    gguf_pattern: int | None = None
    gguf_wide_layers: int | None = None
    rope_base: float = 10000.0
    local_base: float | None = None
    qkv_bias: bool = False
    may_have_biases: bool = False
    head_norms: bool = False
    out_norms: bool = False
    scaled_embedding: bool = False
    scaled_scores: bool = False


GEMMA_DEFAULTS: Mapping[str, object] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        name="llama",
        architecture="llama",
        gguf_names=GGUF_NAMES,
        defaults={"max_position_embeddings": 2048},
        gguf_pattern=0,
        may_have_biases=True,
    ),
    "mistral": Family(
        name="mistral",
        architecture="llama",
        gguf_names=GGUF_NAMES,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        windowed=_every_layer,
    ),
    "qwen2": Family(
        name="qwen2",
        architecture="qwen2",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
        },
        windowed=_upper_layers,
        qkv_bias=True,
    ),
    "qwen3": Family(
        name="qwen3",
        architecture="qwen3",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
        },
        windowed=_upper_layers,
        may_have_biases=True,
        head_norms=True,
    ),
    "gemma2": Family(
        name="gemma2",
        architecture="gemma2",
        names=GEMMA_FOLDER_NAMES,
        defaults={
            **GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        windowed=_all_but_each(2),
        gguf_pattern=2,
        gguf_wide_layers=46,
        may_have_biases=True,
        out_norms=True,
        scaled_embedding=True,
        scaled_scores=True,
    ),
    "gemma3_text": Family(
        name="gemma3",
        architecture="gemma3",
        names=GEMMA_FOLDER_NAMES,
        defaults={**GEMMA_DEFAULTS, "max_position_embeddings": 131072},
        windowed=_all_but_each(6),
        gguf_pattern=6,
        gguf_wide_layers=62,
        rope_base=1_000_000.0,
        local_base=10_000.0,
        may_have_biases=True,
        head_norms=True,
        out_norms=True,
        scaled_embedding=True,
        scaled_scores=True,
    ),
}
"""By the model_type of config.json."""


# ---- Hugging Face folders


def family_of_folder(fields: Fields) -> Family:
    """Return the row of a config.json, or raise for what would load and compute something else."""
    kind = fields.text("model_type")
    family = FAMILIES.get(kind or "")
    if family is None:
        known = ", ".join(FAMILIES)
        raise fields.fail(f"model_type is {kind!r:.60}; supported are {known}")
    for key in ("mlp_bias", "quantization_config", "use_bidirectional_attention"):
        if fields.content.get(key):
            raise fields.fail(f"{key} is not supported")
    if fields.content.get("attention_bias") and not family.may_have_biases:
        raise fields.fail(f"attention_bias is not supported in {family.name}")
    return family


def form_of_folder(fields: Fields, family: Family, layers: int, local: Rope | None) -> Form:
    """Return what a config.json, its family's defaults filled in, says of the computation."""
    activation = fields.text("hidden_activation") or fields.text("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise fields.fail(f"hidden_act is {activation!r:.60}; supported are {known}")
    biases = fields.flag("attention_bias")
    windowed = family.windowed(fields, layers)
    windows: tuple[int, ...] = ()
    if any(windowed):
        window = fields.integer("sliding_window", MODEL_LEN_MAX)
        windows = tuple(window if one else 0 for one in windowed)
    scaled = family.scaled_scores
    return Form(
        activation=ACTIVATIONS[activation],
        qkv_bias=family.qkv_bias or biases,
        output_bias=biases,
        head_norms=family.head_norms,
        out_norms=family.out_norms,
        embedding_scale=_embedding_scale(family, fields.integer("hidden_size", 2**17)),
        query_scale=fields.number("query_pre_attn_scalar") ** -0.5 if scaled else None,
        attention_cap=fields.optional("attn_logit_softcapping") if scaled else None,
        logits_cap=fields.optional("final_logit_softcapping") if scaled else None,
        windows=windows,
        local_rope=local if windows else None,
    )


def _embedding_scale(family: Family, hidden: int) -> float:
    return float(hidden) ** 0.5 if family.scaled_embedding else 1.0


# ---- GGUF files


def family_of_gguf(fields: Fields) -> Family:
    """Return the first row of a GGUF's architecture."""
    kind = fields.text("general.architecture")
    for family in FAMILIES.values():
        if family.architecture == kind:
            return family
    known = ", ".join(dict.fromkeys(family.architecture for family in FAMILIES.values()))
    raise fields.fail(f"general.architecture is {kind!r:.60}; supported are {known}")


def form_of_gguf(
    header: GgufHeader, fields: Fields, family: Family, shape: Mapping[str, int], local: Rope | None
) -> Form:
    """Return what a header says of the computation; biases are there if their tensors are."""
    names, prefix = family.gguf_names, family.architecture
    windows = _windows_of_gguf(fields, family, shape["layers"])
    wide = shape["layers"] == family.gguf_wide_layers
    wide_scale = (shape["hidden"] / shape["heads"]) ** -0.5 if wide else None
    scaled, default = family.scaled_scores, family.defaults.get

    def cap(key: str) -> float | None:
        return fields.optional(f"{prefix}.{key}", default(key)) if scaled else None

    return Form(
        activation=ACTIVATIONS[str(default("hidden_activation", "silu"))],
        qkv_bias=family.qkv_bias or names.bias.format(0, names.query) in header.tensors,
        output_bias=names.bias.format(0, names.output) in header.tensors,
        head_norms=family.head_norms,
        out_norms=family.out_norms,
        embedding_scale=_embedding_scale(family, shape["hidden"]),
        query_scale=fields.optional(f"{prefix}.attention.scale") or wide_scale,
        attention_cap=cap("attn_logit_softcapping"),
        logits_cap=cap("final_logit_softcapping"),
        windows=windows,
        local_rope=local if windows else None,
    )


def _windows_of_gguf(fields: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Return each layer's window; a header may name the pattern, by a number or by layers."""
    if family.gguf_pattern is None:
        return ()
    key = f"{family.architecture}.attention.sliding_window"
    default = family.defaults.get("sliding_window")
    stated = default if isinstance(default, int) else 0
    window = fields.integer(key, MODEL_LEN_MAX, stated, low=0)
    if not window:
        return ()
    named = fields.content.get(key + "_pattern")
    if isinstance(named, list):
        if len(named) < layers or not all(isinstance(one, bool) for one in named):
            raise fields.fail(f"{key}_pattern is not a list of {layers} truth values")
        windowed: tuple[bool, ...] = tuple(named[:layers])
    else:
        each = fields.integer(key + "_pattern", 2**16, family.gguf_pattern, low=0)
        windowed = _pattern(each, layers)
    return tuple(window if one else 0 for one in windowed) if any(windowed) else ()
