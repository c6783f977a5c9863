"""What each GGUF type of tensor means, written out value by value from the format's definition.

Owns an independent statement of ggml's block formats (ggml-common.h, dequantize_row_* of
ggml-quants.c), in plain Python and float64, and the drawing of random blocks. Slow on purpose: it
is read beside the format, and nothing of the gguf package or of the engine is used.
"""

import random
import struct
from collections.abc import Callable

NIBBLES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""kvalues_iq4nl: what four bits stand for in IQ4_NL and IQ4_XS."""


def half(raw: bytes, at: int = 0) -> float:
    (value,) = struct.unpack_from("<e", raw, at)
    return float(value)


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def f32(raw: bytes) -> list[float]:
    return list(struct.unpack("<f", raw))


def f16(raw: bytes) -> list[float]:
    return [half(raw)]


def bf16(raw: bytes) -> list[float]:
    return list(struct.unpack("<f", b"\0\0" + raw))


def nibbles(packed: bytes) -> list[int]:
    """Low halves of all bytes, then high ones."""
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def q4_0(raw: bytes) -> list[float]:
    return [half(raw) * (q - 8) for q in nibbles(raw[2:])]


def q4_1(raw: bytes) -> list[float]:
    return [half(raw) * q + half(raw, 2) for q in nibbles(raw[4:])]


def with_fifth(packed: bytes, high: bytes) -> list[int]:
    (bits,) = struct.unpack("<I", high)
    return [q | (bits >> place & 1) << 4 for place, q in enumerate(nibbles(packed))]


def q5_0(raw: bytes) -> list[float]:
    return [half(raw) * (q - 16) for q in with_fifth(raw[6:], raw[2:6])]


def q5_1(raw: bytes) -> list[float]:
    return [half(raw) * q + half(raw, 2) for q in with_fifth(raw[8:], raw[4:8])]


def q8_0(raw: bytes) -> list[float]:
    return [half(raw) * signed(byte) for byte in raw[2:]]


def q2_k(raw: bytes) -> list[float]:
    """16 groups of 16: scale in the low half, minimum in the high half of a byte."""
    scales, packed, d, least = raw[:16], raw[16:80], half(raw, 80), half(raw, 82)
    values = []
    for place in range(256):
        group, part = place // 16, place // 128
        shift = place % 128 // 32 * 2
        q = packed[part * 32 + place % 32] >> shift & 3
        values.append(d * (scales[group] & 15) * q - least * (scales[group] >> 4))
    return values


def q3_k(raw: bytes) -> list[float]:
    """The third bit is a mask: where it is not set, 4 is taken off."""
    mask, packed, scales, d = raw[:32], raw[32:96], raw[96:108], half(raw, 108)
    values = []
    for place in range(256):
        group, part = place // 16, place // 128
        low = scales[group % 8] >> (4 if group >= 8 else 0) & 15
        scale = (low | (scales[8 + group % 4] >> group // 4 * 2 & 3) << 4) - 32
        q = packed[part * 32 + place % 32] >> place % 128 // 32 * 2 & 3
        q -= 0 if mask[place % 32] >> place // 32 & 1 else 4
        values.append(d * scale * q)
    return values


def scale_and_minimum(packed: bytes, group: int) -> tuple[int, int]:
    """Six bits each of eight groups, in twelve bytes."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
    return scale, packed[group + 4] >> 4 | packed[group] >> 6 << 4


def k_groups(raw: bytes, quants: list[int]) -> list[float]:
    d, least = half(raw), half(raw, 2)
    values = []
    for place, q in enumerate(quants):
        scale, minimum = scale_and_minimum(raw[4:16], place // 32)
        values.append(d * scale * q - least * minimum)
    return values


def four_bits(packed: bytes) -> list[int]:
    """Of each 32 bytes the low halves, then the high ones."""
    return [q for start in range(0, len(packed), 32) for q in nibbles(packed[start : start + 32])]


def q4_k(raw: bytes) -> list[float]:
    return k_groups(raw, four_bits(raw[16:]))


def q5_k(raw: bytes) -> list[float]:
    high, quants = raw[16:48], four_bits(raw[48:])
    fifth = [high[place % 32] >> place // 32 & 1 for place in range(256)]
    return k_groups(raw, [q | bit << 4 for q, bit in zip(quants, fifth, strict=True)])


def q6_k(raw: bytes) -> list[float]:
    low, high, scales, d = raw[:128], raw[128:192], raw[192:208], half(raw, 208)
    values = []
    for place in range(256):
        part, within = place // 128, place % 128
        byte = low[part * 64 + within % 64]
        q = byte >> 4 if within >= 64 else byte & 15
        q |= (high[part * 32 + within % 32] >> within // 32 * 2 & 3) << 4
        values.append(d * signed(scales[place // 16]) * (q - 32))
    return values


def iq4_nl(raw: bytes) -> list[float]:
    return [half(raw) * NIBBLES[q] for q in nibbles(raw[2:])]


def iq4_xs(raw: bytes) -> list[float]:
    (high,) = struct.unpack_from("<H", raw, 2)
    values = []
    for group in range(8):
        scale = raw[4 + group // 2] >> group % 2 * 4 & 15 | (high >> 2 * group & 3) << 4
        packed = raw[8 + 16 * group : 24 + 16 * group]
        values += [half(raw) * (scale - 32) * NIBBLES[q] for q in nibbles(packed)]
    return values


Decode = Callable[[bytes], list[float]]

TYPES: dict[str, tuple[Decode, int, tuple[int, ...]]] = {
    "F32": (f32, 4, ()),
    "F16": (f16, 2, (0,)),
    "BF16": (bf16, 2, ()),
    "Q4_0": (q4_0, 18, (0,)),
    "Q4_1": (q4_1, 20, (0, 2)),
    "Q5_0": (q5_0, 22, (0,)),
    "Q5_1": (q5_1, 24, (0, 2)),
    "Q8_0": (q8_0, 34, (0,)),
    "Q2_K": (q2_k, 84, (80, 82)),
    "Q3_K": (q3_k, 110, (108,)),
    "Q4_K": (q4_k, 144, (0, 2)),
    "Q5_K": (q5_k, 176, (0, 2)),
    "Q6_K": (q6_k, 210, (208,)),
    "IQ4_NL": (iq4_nl, 18, (0,)),
    "IQ4_XS": (iq4_xs, 136, (0,)),
}
"""Decoder, bytes of a block, and where in it half-precision numbers stand."""


def blocks(kind: str, count: int, draw: random.Random) -> bytes:
    """Return random blocks; only their half-precision numbers are drawn as numbers, up to 0.05."""
    _, size, halves = TYPES[kind]
    made = bytearray(draw.randbytes(size * count))
    for block in range(count):
        for at in halves:
            struct.pack_into("<e", made, block * size + at, draw.uniform(-0.05, 0.05))
        if kind in ("F32", "BF16"):
            value = struct.pack("<f", draw.uniform(-1, 1))
            made[block * size : (block + 1) * size] = value[-size:]
    return bytes(made)


def decoded(kind: str, raw: bytes) -> list[float]:
    """Return the values of blocks, one behind the other."""
    decode, size, _ = TYPES[kind]
    return [it for at in range(0, len(raw), size) for it in decode(raw[at : at + size])]
