"""Rope and its scalings: the same table as transformers', from a folder and from a GGUF header.

Owns the tests of engine/rope.py and engine/rotation.py: every kind of scaling in the spellings of
transformers 4 and 5 and of GGUF, and the numbers of which no table can be made.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.model_files import Fields, SpecError
from engine.rope import LinearScaling, Rope, YarnScaling, ropes_of_folder, ropes_of_gguf
from engine.rotation import rotations
from engine.spec import read_spec
from tests import tiny

POSITIONS, HEAD_DIM = 300, 32
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 64}

SCALINGS: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", **LLAMA3, **ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn of the config's length": {"rope_type": "yarn", "factor": 4.0},
    "yarn with a factor of its own": {
        **{"rope_type": "yarn", "factor": 16.0, "attention_factor": 0.7, **ORIGINAL},
    },
    "yarn with betas": {
        **{"rope_type": "yarn", "factor": 40.0, "beta_fast": 8.0, "beta_slow": 0.5, **ORIGINAL},
    },
    "yarn with mscale": {
        **{"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.4, **ORIGINAL},
    },
    "yarn between whole pairs": {
        **{"rope_type": "yarn", "factor": 4.0, "truncate": False, **ORIGINAL},
    },
}


def config(**parameters: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 512, "rope_parameters": {"rope_theta": 5e4, **parameters}}


def read(content: dict[str, Any], local_base: float | None = None) -> tuple[Rope, Rope | None]:
    return ropes_of_folder(Fields(Path("config.json"), content), base=1e4, local_base=local_base)


def oracle(content: dict[str, Any]) -> torch.Tensor:
    """Return transformers' cosines and sines of each position and pair, in our layout."""
    made = LlamaConfig(**content, hidden_size=2 * HEAD_DIM, num_attention_heads=2)
    cosine, sine = LlamaRotaryEmbedding(made)(torch.zeros(1), torch.arange(POSITIONS)[None])
    return torch.stack([cosine, sine], -1)[0, :, : HEAD_DIM // 2]


@pytest.mark.parametrize("kind", SCALINGS)
def test_turns_are_those_of_transformers(kind: str) -> None:
    rope, local = read(config(**SCALINGS[kind]))
    table = rotations(rope, head_dim=HEAD_DIM, positions=POSITIONS)
    assert local is None
    assert torch.allclose(table, oracle(config(**SCALINGS[kind])), atol=1e-6, rtol=0)
    if kind != "none":
        plain = rotations(Rope(base=rope.base), head_dim=HEAD_DIM, positions=POSITIONS)
        assert not torch.allclose(table, plain, atol=1e-2)


@pytest.mark.parametrize("kind", SCALINGS)
def test_transformers_4_spells_the_same(kind: str) -> None:
    renamed = {"type" if key == "rope_type" else key: it for key, it in SCALINGS[kind].items()}
    for scaling in (SCALINGS[kind], renamed):
        old = {"max_position_embeddings": 512, "rope_theta": 5e4, "rope_scaling": scaling}
        assert read(old) == read(config(**SCALINGS[kind]))


def test_layers_with_a_window_may_have_a_rope_of_their_own() -> None:
    expected = (Rope(base=1e6, scaling=LinearScaling(factor=8.0)), Rope(base=2e4))
    linear = {"rope_type": "linear", "factor": 8.0}
    kinds = {
        "full_attention": {"rope_theta": 1e6, **linear},
        "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
    }
    assert read({"rope_parameters": kinds}, local_base=1e4) == expected
    old = {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": linear}
    assert read(old, local_base=1e4) == expected
    assert read({}, local_base=1e3) == (Rope(base=1e4), Rope(base=1e3))


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (config(rope_type="dynamic", factor=2), "'dynamic'"),
        (config(rope_type=["yarn"]), "['yarn']"),
        (config(rope_type="linear"), "factor is missing"),
        (config(rope_type="linear", factor=0.5), "factor is 0.5"),
        (config(rope_type="linear", factor=1e300), "factor is 1e+300"),
        (config(rope_type="linear", factor=-1), "factor is -1"),
        (config(rope_type="linear", factor="2"), "factor is not a number"),
        (config(rope_type="llama3", factor=8, low_freq_factor=1), "high_freq_factor is missing"),
        (config(rope_type="llama3", **LLAMA3 | {"high_freq_factor": 1.0}), "high_freq_factor 1.0"),
        (config(rope_type="yarn", factor=4, original_max_position_embeddings=0), "original_max"),
        (config(rope_type="yarn", factor=4, beta_fast=1e300), "beta_fast 1e+300"),
        (config(rope_type="yarn", factor=4, beta_slow=64), "beta_slow 64"),
        (config(rope_type="yarn", factor=4, attention_factor=math.inf), "attention_factor is inf"),
        (config(rope_type="yarn", factor=4, mscale="x", mscale_all_dim=1), "mscale is not"),
        (config(rope_theta=1.0), "rope_theta is 1.0, not above 1"),
        (config(rope_theta=True), "rope_theta is not a number"),
        (config(partial_rotary_factor=0.5), "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters is not an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 2.0}}}, "by kind of layer"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is"),
    ],
)
def test_what_gives_no_table_is_refused_by_field(content: dict[str, Any], cause: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(content)
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [{"sliding_attention": 3}, {"full_attention": "x"}])
def test_a_rope_by_kind_of_layer_is_an_object(content: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="is not an object"):
        read({"rope_parameters": content}, local_base=1e4)


def test_yarn_says_how_far_the_model_reaches(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    file = folder / "config.json"
    content = json.loads(file.read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    tiny.write_json(file, content | {"rope_parameters": yarn})
    assert read_spec(str(folder)).model_len == 4 * tiny.Shape.model_len
    tiny.write_json(file, content | {"rope_parameters": yarn | ORIGINAL})
    assert read_spec(str(folder)).model_len == tiny.Shape.model_len


# ---- GGUF


def gguf(**values: Any) -> tuple[Rope, Rope | None]:
    fields = {f"llama.{key.replace('__', '.')}": value for key, value in values.items()}
    fields.setdefault("llama.context_length", 512)
    return ropes_of_gguf(Fields(Path("m.gguf"), fields), "llama", base=1e4, local_base=None)


def test_a_gguf_says_the_same_by_other_keys() -> None:
    assert gguf() == (Rope(), None)
    assert gguf(rope__freq_base=5e4)[0] == read(config())[0]
    linear = Rope(scaling=LinearScaling(factor=2.5))
    assert gguf(rope__scaling__type="linear", rope__scaling__factor=2.5)[0] == linear
    assert gguf(rope__scaling__factor=2.5)[0] == linear
    assert gguf(rope__scale_linear=2.5)[0] == linear
    assert gguf(rope__scaling__type="none", rope__scaling__factor=2.5)[0] == Rope()
    yarn = gguf(
        rope__freq_base=5e4,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=64,
    )
    assert yarn[0] == read(config(**SCALINGS["yarn"]))[0]
    assert isinstance(yarn[0].scaling, YarnScaling)


def in_gguf(**values: Any) -> Callable[[], object]:
    return lambda: gguf(**values)


@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (in_gguf(rope__scaling__type="longrope"), "llama.rope.scaling.type 'longrope'"),
        (in_gguf(rope__scaling__type=[1]), "llama.rope.scaling.type [1]"),
        (in_gguf(rope__scaling__factor=1e30), "llama.rope.scaling.factor is 1e+30"),
        (in_gguf(rope__freq_base=0.5), "llama.rope.freq_base is 0.5"),
        (in_gguf(rope__scaling__type="yarn", rope__scaling__yarn_ext_factor=0.5), "yarn_ext"),
        (in_gguf(rope__scaling__type="yarn", rope__scaling__yarn_beta_slow=1e9), "beta_slow"),
    ],
)
def test_a_gguf_that_gives_no_table_is_refused(made: Callable[[], object], cause: str) -> None:
    with pytest.raises(SpecError) as caught:
        made()
    assert cause in str(caught.value)
