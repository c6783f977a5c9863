"""Our C++ as one shared library with a plain C ABI: found, or built in a second, and loaded.

Owns where the library lies and how it is compiled. engine/rows.py asks for it at start. Without a
compiler the numpy and torch paths serve, and the reason is told; nothing here ever stops a server.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra")
WIDE = "avx512f avx512bw avx512vl avx512dq avx512vnni avx512bf16 fma f16c prefer-vector-width=512"
EXTRA_FLAGS = {
    # gcc 12 warns of its own intrinsics.
    "step.cpp": (*(f"-m{feature}" for feature in WIDE.split()), "-Wno-maybe-uninitialized"),
}
"""Flags of files that only some CPUs can run; processor.cpp tells which CPU this is."""
COMPILERS = ("c++", "g++", "clang++")
BUILD_LIMIT_S = 120


class NativeError(RuntimeError):
    """The library can be neither found nor built; says why."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Return the loaded library, building it at first use. Raises NativeError."""
    sources = [
        source
        for source in sorted(SOURCES.glob("*.cpp"))
        if platform.machine() == "x86_64" or source.name not in EXTRA_FLAGS
    ]
    digest = sha256(repr((FLAGS, EXTRA_FLAGS, platform.machine())).encode())
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    name = f"iterscope-{digest.hexdigest()[:16]}.so"
    for folder in _folders():
        if (folder / name).is_file():
            return _loaded(folder / name)
    return _loaded(_built(name, sources))


def refusal() -> str | None:
    """Return why there is no library, None where there is."""
    try:
        library()
    except NativeError as error:
        return str(error)
    return None


def _folders() -> tuple[Path, ...]:
    """Return where the library may lie: beside its sources, or in the user's cache."""
    return SOURCES / "build", Path.home() / ".cache" / "iterscope" / "native"


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error


def _built(name: str, sources: list[Path]) -> Path:
    """Compile into the first folder that can be written; another process may do the same."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeError(f"no C++ compiler ({', '.join(COMPILERS)}) to build {SOURCES}")
    folder = _writable()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made, objects = Path(scratch) / name, []
        for source in sources:
            objects.append(str(Path(scratch) / f"{source.stem}.o"))
            flags = (*FLAGS, *EXTRA_FLAGS.get(source.name, ()))
            _compile(compiler, *flags, "-c", str(source), "-o", objects[-1])
        _compile(compiler, "-shared", "-pthread", "-o", str(made), *objects)
        made.replace(folder / name)
    _forget_others(folder, name)
    return folder / name


def _compile(compiler: str, *arguments: str) -> None:
    """Run the compiler; raise NativeError with its first words if it fails."""
    try:
        subprocess.run(
            [compiler, *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=BUILD_LIMIT_S,
        )
    except subprocess.CalledProcessError as error:
        told = (error.stderr or "no message").strip().splitlines()
        raise NativeError(f"{compiler} failed: {told[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{compiler} failed: {error}") from error


def _writable() -> Path:
    """Return a folder of ours to build in. Raises NativeError when there is none."""
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise NativeError(f"no folder to build in: {', '.join(map(str, _folders()))}")


def _forget_others(folder: Path, name: str) -> None:
    """Delete what older sources were built to; a process that uses one keeps its file open."""
    for other in folder.glob("iterscope-*.so"):
        if other.name != name:
            other.unlink(missing_ok=True)
