"""Weights: complete, well shaped and finite, or refused in one line that names file or tensor.

Owns the tests of engine/weights.py on the tiny model: every form a sound checkpoint takes, and
every way in which one was found broken in the field. Whatever loads gives transformers' logits.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from engine.spec import SpecError, read_spec
from engine.weights import load_weights
from kernels.ops import TorchOps
from tests import tiny
from tests.oracle import PROMPT, logits_of, oracle_logits, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")


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
