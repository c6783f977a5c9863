"""How attention is launched: tiles, warps and parts, from the host's integers alone.

Owns every choice that a device's size or a sweep decides; kernels/triton/backend.py asks once a
step, without a look at the device. What is measured stands in kernels/tuning/*.json, by the
device's name; elsewhere the defaults serve. A launch depends on a step's shape and never on its
contexts, so that a captured graph can be replayed while they grow.
"""

import json
import re
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path

from kernels.base import AttentionShape

PARTS_MAX = 32
PARTS_BYTES_MAX = 64 * 2**20
"""Bound of what parts of rows keep between the two kernels."""

PART_TOKENS, LONG_PART_TOKENS = 256, 4096
"""What a part computes at least where the device has room, and where it is full."""

PROGRAMS_PER_PROCESSOR = 2
HOPPER_SHARED_BYTES = 200 * 1024
"""GPUs with more shared memory in a block have the registers and the products for larger ones."""

TUNING = Path(__file__).resolve().parent.parent / "tuning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a launch must know of a GPU."""

    name: str
    processors: int
    shared_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A program's share: block_m lines (query tokens x group heads) by `tile` keys at a time."""

    block_m: int
    tile: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaunch:
    """Every integer that the launches of one step's attention take."""

    tokens: int
    rows: int
    decode: int
    blocks: int
    segments: int
    part_tiles: int
    tiles: Tiles

    def key(self) -> tuple[int, ...]:
        """Return all of them: equal keys, equal launches."""
        *most, tiles = astuple(self)
        return (*most, *tiles)


def attention_launch(
    shape: AttentionShape,
    tiles: Tiles,
    processors: int,
    *,
    query_lengths: list[int],
    table_tokens: int,
) -> AttentionLaunch:
    """Return how rows of these lengths are launched, whose tables have room for table_tokens."""
    rows, tokens = len(query_lengths), sum(query_lengths)
    decode = tokens == rows and max(query_lengths) == 1
    group = shape.heads // shape.kv_heads
    blocks = rows if decode else tokens // (tiles.block_m // group) + rows
    programs, room = blocks * shape.kv_heads, PROGRAMS_PER_PROCESSOR * processors
    part_tokens = PART_TOKENS if 2 * programs <= room else LONG_PART_TOKENS
    wanted = max(room // programs, -(-table_tokens // LONG_PART_TOKENS))
    fit = PARTS_BYTES_MAX // (4 * rows * shape.heads * width_of(shape.head_dim))
    segments = max(1, min(wanted, table_tokens // part_tokens, fit, PARTS_MAX))
    return AttentionLaunch(
        tokens=tokens,
        rows=rows,
        decode=int(decode),
        blocks=blocks,
        segments=segments,
        part_tiles=max(1, part_tokens // tiles.tile),
        tiles=tiles,
    )


@lru_cache(maxsize=64)
def attention_tiles(
    shape: AttentionShape, device: Device, *, item_bytes: int, block_tokens: int, decode: bool
) -> Tiles:
    """Return the tiles measured as best for this device and shape, or what is safe."""
    entry = entry_name(shape, item_bytes=item_bytes, block_tokens=block_tokens, decode=decode)
    if found := _tuned(device.name).get(entry):
        return Tiles(**found)
    return _default_tiles(shape, device, item_bytes=item_bytes, decode=decode)


def _default_tiles(
    shape: AttentionShape, device: Device, *, item_bytes: int, decode: bool
) -> Tiles:
    """Return tiles whose keys and values, some stages ahead, fit into shared memory."""
    group, width = shape.heads // shape.kv_heads, width_of(shape.head_dim)
    least = max(16, power_of_two(group))
    exact, wide = item_bytes > 2, width > 128
    hopper = device.shared_bytes > HOPPER_SHARED_BYTES
    block_m = least if decode else max(least, 32 if exact else 128 if hopper and not wide else 64)
    warps = 4 if block_m * width <= (64 if hopper else 32) * 128 else 8  # no spilled registers
    tile = 16 if exact and wide else 32 if exact or wide else 64
    stages = 4 if decode else 3
    while stages > 1 and shared_bytes(block_m, tile, stages, width, item_bytes) > (
        device.shared_bytes
    ):
        stages -= 1
    return Tiles(block_m=block_m, tile=tile, warps=warps, stages=stages)


def candidate_tiles(
    shape: AttentionShape, device: Device, *, item_bytes: int, decode: bool
) -> list[Tiles]:
    """Return the tiles that a sweep may try on this device, the default among them."""
    width = width_of(shape.head_dim)
    least = max(16, power_of_two(shape.heads // shape.kv_heads))
    tried = [
        Tiles(block_m=block_m, tile=tile, warps=warps, stages=stages)
        for block_m in ([least] if decode else [max(least, 32), 64, 128])
        for tile in (16, 32, 64, 128)
        for warps in (2, 4, 8)
        for stages in (2, 3, 4, 5)
        if block_m >= least
        and shared_bytes(block_m, tile, stages, width, item_bytes) <= device.shared_bytes
        and block_m * width <= 64 * 32 * warps * 4  # at most 128 registers for what is summed
    ]
    default = _default_tiles(shape, device, item_bytes=item_bytes, decode=decode)
    return list(dict.fromkeys([default, *tried]))


def shared_bytes(block_m: int, tile: int, stages: int, width: int, item_bytes: int) -> int:
    """Return about what a program keeps in shared memory: queries, and tiles on their way."""
    return (block_m * width + 2 * stages * tile * width + block_m * tile) * item_bytes


def width_of(head_dim: int) -> int:
    """Return the numbers that a head takes in a tile: products take 16, 32, 64 ..."""
    return max(16, power_of_two(head_dim))


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


# ---- what a sweep has measured


def tuning_file(device_name: str) -> Path:
    """Return where the figures of a device are kept."""
    return TUNING / f"{re.sub(r'[^A-Za-z0-9]+', '-', device_name).strip('-').lower()}.json"


@lru_cache(maxsize=8)
def _tuned(device_name: str) -> dict[str, dict[str, int]]:
    path = tuning_file(device_name)
    if not path.exists():
        return {}
    found: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="utf-8"))["attention"]
    return found


def write_tuned(device_name: str, measured: dict[str, Tiles]) -> Path:
    """Keep what a sweep found best, by `entry_name`; return the file."""
    path = tuning_file(device_name)
    path.parent.mkdir(exist_ok=True)
    table = {name: _as_dict(tiles) for name, tiles in sorted(measured.items())}
    text = json.dumps({"device": device_name, "attention": table}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    _tuned.cache_clear()
    attention_tiles.cache_clear()
    return path


def _as_dict(tiles: Tiles) -> dict[str, int]:
    names = ("block_m", "tile", "warps", "stages")
    return dict(zip(names, astuple(tiles), strict=True))


def entry_name(shape: AttentionShape, *, item_bytes: int, block_tokens: int, decode: bool) -> str:
    """Return the name of what is measured for one kind of step of a shape."""
    kind = "decode" if decode else "mixed"
    group = shape.heads // shape.kv_heads
    return f"{kind}-d{shape.head_dim}-g{group}-b{item_bytes}-t{block_tokens}"
