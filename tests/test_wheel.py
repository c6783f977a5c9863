"""What a wheel brings: the C++ for every kind of CPU, which loads where there is no compiler.

Owns the tests of hatch_build.py, with the real pip and hatchling, and of whose files are loaded.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import native

ROOT = Path(__file__).resolve().parent.parent
LOADS = """
import json, kernels.native as native
first = native.targets()[0]
print(json.dumps([native.library()._name, native.step_library(first)._name]))
"""


def run(*command: str, **environment: str) -> str:
    told = subprocess.run(
        command, env=os.environ | environment, cwd="/", capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    return told.stdout


@pytest.mark.soak
def test_a_wheel_brings_the_libraries_and_no_compiler_is_needed(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    place = tmp_path / "installed"
    run(*pip, "install", "--no-deps", "--target", str(place), str(wheel))
    bare = {"PATH": str(tmp_path), "HOME": str(tmp_path / "home"), "PYTHONPATH": str(place)}
    files = json.loads(run(sys.executable, "-P", "-c", LOADS, **bare))
    assert [Path(file).parent for file in files] == [place / "kernels/cpu/build"] * 2
    built = {file.stem.rpartition("-")[2] for file in (place / "kernels/cpu/build").iterdir()}
    assert built >= {"any", "portable"}
    assert built == {"any", *native.TARGETS} or platform.machine() != "x86_64"


def test_libraries_in_a_folder_of_others_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "iterscope" / "native"
    assert folder in native._folders(), "it will be made by us"
    folder.mkdir(parents=True, mode=0o755)
    assert folder in native._folders()
    folder.chmod(0o777)
    assert folder not in native._folders()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert folder not in native._folders()
