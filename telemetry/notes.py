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
PROGRESS_BYTES = 256
SERVER_NAME = "server.json"

_File = TypeVar("_File", bound=msgspec.Struct)


class Progress(msgspec.Struct, frozen=True):
    """How far a run's records were committed, noted beside the database after each commit."""

    run_id: str
    seq: int


class ServerFile(msgspec.Struct, frozen=True):
    """Which running server holds a history folder."""

    url: str
    pid: int
    run_id: str


class ProgressFile:
    """Where the writer notes how far its commits went: it stays open, and each note is one write.

    All notes are of one length, so that one covers the last. A thirtieth of a new file's cost.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / PROGRESS_NAME, os.O_WRONLY | os.O_CREAT, 0o666)

    def write(self, progress: Progress) -> None:
        """Note how far commits went."""
        content = msgspec.json.encode(progress).ljust(PROGRESS_BYTES)
        os.pwrite(self._descriptor, content, 0)

    def close(self) -> None:
        """Let go of the file; what it says stays."""
        os.close(self._descriptor)


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
