"""Packed weights on disk: the same as packed anew, and never believed when anything is wrong.

Owns the tests of engine/tensor_file.py and engine/packed.py: cut, damaged and half-written files,
files of others, another model under the same name, and the bound of what is kept.
"""

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import packed
from engine.config import ConfigError, DeviceFacts, EngineConfig, resolve
from engine.kept_folder import KeptFolderError, open_folder
from engine.messages import Trouble
from engine.packed import load, make_room
from engine.spec import read_spec
from engine.tensor_file import PART_BYTES, TensorFileError, read_tensors, write_tensors
from kernels.base import DecoderWeights, Ops
from kernels.native import refusal, targets
from kernels.native_ops import (
    NativeInt4Ops,
    NativeInt8Ops,
    NativeOps,
    NativeThreads,
    NativeWeight,
)
from kernels.ops import TorchOps
from tests import tiny

SHAPE = tiny.Shape(hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate=96)
TENSORS = {
    "large": torch.arange(PART_BYTES // 4 + 7, dtype=torch.float32),
    "bytes": torch.arange(256, dtype=torch.uint8).reshape(16, 16),
    "none": torch.zeros((0, 3), dtype=torch.bfloat16),
    "half": torch.linspace(-3, 3, 1001).bfloat16(),
}


def still() -> None:
    """Beat for nobody."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.packed"
    write_tensors(path, TENSORS, still)
    return path


def test_tensors_come_back_as_they_were(file: Path) -> None:
    found = read_tensors(file, 2, still)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    found["bytes"].fill_(9)  # a page of this process's own
    assert torch.equal(read_tensors(file, 2, still)["bytes"], TENSORS["bytes"])
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("where", [0, 5000, PART_BYTES + 3, -1, -30, -60, -2000])
def test_one_changed_byte_is_noticed(file: Path, where: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[where] ^= 0x10
    file.write_bytes(raw)
    with pytest.raises(TensorFileError):
        read_tensors(file, 2, still)


@pytest.mark.parametrize(
    "damage",
    [lambda raw: b"", lambda raw: raw[:100], lambda raw: raw[:-1], lambda raw: raw[4096:]],
    ids=["empty", "begun", "last byte", "beginning"],
)
def test_a_file_cut_short_is_noticed(file: Path, damage: Callable[[bytes], bytes]) -> None:
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(TensorFileError):
        read_tensors(file, 2, still)


def test_what_others_can_write_is_not_believed(file: Path, tmp_path: Path) -> None:
    file.chmod(0o622)
    with pytest.raises(TensorFileError, match="written by others"):
        read_tensors(file, 1, still)
    file.chmod(0o600)
    link = tmp_path / "link.packed"
    link.symlink_to(file)
    with pytest.raises(OSError, match="link"):
        read_tensors(link, 1, still)
    fifo = tmp_path / "folder.packed"
    fifo.mkdir()
    with pytest.raises(TensorFileError, match="no file"):
        read_tensors(fifo, 1, still)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_tensors(tmp_path / "full.packed", TENSORS, fail)
    assert list(tmp_path.iterdir()) == []


# ---- weights


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Return settings of a model so small that it would not be kept, were the bound not lower."""
    if refused := refusal():
        pytest.skip(refused)
    monkeypatch.setattr(packed, "BYTES_MIN", 0)
    model = tiny.write(tmp_path / "model", shape=SHAPE)
    config = EngineConfig(model=str(model), packed_cache=str(tmp_path / "kept"), dtype="int8")
    facts = DeviceFacts(device="cpu", auto_dtype="f32", threads=2)
    return resolve(config, read_spec(config.model), facts)


def loaded(
    config: EngineConfig, ops: Ops | None = None, told: list[str] | None = None
) -> tuple[DecoderWeights, bool]:
    """Return the weights, and whether they were packed and not found; `told` gets the stages."""
    stages = [] if told is None else told
    ops = ops or NativeInt8Ops(NativeThreads(targets()[0]))
    spec = read_spec(config.model)
    weights = load(spec, config, ops, lambda stage, fraction: stages.append(stage))
    return weights, "loading weights" in stages


def kept(config: EngineConfig) -> list[Path]:
    return sorted(Path(str(config.packed_cache)).iterdir())


def same(one: DecoderWeights, other: DecoderWeights) -> bool:
    assert isinstance(one.head, NativeWeight)
    assert isinstance(other.head, NativeWeight)
    pairs = [(one.embedding, other.embedding), (one.head.values, other.head.values)]
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        assert isinstance(mine.down, NativeWeight)
        assert isinstance(theirs.down, NativeWeight)
        assert (mine.down.fours is None) == (theirs.down.fours is None)
        assert mine.down.scales is not None
        assert theirs.down.scales is not None
        pairs += [(mine.input_norm, theirs.input_norm), (mine.down.values, theirs.down.values)]
        pairs += [(mine.down.scales, theirs.down.scales)]
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_second_start_finds_the_same_weights(asked: EngineConfig) -> None:
    first, packed_first = loaded(asked)
    second, packed_again = loaded(asked)
    assert packed_first
    assert not packed_again
    assert len(kept(asked)) == 1
    assert same(first, second)
    assert (first.shape, first.norm_eps) == (second.shape, second.norm_eps)


def test_another_precision_or_model_is_packed_anew(asked: EngineConfig) -> None:
    loaded(asked)
    bf16 = NativeOps(NativeThreads(targets()[0]))
    assert loaded(replace(asked, dtype="bf16"), bf16)[1]
    weights = Path(asked.model) / "model.safetensors"
    before = weights.stat()
    tiny.write(Path(asked.model), seed=1, shape=SHAPE)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    assert loaded(asked)[1], "other weights of the same size and, as it says, age"
    assert len(kept(asked)) == 3


def test_damage_is_packed_anew_and_mended(asked: EngineConfig) -> None:
    first, _ = loaded(asked)
    (path,) = kept(asked)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    told: list[str] = []
    second, packed_again = loaded(asked, told=told)
    assert packed_again
    trouble = [one for one in told if isinstance(one, Trouble)]
    assert trouble == [f"{path} is damaged: a part has another hash: packing anew"]
    assert same(first, second)
    assert not loaded(asked)[1]


def test_what_cannot_be_kept_is_told(asked: EngineConfig) -> None:
    loaded(asked)
    (path,) = kept(asked)
    path.unlink()
    path.mkdir()
    (path / "somebody's").touch()
    for config, reason in (
        (asked, f"{path} cannot be written (Is a directory)"),
        (replace(asked, packed_cache_bytes=1000), "--packed-cache-bytes allows 1000"),
    ):
        told: list[str] = []
        assert loaded(config, told=told)[1]
        last = [one for one in told if isinstance(one, Trouble)][-1]
        assert last.endswith(f"bytes of packed weights are not kept: {reason}")


def test_a_folder_of_others_is_left_alone(asked: EngineConfig, tmp_path: Path) -> None:
    folder = Path(str(asked.packed_cache))
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(KeptFolderError, match="can be written by others"):
        open_folder(str(folder))
    assert loaded(asked)[1]
    assert kept(asked) == []
    folder.chmod(0o700)
    link = tmp_path / "elsewhere"
    link.symlink_to(folder)
    assert loaded(replace(asked, packed_cache=str(link)))[1]
    assert kept(asked) == []
    (tmp_path / "taken").write_text("a file")
    for place, cause in ((link, "is a link"), (tmp_path / "taken", "cannot be made")):
        with pytest.raises(KeptFolderError, match=cause):
            open_folder(str(place))
    assert loaded(replace(asked, packed_cache=str(tmp_path / "taken")))[1]


def test_nothing_is_kept_where_nothing_shall_be(asked: EngineConfig) -> None:
    for less in (replace(asked, packed_cache_bytes=0), replace(asked, packed_cache_bytes=5000)):
        assert loaded(less)[1]
        assert loaded(less)[1]
    assert loaded(replace(asked, dtype="f32"), TorchOps())[1], "ops whose weights are their own"
    assert kept(asked) == []


def test_a_file_without_4_bits_is_refused_as_int4(asked: EngineConfig) -> None:
    ops = NativeInt4Ops(NativeThreads(targets()[0]))
    with pytest.raises(ConfigError, match="no weights in 4 bits"):
        loaded(replace(asked, dtype="int4"), ops)
    assert kept(asked) == []


def test_what_was_unused_for_longest_goes_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "used", "old")):
        path = tmp_path / f"{name}.packed"
        path.write_bytes(bytes(1000))
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "left.part").write_bytes(bytes(10))
    (tmp_path / "begun.part").write_bytes(bytes(10))
    os.utime(tmp_path / "left.part", (1e9, 1e9))
    make_room(tmp_path, 2500)
    assert {one.name for one in tmp_path.iterdir()} == {"new.packed", "used.packed", "begun.part"}
    make_room(tmp_path, 0)
    assert {one.name for one in tmp_path.iterdir()} == {"begun.part"}
