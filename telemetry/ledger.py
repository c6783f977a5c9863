"""The ledger of a history's segments: what each file held and its checksum, in one small file.

Owns `segments/ledger.json`. archive.py writes it after each change; with it a segment that is
damaged or gone is noticed, and how many records that costs is known. A file that the ledger does
not name is read for what it says of itself. Never guards against loss of power: it is not synced.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from telemetry.notes import read_file, replace_file
from telemetry.segments import FOLDER_NAME, Segment

NAME = "ledger.json"


class Entry(msgspec.Struct, frozen=True):
    """One segment: its size, the checksum ("" until it was read), each run's first and last seq."""

    bytes: int
    sha256: str
    runs: dict[str, tuple[int, int]]


class Ledger(msgspec.Struct, frozen=True):
    """All segments by file name."""

    segments: dict[str, Entry]


def read_ledger(folder: Path) -> dict[str, Entry]:
    """Return the entries of a history folder's ledger; none when it cannot be read."""
    ledger = read_file(folder / FOLDER_NAME / NAME, Ledger)
    return dict(ledger.segments) if ledger is not None else {}


def write_ledger(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Replace the ledger; raises OSError."""
    content = msgspec.json.encode(Ledger(dict(entries)))
    replace_file(folder / FOLDER_NAME / NAME, content)


def entry_of(segment: Segment, sha256: str = "") -> Entry:
    """Return what the ledger says of a segment."""
    runs = {run_id: (reach.first_seq, reach.last_seq) for run_id, reach in segment.runs.items()}
    return Entry(bytes=segment.bytes, sha256=sha256, runs=runs)


def checksum(path: Path) -> str:
    """Return a file's SHA-256; raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
