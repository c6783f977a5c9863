"""A model in several safetensors files: one model when sound, a line naming the file when not.

Owns the tests of engine/tensors.py's reading of an index: what it may name, what the files it names
must hold, and what happens when they say otherwise. Nothing outside the folder is ever opened.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

from engine.spec import SpecError, read_spec
from engine.tensors import check_tensors
from tests import families, tiny
from tests.oracle import PROMPT, logits_of, weights_of

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


pytestmark = pytest.mark.usefixtures("one_thread")


def split(folder: Path) -> Path:
    """Turn a folder's one file into two shards with an index, and return the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for file, part in ((FIRST, names[::2]), (SECOND, names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / file)
    places = {name: (FIRST, SECOND)[number % 2] for number, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    tiny.write_json(index, {"metadata": {"total_size": 1}, "weight_map": places})
    return index


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return split(tiny.write(tmp_path / "model"))


def refusal(index: Path) -> str:
    """Return the line with which server and engine alike refuse the folder."""
    spec = read_spec(str(index.parent))
    told = []
    for check in (lambda: check_tensors(spec), lambda: weights_of(index.parent)):
        with pytest.raises(SpecError) as caught:
            check()
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "\n" not in told[0]
    return told[0]


def test_shards_are_one_model(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    expected = logits_of(folder, PROMPT)
    split(folder)
    assert torch.equal(logits_of(folder, PROMPT), expected)


def test_shards_as_transformers_writes_them(tmp_path: Path) -> None:
    model = families.oracle("qwen3")
    whole = families.write(tmp_path / "whole", model)
    families.write(tmp_path / "parts", model)
    (tmp_path / "parts" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 3
    assert torch.equal(logits_of(tmp_path / "parts", PROMPT), logits_of(whole, PROMPT))


def test_shards_may_be_links_into_a_cache(tmp_path: Path, index: Path) -> None:
    """A hub's snapshot folder is made of them."""
    (tmp_path / "blob").write_bytes((index.parent / SECOND).read_bytes())
    (index.parent / SECOND).unlink()
    (index.parent / SECOND).symlink_to(tmp_path / "blob")
    weights_of(index.parent)


OUTSIDE = (
    *("../elsewhere.safetensors", "/etc/elsewhere.safetensors", "sub/elsewhere.safetensors"),
    *("..", ".", "", "config.json", "a\\b.safetensors", "a\0b.safetensors"),
    *("x" * 300 + ".safetensors", None, 3, True, [FIRST], {"file": FIRST}),
)


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_names_files_of_its_folder(index: Path, name: object) -> None:
    places = json.loads(index.read_text())["weight_map"]
    (index.parent.parent / "elsewhere.safetensors").write_bytes(b"")
    tiny.write_json(index, {"weight_map": places | {"model.norm.weight": name}})
    assert f"{index}: weight_map puts 'model.norm.weight' into " in refusal(index)


@pytest.mark.parametrize("listed", [None, {}, [], "x", 3])
def test_an_index_without_a_map_is_refused(index: Path, listed: object) -> None:
    tiny.write_json(index, {"weight_map": listed})
    assert f"{index}: weight_map is missing or empty" in refusal(index)


def without_second(index: Path) -> None:
    (index.parent / SECOND).unlink()


def folder_as_second(index: Path) -> None:
    without_second(index)
    (index.parent / SECOND).mkdir()


def cut_second(index: Path) -> None:
    file = index.parent / SECOND
    file.write_bytes(file.read_bytes()[:-7])


def twice(index: Path) -> None:
    first, second = load_file(index.parent / FIRST), load_file(index.parent / SECOND)
    name = min(first)
    save_file(second | {name: first[name] + 1}, index.parent / SECOND)


def moved(index: Path) -> None:
    first, second = load_file(index.parent / FIRST), load_file(index.parent / SECOND)
    name = min(first)
    save_file(second | {name: first.pop(name)}, index.parent / SECOND)
    save_file(first, index.parent / FIRST)


def lost(index: Path) -> None:
    content = json.loads(index.read_text())
    first = load_file(index.parent / FIRST)
    name = min(first)
    del first[name], content["weight_map"][name]
    save_file(first, index.parent / FIRST)
    tiny.write_json(index, content)


def foreign(index: Path) -> None:
    second = load_file(index.parent / SECOND)
    extra: dict[str, Any] = {"extra.weight": next(iter(second.values()))}
    save_file(second | extra, index.parent / SECOND)


NAME = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("break_it", "cause"),
    [
        (without_second, f"{SECOND}: no such file"),
        (folder_as_second, f"{SECOND}: no such file"),
        (cut_second, f"{SECOND}: cut short or damaged"),
        (twice, f"{SECOND}: tensor '{NAME}' is in {FIRST} too"),
        (moved, f"tensor '{NAME}' is not in {FIRST}"),
        (lost, f"tensor '{NAME}' is missing"),
        (foreign, "tensor 'extra.weight' is not known to a llama model"),
    ],
)
def test_shards_hold_what_the_index_says(
    index: Path, break_it: Callable[[Path], None], cause: str
) -> None:
    break_it(index)
    assert cause in refusal(index)


def test_an_index_of_ten_thousand_files_is_refused(index: Path) -> None:
    many = {f"tensor.{number}": f"{number}.safetensors" for number in range(10_000)}
    tiny.write_json(index, {"weight_map": many})
    assert "weight_map names more than 4096 files" in refusal(index)


def test_an_index_may_be_a_pointer(index: Path) -> None:
    index.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "Git LFS pointer" in refusal(index)
