"""Lists from the host to the device without waiting for it.

Owns the one way in which what a step needs beside its packed batch gets there: engine/sampler.py,
penalties.py, logprobs.py and runner.py call it. A plain copy from pageable memory would wait until
the device has done all it was given, and end the overlap of two steps.
"""

from collections.abc import Sequence

import torch


def upload(
    values: Sequence[int] | Sequence[float], device: str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the values as a tensor on the device; its copy is ordered by the present stream."""
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a host's tensor on the device; PyTorch keeps the pinned memory until it is read."""
    if device == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
