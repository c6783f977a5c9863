"""Named tensors in one file: written whole or not at all, checked by hash as they are read.

Owns the form of the file; engine/packed.py keeps packed weights in it.
A file that is cut short, damaged, or that another user could have written is told as a reason and
never used. Knows no model.
"""

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from engine.kept_folder import refusal_of
from kernels.huge_pages import HugePages

MAGIC = b"iterscope tensors 1\n"
ALIGNMENT = 4096
PART_BYTES = 8 * 2**20
"""Bytes that have a hash of their own, so that threads share the work of checking."""
HEADER_BYTES_MAX = 16 * 2**20
DIGEST_BYTES = 32
TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int8, torch.int64)
}

Beat = Callable[[], None]


class TensorFileError(Exception):
    """A file that cannot be believed or read; says why."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], beat: Beat) -> int:
    """Write the file beside its place and move it there; return its bytes. Raises OSError."""
    placed, end = _placed(tensors)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            parts = _write_values(file, tensors, placed, beat)
            header = json.dumps({"tensors": placed, "parts": parts, "bytes": end}).encode()
            file.write(header)
            file.write(hashlib.sha256(header).digest())
            file.write(len(header).to_bytes(8, "little") + MAGIC)
            size = file.tell()
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    return size


def _placed(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, list[Any]], int]:
    """Return type, shape and place of each tensor, and where the last one ends."""
    placed: dict[str, list[Any]] = {}
    end = 0
    for name, tensor in tensors.items():
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + tensor.nbytes
        kind = str(tensor.dtype).removeprefix("torch.")
        assert kind in TYPES, f"{name} is of {kind}"
        placed[name] = [kind, list(tensor.shape), begin, tensor.nbytes]
    return placed, end


def _write_values(
    file: BinaryIO,
    tensors: Mapping[str, torch.Tensor],
    placed: Mapping[str, list[Any]],
    beat: Beat,
) -> list[str]:
    """Write the tensors to their places; return the hash of each part of what was written."""
    parts: list[str] = []
    at, digest = 0, hashlib.sha256()

    def put(values: memoryview) -> None:
        nonlocal at, digest
        for first in range(0, len(values), PART_BYTES):
            rest = values[first : first + PART_BYTES]
            while len(rest):
                some = rest[: PART_BYTES - at % PART_BYTES]
                file.write(some)
                digest.update(some)
                at, rest = at + len(some), rest[len(some) :]
                if at % PART_BYTES == 0:
                    parts.append(digest.hexdigest())
                    digest = hashlib.sha256()
            beat()

    for name, tensor in tensors.items():
        put(memoryview(bytes(placed[name][2] - at)))
        values = tensor.contiguous().flatten().view(torch.uint8)
        put(values.numpy().data)
    if at % PART_BYTES:
        parts.append(digest.hexdigest())
    return parts


def read_tensors(path: Path, threads: int, beat: Beat) -> dict[str, torch.Tensor]:
    """Read the file's tensors into huge pages of our own, every byte checked.

    Raises TensorFileError, and OSError where there is none.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise TensorFileError("is no file")
        if refused := refusal_of(status):
            raise TensorFileError(refused)
        if status.st_size < len(MAGIC) + 8 + DIGEST_BYTES:
            raise TensorFileError("is cut short")
        header = _header(handle, status.st_size)
        values = _values(handle, header, threads, beat)
        os.utime(handle)  # used now: who keeps many deletes the one that was not for longest
    finally:
        os.close(handle)
    return {name: _tensor(values, entry) for name, entry in header["tensors"].items()}


def _header(handle: int, size: int) -> dict[str, Any]:
    """Return the header, which stands at the end with its hash; what it says fits the file."""
    end = size - len(MAGIC) - 8
    tail = os.pread(handle, size - end, end)
    if tail[8:] != MAGIC:
        raise TensorFileError("is cut short, or no file of tensors")
    length = int.from_bytes(tail[:8], "little")
    begin = end - DIGEST_BYTES - length
    if begin < 0 or length > HEADER_BYTES_MAX:
        raise TensorFileError("is damaged: its header does not fit")
    raw = os.pread(handle, length + DIGEST_BYTES, begin)
    if hashlib.sha256(raw[:length]).digest() != raw[length:]:
        raise TensorFileError("is damaged: its header has another hash")
    header: dict[str, Any] = json.loads(raw[:length])
    if header["bytes"] != begin or len(header["parts"]) != -(-begin // PART_BYTES):
        raise TensorFileError("is damaged: its header does not fit")
    return header


def _values(handle: int, header: dict[str, Any], threads: int, beat: Beat) -> torch.Tensor:
    """Return all bytes of the tensors, every part's hash compared.

    Parts are read many at a time: reading and hashing leave Python's lock alone.
    """
    values = HugePages().zeros((header["bytes"],), torch.uint8)
    whole = values.numpy().data

    def is_whole(number: int) -> bool:
        begin = number * PART_BYTES
        part = whole[begin : begin + PART_BYTES]
        read = os.preadv(handle, [part], begin)
        found = hashlib.sha256(part).hexdigest()
        beat()
        return read == len(part) and found == header["parts"][number]

    with ThreadPoolExecutor(threads) as pool:
        if not all(pool.map(is_whole, range(len(header["parts"])))):
            raise TensorFileError("is damaged: a part has another hash")
    return values


def _tensor(values: torch.Tensor, entry: list[Any]) -> torch.Tensor:
    kind, shape, begin, size = entry
    return values[begin : begin + size].view(TYPES[kind]).view(shape)
