"""Bounded reading of model files: a GGUF header and JSON, from sources nobody vouches for.

Owns SpecError, the parsing of bytes into plain values, and typed access to them; engine/spec.py
and engine/weights.py call it. Knows no torch and no meaning of any key. Never trusts a count or a
size of a file: whatever does not fit into the file or under a stated bound is a SpecError naming
file and cause.
"""

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GGUF_MAGIC = b"GGUF"
LFS_MAGIC = b"version https://git-lfs"
JSON_BYTES_MAX = 16 * 2**20
HEADER_BYTES_MAX = 64 * 2**20
ENTRIES_MAX = 2**16
STRINGS_MAX = 2**21
NAME_BYTES_MAX = 2**16
DIMENSIONS_MAX = 4
ALIGNMENT_MAX = 2**16

STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""GGUF value types by number, as struct formats (ggml's docs/gguf.md)."""

BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
"""Tensor types this product reads: number to (name, values a block, bytes a block)."""


class SpecError(Exception):
    """The model's files cannot be used: one line naming the file and the cause."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: rows first shape, type number, absolute offset and size in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All metadata of a GGUF file and the directory of its tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads little-endian values one after another and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def fail(self, cause: str) -> SpecError:
        return SpecError(f"{self.path}: {cause}")

    def need(self, size: int) -> None:
        if size > min(len(self.data), HEADER_BYTES_MAX) - self.at:
            raise self.fail(f"cut short or damaged: byte {self.at} claims {size} more bytes")

    def unpack(self, form: str) -> Any:
        size = struct.calcsize("<" + form)
        self.need(size)
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += size
        return value

    def count(self, bound: int, what: str) -> int:
        value: int = self.unpack("Q")
        if value > bound:
            raise self.fail(f"damaged: {value} {what}, more than {bound}")
        return value

    def text(self, bound: int, what: str) -> str:
        size = self.count(bound, f"bytes of {what}")
        self.need(size)
        raw = self.data[self.at : self.at + size]
        self.at += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"damaged: {what} at byte {self.at - size} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text(len(self.data), "text")
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise self.fail(f"damaged: unknown value type {kind} at byte {self.at}")
        return self.unpack(SCALARS[kind])

    def texts(self, count: int) -> list[str]:
        """Read so many texts as `text` does, in a third of its time: a vocabulary has 100,000."""
        data, at, found = self.data, self.at, list[str]()
        end = min(len(data), HEADER_BYTES_MAX)
        for _ in range(count):
            stop = at + 8 + int.from_bytes(data[at : at + 8], "little")
            if stop > end:
                break
            try:
                found.append(data[at + 8 : stop].decode())
            except UnicodeDecodeError:
                break
            at = stop
        self.at = at
        # One that is wrong is read again, to say what is wrong with it.
        return found + [self.text(len(data), "text") for _ in range(count - len(found))]

    def array(self) -> list[Any]:
        kind = self.unpack("I")
        if kind == STRING:
            return self.texts(self.count(STRINGS_MAX, "texts in a list"))
        if kind not in SCALARS:
            raise self.fail(f"lists of value type {kind} are not supported")
        size = self.count(STRINGS_MAX, "values in a list")
        form = f"<{size}{SCALARS[kind]}"
        self.need(struct.calcsize(form))
        values = list(struct.unpack_from(form, self.data, self.at))
        self.at += struct.calcsize(form)
        return values


def read_gguf(path: Path) -> GgufHeader:
    """Read a GGUF file's metadata and tensor directory, in milliseconds, without its weights."""
    refuse_special(path)
    try:
        with path.open("rb") as file:
            refuse_pointer(path, file.read(len(LFS_MAGIC)))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _header(_Cursor(path, data))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error


def brief(error: Exception) -> str:
    """Return the first line of what an error of a library says, cut to a readable length."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def refuse_special(path: Path) -> None:
    """Raise for what is there and no plain file: reading from a pipe or a device never ends."""
    if path.exists() and not path.is_file():
        raise SpecError(f"{path}: not a plain file")


def refuse_pointer(path: Path, start: bytes) -> None:
    """Raise when a file is empty or is the text that Git LFS leaves in place of the file."""
    if not start:
        raise SpecError(f"{path}: the file is empty")
    if start.startswith(LFS_MAGIC):
        raise SpecError(f"{path}: a Git LFS pointer, not the file itself; run git lfs pull")


def _header(cursor: _Cursor) -> GgufHeader:
    cursor.need(24)
    if cursor.data[:4] != GGUF_MAGIC:
        raise cursor.fail("not a GGUF file")
    cursor.at = 4
    version = cursor.unpack("I")
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version} is not supported (2 and 3 are)")
    tensors = cursor.count(ENTRIES_MAX, "tensors")
    entries = cursor.count(ENTRIES_MAX, "metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text(NAME_BYTES_MAX, "a key")
        metadata[key] = cursor.value(cursor.unpack("I"))
    directory = [_tensor(cursor) for _ in range(tensors)]
    return GgufHeader(cursor.path, metadata, _placed(cursor, metadata, directory))


def _tensor(cursor: _Cursor) -> GgufTensor:
    name = cursor.text(NAME_BYTES_MAX, "a tensor's name")
    rank = cursor.unpack("I")
    if not 1 <= rank <= DIMENSIONS_MAX:
        raise cursor.fail(f"damaged: tensor {name!r:.60} has {rank} dimensions")
    shape = tuple(reversed([cursor.count(2**40, "values in a row") for _ in range(rank)]))
    kind = cursor.unpack("I")
    offset = cursor.unpack("Q")
    if kind not in BLOCKS:
        raise cursor.fail(f"tensor {name!r:.60} has type {kind}, which is not supported")
    _, values, size = BLOCKS[kind]
    if shape[-1] % values or min(shape) < 1:
        raise cursor.fail(f"damaged: tensor {name!r:.60} has shape {list(shape)}")
    return GgufTensor(name, shape, kind, offset, math.prod(shape) // values * size)


def _placed(
    cursor: _Cursor, metadata: dict[str, Any], directory: list[GgufTensor]
) -> dict[str, GgufTensor]:
    """Return the directory with absolute offsets; every tensor lies within the file."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= ALIGNMENT_MAX:
        raise cursor.fail(f"damaged: alignment {alignment!r:.60}")
    start = -(-cursor.at // alignment) * alignment
    length = len(cursor.data)
    placed: dict[str, GgufTensor] = {}
    for item in directory:
        end = start + item.offset + item.size
        if end > length:
            raise cursor.fail(
                f"cut short: tensor {item.name!r:.60} ends at byte {end}, the file has {length}"
            )
        if item.name in placed:
            raise cursor.fail(f"damaged: tensor {item.name!r:.60} is listed twice")
        placed[item.name] = GgufTensor(
            item.name, item.shape, item.kind, start + item.offset, item.size
        )
    return placed


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most JSON_BYTES_MAX bytes."""
    refuse_special(path)
    try:
        with path.open("rb") as file:
            raw = file.read(JSON_BYTES_MAX + 1)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    refuse_pointer(path, raw)
    if len(raw) > JSON_BYTES_MAX:
        raise SpecError(f"{path}: more than {JSON_BYTES_MAX} bytes of JSON")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise SpecError(f"{path}: not a JSON object")
    return content


class Fields:
    """Typed, bounded reading of one file's key-value metadata."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    def fail(self, cause: str) -> SpecError:
        """Return the error that names this file."""
        return SpecError(f"{self.path}: {cause}")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.content.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fail(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(f"{key} is not a number")
        if not math.isfinite(value) or value <= 0:
            raise self.fail(f"{key} is {value}")
        return float(value)

    def optional(self, key: str, default: object = None) -> float | None:
        """Return a finite number above 0, or None where neither the key nor a default says one."""
        if self.content.get(key, default) is None:
            return None
        return self.number(key, default if isinstance(default, float) else None)

    def integer(self, key: str, high: int, default: int | None = None, low: int = 1) -> int:
        """Return a whole number within low and high, both included."""
        value = self.content.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fail(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(f"{key} is not a whole number")
        if not low <= value <= high:
            raise self.fail(f"{key} is {value}, not within {low} and {high}")
        return value

    def text(self, key: str) -> str | None:
        """Return a text, or None where the key is absent or null."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(f"{key} is not a text")
        return value

    def flag(self, key: str) -> bool:
        """Return whether the key is there and true."""
        return self.content.get(key) is True

    def ids(self, key: str, vocab_size: int) -> list[int]:
        """Return one id or a list of ids; those outside the vocabulary are refused."""
        value = self.content.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        for item in found:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
                raise self.fail(f"{key} holds {item!r:.60}, not a token id below {vocab_size}")
        return found
