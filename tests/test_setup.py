"""Set-up: the demo model is fetched whole or not at all, and every installed version is pinned."""

import re
import zipfile
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from server import demo

ROOT = Path(__file__).resolve().parent.parent
CONTENT = b"GGUF" + bytes(range(256)) * 64
SMALL = demo.PackagedModel(
    requirement="small==1",
    member="small/model.gguf",
    size_bytes=len(CONTENT),
    sha256="b6a7abb60985011ea433cdecba7ef96b79ce50c04929de3958d883b6642f5d64",
)


def package(folder: Path, content: bytes) -> Path:
    wheel = folder / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(SMALL.member, content)
    return wheel


def test_the_model_comes_out_of_its_package_whole(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    demo.unpack(package(tmp_path, CONTENT), SMALL, target)
    assert target.read_bytes() == CONTENT
    assert demo.is_intact(target, SMALL)


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT[:-1], b""])
def test_a_wrong_model_is_refused_and_the_old_one_stays(tmp_path: Path, content: bytes) -> None:
    target = tmp_path / "model.gguf"
    target.write_bytes(b"older")
    with pytest.raises(demo.DemoError, match="not the file we know"):
        demo.unpack(package(tmp_path, content), SMALL, target)
    assert target.read_bytes() == b"older"


def test_a_package_without_the_model_is_refused(tmp_path: Path) -> None:
    other = replace(SMALL, member="small/other.gguf")
    with pytest.raises(demo.DemoError, match="does not hold"):
        demo.unpack(package(tmp_path, CONTENT), other, tmp_path / "model.gguf")
    broken = tmp_path / "broken.whl"
    broken.write_bytes(CONTENT)
    with pytest.raises(demo.DemoError, match="does not hold"):
        demo.unpack(broken, SMALL, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_a_damaged_model_of_the_right_size_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(CONTENT)
    assert demo.is_intact(file, SMALL)
    file.write_bytes(CONTENT[:-1] + b"x")
    assert not demo.is_intact(file, SMALL)
    assert not demo.is_intact(tmp_path / "none.gguf", SMALL)


def test_the_model_lies_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a folder"))
    folder = tmp_path / "a folder" / "iterscope" / "models"
    assert demo.demo_model_path() == folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_folder_that_cannot_be_written_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "iterscope").write_text("a file where a folder is needed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(demo.DemoError, match="cannot be written to"):
        demo.fetch_demo_model(lambda line: None)


def test_the_model_that_is_there_is_not_fetched_again(demo_model: Path) -> None:
    said: list[str] = []
    assert demo.fetch_demo_model(said.append) == demo_model
    assert said == [f"demo model: {demo_model}"]


def test_every_installed_version_is_pinned() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if line)
    named = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    for name, version in needed("iterscope", {"test"}, {}).items():
        assert named.get(name) == version.partition("+")[0], f"constraints.txt lacks {name}"


def needed(name: str, extras: set[str], found: dict[str, str]) -> dict[str, str]:
    """Return the installed version of everything that `name` needs, directly or not."""
    for text in distribution(name).requires or []:
        need = Requirement(text)
        marker = need.marker
        wanted = marker is None or any(marker.evaluate({"extra": e}) for e in extras | {""})
        canonical = re.sub(r"[-_.]+", "-", need.name).lower()
        if wanted and canonical not in found:
            found[canonical] = distribution(need.name).version
            needed(need.name, set(need.extras), found)
    return found
