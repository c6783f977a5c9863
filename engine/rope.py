"""How a model turns queries and keys by their positions, read from its metadata without torch.

Owns Rope and the ways of stretching it past the length that a model was trained for, and their
readers for config.json and for a GGUF header; engine/spec.py calls them, engine/rotation.py
computes the table. Believes no file: what would not be finite, or is not known, is a SpecError.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.model_files import Fields

MODEL_LEN_MAX = 2**24
BETA_MIN, BETA_MAX = 1e-3, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every position divided by factor (Chen et al., 2023)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretching of low frequencies (transformers, modeling_rope_utils.py)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): pairs that turn slowly are stretched, fast ones kept.

    Between beta_fast and beta_slow turns within the original length lies a ramp, whose ends are
    whole pairs if truncate. Cosine and sine are multiplied by attention_factor.
    """

    factor: float
    original_model_len: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Pair i of a head turns by position x base^(-2 i / head_dim) (Su et al., 2021), stretched."""

    base: float = 10000.0
    scaling: RopeScaling | None = None


# ---- config.json


def ropes_of_folder(
    fields: Fields, *, base: float, local_base: float | None
) -> tuple[Rope, Rope | None]:
    """Return the rope of all layers, or of full attention and of those with a window.

    transformers 5 keeps base and scaling in rope_parameters, by kind of layer where they differ;
    4 keeps rope_theta, rope_scaling and rope_local_base_freq apart. The bases are the defaults; a
    family without a local one has one rope.
    """
    content = fields.content
    nested = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise fields.fail("rope_parameters is not an object")
    by_kind = {key: nested.get(key) for key in ("full_attention", "sliding_attention")}
    split = any(by_kind.values())
    if split and local_base is None:
        raise fields.fail("rope_parameters by kind of layer are not supported in this architecture")
    if not all(part is None or isinstance(part, dict) for part in by_kind.values()):
        raise fields.fail("rope_parameters: full_attention or sliding_attention is not an object")
    theta = content.get("rope_theta")
    everywhere = by_kind["full_attention"] or {} if split else nested
    rope = _rope_of_folder(fields, {"rope_theta": theta, **everywhere}, base)
    if local_base is None:
        return rope, None
    local = {"rope_theta": content.get("rope_local_base_freq")}
    return rope, _rope_of_folder(fields, local | (by_kind["sliding_attention"] or {}), local_base)


def _rope_of_folder(fields: Fields, parameters: dict[str, Any], base: float) -> Rope:
    model_len = fields.integer("max_position_embeddings", MODEL_LEN_MAX, 2048)
    rope = Fields(fields.path, {"max_position_embeddings": model_len, **parameters})
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.fail("partial_rotary_factor other than 1 is not supported")
    found = rope.number("rope_theta", base)
    if found <= 1:
        raise fields.fail(f"rope_theta is {found}, not above 1")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(base=found)
    read = _FOLDER_SCALINGS.get(kind) if isinstance(kind, str) else None
    if read is None:
        known = ", ".join(_FOLDER_SCALINGS)
        raise fields.fail(f"rope scaling {kind!r:.60} is not supported (default, {known} are)")
    return Rope(base=found, scaling=read(rope))


def _factor(rope: Fields, key: str = "factor", default: float | None = None) -> float:
    factor = rope.number(key, default)
    if not 1 <= factor <= MODEL_LEN_MAX:
        raise rope.fail(f"{key} is {factor}, not within 1 and {MODEL_LEN_MAX}")
    return factor


def _original_len(rope: Fields) -> int:
    default = rope.integer("max_position_embeddings", MODEL_LEN_MAX)
    return rope.integer("original_max_position_embeddings", MODEL_LEN_MAX, default)


def _linear_of_folder(rope: Fields) -> LinearScaling:
    return LinearScaling(factor=_factor(rope))


def _llama3_of_folder(rope: Fields) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.fail(f"high_freq_factor {high} is not above low_freq_factor {low}")
    return Llama3Scaling(
        factor=_factor(rope),
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_model_len=_original_len(rope),
    )


def _yarn_of_folder(rope: Fields) -> YarnScaling:
    original = _original_len(rope)
    model_len = rope.integer("max_position_embeddings", MODEL_LEN_MAX)
    factor = _factor(rope, default=max(1.0, model_len / original))

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    content = rope.content
    inferred = magnitude(1.0)
    if content.get("mscale") and content.get("mscale_all_dim"):
        inferred = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    return _ordered(
        rope,
        YarnScaling(
            factor=factor,
            original_model_len=original,
            attention_factor=rope.number("attention_factor", inferred),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=content.get("truncate", True) is not False,
        ),
    )


def _ordered(rope: Fields, yarn: YarnScaling) -> YarnScaling:
    if not BETA_MIN <= yarn.beta_slow <= yarn.beta_fast <= BETA_MAX:
        betas = f"beta_slow {yarn.beta_slow} and beta_fast {yarn.beta_fast}"
        raise rope.fail(f"{betas} are not in this order within {BETA_MIN} and {BETA_MAX}")
    return yarn


_FOLDER_SCALINGS: dict[str, Callable[[Fields], RopeScaling]] = {
    "linear": _linear_of_folder,
    "llama3": _llama3_of_folder,
    "yarn": _yarn_of_folder,
}


# ---- GGUF headers


def ropes_of_gguf(
    fields: Fields, architecture: str, *, base: float, local_base: float | None
) -> tuple[Rope, Rope | None]:
    """Return the same from a GGUF's metadata; llama3's stretching is a tensor there.

    A header that states a factor and no kind means linear, as llama.cpp reads it.
    """
    prefix = f"{architecture}.rope."
    kind = fields.content.get(prefix + "scaling.type", "linear")
    old = fields.number(prefix + "scale_linear", 1.0)
    scaling: RopeScaling | None = None
    if kind == "yarn":
        scaling = _yarn_of_gguf(fields, architecture)
    elif kind == "linear":
        factor = _factor(fields, prefix + "scaling.factor", old)
        scaling = LinearScaling(factor=factor) if factor != 1 else None
    elif kind != "none":
        raise fields.fail(f"{prefix}scaling.type {kind!r:.60} is not supported (linear, yarn are)")
    found = fields.number(prefix + "freq_base", base)
    local = fields.number(prefix + "freq_base_swa", local_base or base)
    if min(found, local) <= 1:
        raise fields.fail(f"{prefix}freq_base is {min(found, local)}, not above 1")
    return Rope(base=found, scaling=scaling), Rope(base=local) if local_base else None


def _yarn_of_gguf(fields: Fields, architecture: str) -> YarnScaling:
    prefix = f"{architecture}.rope.scaling."
    if fields.content.get(prefix + "yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise fields.fail(f"{prefix}yarn_ext_factor other than 1 is not supported")
    factor = _factor(fields, prefix + "factor", 1.0)
    model_len = fields.integer(f"{architecture}.context_length", MODEL_LEN_MAX)
    magnitude = fields.number(prefix + "attn_factor", 1.0)
    magnitude = fields.number(prefix + "yarn_attn_factor", magnitude)
    return _ordered(
        fields,
        YarnScaling(
            factor=factor,
            original_model_len=fields.integer(
                prefix + "original_context_length", MODEL_LEN_MAX, model_len
            ),
            attention_factor=magnitude * (0.1 * math.log(factor) + 1.0),
            beta_fast=fields.number(prefix + "yarn_beta_fast", 32.0),
            beta_slow=fields.number(prefix + "yarn_beta_slow", 1.0),
        ),
    )
