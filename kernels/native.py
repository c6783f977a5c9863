"""Our C++ as shared libraries with a plain C ABI: found, or built in seconds, and loaded.

Owns where they lie and how they are compiled: one for every CPU, which engine/rows.py asks for at
start, and the step once for each target, of which kernels/native_ops.py asks for the best that the
CPU runs. Targets are libraries apart, since a linker keeps one copy of what two objects both have,
whatever CPU it was compiled for. Without a compiler the numpy and torch paths serve, and the reason
is told; nothing here ever stops a server.
"""

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
STEP = "step.cpp"
ANY = "any"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra")
WIDE = "avx512f avx512bw avx512vl avx512dq avx512vnni fma f16c prefer-vector-width=512"
# gcc 12 warns of its own intrinsics.
WIDE_FLAGS = (*(f"-m{feature}" for feature in WIDE.split()), "-Wno-uninitialized")
TARGETS = {
    "avx512_bf16": (*WIDE_FLAGS, "-mavx512bf16"),
    "avx512": WIDE_FLAGS,
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-Wno-psabi"),
    "portable": ("-Wno-psabi",),
}
"""Flags of the step for CPUs of each kind; processor.cpp tells which this is."""
COMPILERS = ("c++", "g++", "clang++")
BUILD_LIMIT_S = 120


class NativeError(RuntimeError):
    """The library can be neither found nor built; says why."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Return what any CPU runs, loaded, building it at first use. Raises NativeError."""
    loaded = _library(ANY, FLAGS)
    loaded.processor_target.restype = ctypes.c_char_p
    return loaded


@lru_cache(maxsize=len(TARGETS))
def step_library(target: str) -> ctypes.CDLL:
    """Return the step for one target, loaded, building it at first use. Raises NativeError."""
    return _library(target, FLAGS + TARGETS[target])


def targets() -> tuple[str, ...]:
    """Return the targets that this CPU runs, the best first. Raises NativeError."""
    named = map(library().processor_target, range(len(TARGETS)))
    return tuple(name.decode() for name in named if name)


def keep_to(target: str) -> None:
    """Let this process take no better target than this one, as if its CPU could not run it."""
    library().processor_keep_to(target.encode())


def refusal() -> str | None:
    """Return why there is no library, None where there is."""
    try:
        library()
    except NativeError as error:
        return str(error)
    return None


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


def _sources_of(part: str) -> list[Path]:
    step = SOURCES / STEP
    return [path for path in _sources("*.cpp") if path != step] if part == ANY else [step]


@lru_cache(maxsize=1)
def version() -> str:
    """Return what names everything that is built of these sources for this kind of machine."""
    digest = sha256(repr((FLAGS, TARGETS, platform.machine())).encode())
    for source in _sources("*.[ch]*"):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def prebuild(folder: Path) -> list[Path]:
    """Build every library into a folder for a wheel; return their files. Raises NativeError.

    What this machine's CPU cannot run is built as well, and not loaded.
    """
    parts = {ANY: FLAGS} | {target: FLAGS + flags for target, flags in TARGETS.items()}
    if platform.machine() != "x86_64":
        parts = {part: parts[part] for part in (ANY, "portable")}
    folder.mkdir(parents=True, exist_ok=True)
    _forget_others(folder)
    found = {part: folder / _name(part) for part in parts}
    lacking = [part for part, file in found.items() if not file.is_file()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda part: _built(folder, part, parts[part]), lacking))
    return list(found.values())


def _name(part: str) -> str:
    return f"iterscope-{version()}-{part}.so"


def _library(part: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Find or build one library; all are named by everything that any of them is made of."""
    for folder in _folders():
        if (folder / _name(part)).is_file():
            return _loaded(folder / _name(part))
    built = _built(_writable(), part, flags)
    _forget_others(built.parent)
    return _loaded(built)


def _folders() -> tuple[Path, ...]:
    """Return where the library may lie: beside its sources, or in the user's cache.

    The first is as much ours as the sources are; the second may be a place that others can write.
    """
    cache = Path.home() / ".cache" / "iterscope" / "native"
    return (SOURCES / "build", cache) if _is_ours(cache) else (SOURCES / "build",)


def _is_ours(folder: Path) -> bool:
    """Return whether nobody else can have put a library there, or could."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & others
    )


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error


def _built(folder: Path, part: str, flags: tuple[str, ...]) -> Path:
    """Compile into a folder; another process may do the same."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeError(f"no C++ compiler ({', '.join(COMPILERS)}) to build {SOURCES}")
    name = _name(part)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made, objects = Path(scratch) / name, []
        for source in _sources_of(part):
            objects.append(str(Path(scratch) / f"{source.stem}.o"))
            _compile(compiler, *flags, "-c", str(source), "-o", objects[-1])
        _compile(compiler, "-shared", "-pthread", "-o", str(made), *objects)
        made.replace(folder / name)
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
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise NativeError(f"no folder to build in: {', '.join(map(str, _folders()))}")


def _forget_others(folder: Path) -> None:
    """Delete what older sources were built to; a process that uses one keeps its file open."""
    for other in folder.glob("iterscope-*.so"):
        if version() not in other.name:
            other.unlink(missing_ok=True)
