"""JSON files of an experiment, written whole or not at all, compressed where they end in .gz.

Owns reading and writing them; whatever ends a process, a file that is there is whole.
experiment.py and result.py call it.
"""

import gzip
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
    """Return a file's content."""
    data = path.read_bytes()
    return msgspec.json.decode(gzip.decompress(data) if path.suffix == ".gz" else data)
