"""How much memory the KV cache may take: what is left beside the model after the worst of steps.

Owns the measuring, on a GPU and on a host, and the arithmetic. engine/build.py asks once, when the
model is loaded and nothing is served yet. Must never count on memory that a step will need.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

SPARE_BYTES = 2**20
"""Below this a measurement is noise: what is left for the cache is never taken to be less."""


class Memory(Protocol):
    """A device's memory, as this process can use it."""

    def rest(self) -> None:
        """Give back what nobody uses, and begin to watch the peak anew."""
        ...

    def free_bytes(self) -> int:
        """Return what could be allocated now."""
        ...

    def total_bytes(self) -> int:
        """Return all there is."""
        ...

    def transient_bytes(self) -> int:
        """Return by how much the peak since `rest` lies above what was in use then."""
        ...


class CudaMemory:
    """The present GPU's."""

    def __init__(self) -> None:
        self._rested = 0

    def rest(self) -> None:
        """Give back what nobody uses, and begin to watch the peak anew."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._rested = torch.cuda.memory_reserved()

    def free_bytes(self) -> int:
        """Return what could be allocated now."""
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    def total_bytes(self) -> int:
        """Return all there is."""
        return torch.cuda.mem_get_info()[1]

    def transient_bytes(self) -> int:
        """Return the growth that PyTorch has reserved: pieces too small to use count too."""
        torch.cuda.synchronize()
        return max(0, torch.cuda.max_memory_reserved() - self._rested)


class HostMemory:
    """This machine's, by Linux's own count."""

    def __init__(self) -> None:
        self._rested = 0

    def rest(self) -> None:
        """Begin to watch the peak anew."""
        Path("/proc/self/clear_refs").write_text("5")
        self._rested = _kilobytes("/proc/self/status", "VmRSS")

    def free_bytes(self) -> int:
        """Return what could be allocated now."""
        return _kilobytes("/proc/meminfo", "MemAvailable")

    def total_bytes(self) -> int:
        """Return all there is."""
        return _kilobytes("/proc/meminfo", "MemTotal")

    def transient_bytes(self) -> int:
        """Return the growth of what was resident."""
        return max(0, _kilobytes("/proc/self/status", "VmHWM") - self._rested)


def _kilobytes(file: str, name: str) -> int:
    """Return a line's figure in bytes."""
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def device_memory(device: str) -> Memory:
    """Return the memory of a device."""
    return HostMemory() if device == "cpu" else CudaMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes: all there is, what is free at rest, what a worst step and the graphs take of that."""

    total: int
    free: int
    transient: int
    graphs: int

    def pool_bytes(self, utilization: float) -> int:
        """Return what the KV cache may have, so that the device is used to this share at most."""
        kept_free = int(self.total * (1 - utilization))
        return max(SPARE_BYTES, self.free - self.transient - self.graphs - kept_free)


def measure(
    memory: Memory, worst: Callable[[], None], graphs_bytes: Callable[[Memory], int]
) -> Measured:
    """Run the worst steps twice and look: what only the first run makes, and keeps, is no peak."""
    worst()
    memory.rest()
    worst()
    transient = memory.transient_bytes()
    graphs = graphs_bytes(memory)
    memory.rest()
    return Measured(
        total=memory.total_bytes(), free=memory.free_bytes(), transient=transient, graphs=graphs
    )
