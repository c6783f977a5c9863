"""Small files beside a history's database: how far commits went, which server holds the folder.

Owns their names, and the writing and reading of small files such as the ledger of segments, so
that a reader sees the old or the new content and never a part. None is synced: they guard against
damage, not against loss of power. Must never decide anything.
"""

import os
from pathlib import Path
from typing import TypeVar

import msgspec

PROGRESS_NAME = "history.progress"
SERVER_NAME = "server.json"

_File = TypeVar("_File", bound=msgspec.Struct)


class Progress(msgspec.Struct, frozen=True):
    """How far a run's records were committed, written beside the database after each commit."""

    run_id: str
    seq: int


class ServerFile(msgspec.Struct, frozen=True):
    """Which running server holds a history folder."""

    url: str
    pid: int
    run_id: str


def write_progress(folder: Path, progress: Progress) -> None:
    """Note how far commits went; not synced, since it guards against damage, not power loss."""
    replace_file(folder / PROGRESS_NAME, msgspec.json.encode(progress))


def read_progress(folder: Path) -> Progress | None:
    """Return how far commits went; None when nobody noted it."""
    return read_file(folder / PROGRESS_NAME, Progress)


def write_server_file(folder: Path, server: ServerFile) -> None:
    """Say which server holds the folder, so that `iterscope sql` finds it."""
    replace_file(folder / SERVER_NAME, msgspec.json.encode(server))


def read_server_file(folder: Path) -> ServerFile | None:
    """Return which server said that it holds the folder; None when nobody did."""
    return read_file(folder / SERVER_NAME, ServerFile)


def remove_server_file(folder: Path) -> None:
    """Take back what `write_server_file` of this process said."""
    server = read_server_file(folder)
    if server is not None and server.pid == os.getpid():
        (folder / SERVER_NAME).unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.new")  # one writer: who holds the database
    temporary.write_bytes(content)
    temporary.replace(path)


def read_file(path: Path, kind: type[_File]) -> _File | None:
    """Return what a small file says; None when it is not there or says nothing of the kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
