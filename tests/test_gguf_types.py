"""Every type of tensor that a GGUF may hold: its values to the last bit, and a model made of all.

Owns the tests of dequantization against tests/ggml_blocks.py, which states the formats by itself.
The values are exact: each is a product of few bits, rounded to float32 at most once.
"""

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.model_files import BLOCKS, read_gguf
from engine.weights import GgufSource
from tests import ggml_blocks, tiny
from tests.oracle import PROMPT, logits_of

ROWS, COLUMNS = 3, 512
WIDE = tiny.Shape(layers=5, hidden=256, heads=4, head_dim=64, intermediate=256)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_type_that_is_taken_is_tested() -> None:
    assert {name for name, _, _ in BLOCKS.values()} == set(ggml_blocks.TYPES)
    for name, _, size in BLOCKS.values():
        assert size == ggml_blocks.TYPES[name][1], name


def add_blocks(writer: gguf.GGUFWriter, name: str, kind: str, rows: int, raw: bytes) -> None:
    stored = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])


def values_of(kind: str, rows: int, raw: bytes) -> np.ndarray:
    exact = np.array(ggml_blocks.decoded(kind, raw), np.float64).reshape(rows, -1)
    return exact.astype(np.float32)


@pytest.mark.parametrize("kind", ggml_blocks.TYPES)
def test_values_are_exact(tmp_path: Path, kind: str) -> None:
    decode, size, _ = ggml_blocks.TYPES[kind]
    each = len(decode(bytes(size)))
    raw = ggml_blocks.blocks(kind, ROWS * COLUMNS // each, random.Random(kind))
    writer = gguf.GGUFWriter(str(tmp_path / "one.gguf"), "llama")
    add_blocks(writer, "one", kind, ROWS, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    item = read_gguf(tmp_path / "one.gguf").tensors["one"]
    assert (item.shape, BLOCKS[item.kind][0]) == ((ROWS, COLUMNS), kind)
    found = GgufSource(tmp_path / "one.gguf").load("one").numpy()
    assert found.dtype == np.float32
    assert np.array_equal(found, values_of(kind, ROWS, raw))
    assert len(np.unique(found)) > 10, "a row of equal values tests nothing"


def test_a_model_may_mix_them_all(tmp_path: Path) -> None:
    """Each matrix in another type: the same logits as the same values in float32."""
    draw = random.Random(3)
    kinds = list(ggml_blocks.TYPES)
    mixed, plain = {}, {}
    for number, (name, weight) in enumerate(tiny.tensors(0, WIDE).items()):
        kind = kinds[number % len(kinds)]
        if weight.ndim == 2 and "mlp" in name:
            each = len(ggml_blocks.TYPES[kind][0](bytes(ggml_blocks.TYPES[kind][1])))
            raw = ggml_blocks.blocks(kind, weight.size // each, draw)
            mixed[name] = (kind, raw)
            plain[name] = values_of(kind, len(weight), raw)
    assert {kind for kind, _ in mixed.values()} == set(kinds)
    found = logits_of(write(tmp_path / "mixed.gguf", mixed), PROMPT)
    floats = {name: ("F32", value.tobytes()) for name, value in plain.items()}
    assert torch.equal(found, logits_of(write(tmp_path / "plain.gguf", floats), PROMPT))
    assert found.std() > 0.1


def write(file: Path, replaced: dict[str, tuple[str, bytes]]) -> Path:
    """Write the wide tiny model with some of its matrices as blocks of some type."""

    def stored(writer: gguf.GGUFWriter, name: str, weight: np.ndarray) -> None:
        if name not in replaced:
            writer.add_tensor(tiny.gguf_name(name), tiny.gguf_rows(name, weight, WIDE))
            return
        kind, raw = replaced[name]
        add_blocks(writer, tiny.gguf_name(name), kind, len(weight), raw)

    return tiny.write_gguf(file, shape=WIDE, stored=stored)
