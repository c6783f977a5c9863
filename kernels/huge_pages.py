"""Memory in huge pages for what every step reads: weights, keys and values.

Owns how it is asked for. With pages of 4 KiB a processor looks up so many addresses that two cores
read weights at half of memory's rate (30 of 58 GB/s on the machine of docs/peers.md). Linux gives
pages of 2 MiB to who asks, where /sys/kernel/mm/transparent_hugepage/enabled says madvise or
always; where it does not, and on other systems, this is memory like any other.
"""

import mmap
from contextlib import suppress

import torch

PAGE_BYTES = 2 * 2**20
ALIGNMENT = 64
"""Of a tensor's first byte: a cache line, and the widest register."""
CHUNK_BYTES = 32 * PAGE_BYTES
"""Asked for at a time; what is never written to takes no memory."""


class HugePages:
    """Hands out pieces of large mappings, each of which is given back with its last tensor."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros that touches none of its pages. Raises MemoryError."""
        size = torch.Size(shape).numel() * dtype.itemsize
        taken = -(-size // ALIGNMENT) * ALIGNMENT
        if taken > len(self._rest):
            self._rest = _mapped(max(taken, CHUNK_BYTES))
        piece, self._rest = self._rest[:size], self._rest[taken:]
        return piece.view(dtype).view(shape)


def _mapped(size: int) -> torch.Tensor:
    """Return zeroed bytes that begin with a huge page and fill such pages."""
    size = -(-size // PAGE_BYTES) * PAGE_BYTES
    try:
        memory = mmap.mmap(-1, size + PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE_BYTES
    return whole[begin : begin + size]
