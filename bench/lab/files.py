"""JSON files of an experiment, written whole or not at all, compressed where they end in .gz.

Owns reading and writing them; whatever ends a process, a file that is there is whole.
experiment.py and result.py call it.
"""

import gzip
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgspec


def write_json(path: Path, content: object) -> None:
    """Write a file under its name only once it is whole."""
    data = msgspec.json.encode(content)
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_bytes(gzip.compress(data, 5, mtime=0) if path.suffix == ".gz" else data)
    unfinished.replace(path)


def read_json(path: Path) -> Any:
    """Return a file's content; raises ValueError, which names it, where it is damaged."""
    data = path.read_bytes()
    try:
        return msgspec.json.decode(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (gzip.BadGzipFile, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def check_place(path: Path, flag: str) -> None:
    """Raise ValueError where no file can be written: before the measuring, not after it."""
    if path.is_dir():
        raise ValueError(f"{flag} {str(path)!r} is a folder")
    try:
        tempfile.TemporaryFile(dir=path.absolute().parent).close()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {error.strerror}") from error
