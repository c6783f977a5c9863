"""The folder of files that the next start uses again: made, and believed only if it is ours alone.

Owns whom a folder or a file is believed from. What others can write could be anybody's weights.
engine/packed.py and engine/kernel_table.py keep files in it; the server tells of one that it is
not used. Standard library alone.
"""

import os
import stat
from pathlib import Path


class KeptFolderError(Exception):
    """A folder that is not used; says why."""


def refusal_of(status: os.stat_result) -> str | None:
    """Return why a file or folder of this status is not believed, None if it is ours alone."""
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by others"
    return None


def open_folder(path: str) -> Path:
    """Return the folder, made if need be. Raises KeptFolderError."""
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refused = "is a link" if folder.is_symlink() else refusal_of(folder.stat())
    except OSError as error:
        refused = f"cannot be made ({error.strerror})"
    if refused:
        raise KeptFolderError(refused)
    return folder
