"""Names for the parts of a step in NVIDIA's profilers, by switch.

Owns the choice between a range and nothing. engine/runner.py opens one around each part of a step
with --nvtx. A PyTorch that was built without them raises at the first, so one is tried at start.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from engine.config import ConfigError

Range = Callable[[int, str], AbstractContextManager[None]]
"""Opens the range of a step's part."""

NOTHING = nullcontext()


def ranges(wanted: bool) -> Range:
    """Return what opens a range; raises ConfigError when they are wanted and not to be had."""
    if not wanted:
        return _nothing
    try:
        with torch.cuda.nvtx.range("iterscope"):
            pass
    except RuntimeError as error:
        raise ConfigError("--nvtx: this PyTorch was built without NVTX (no CUDA)") from error
    return _named


def _named(step: int, part: str) -> AbstractContextManager[None]:
    found: AbstractContextManager[None] = torch.cuda.nvtx.range(f"step {step}: {part}")
    return found


def _nothing(step: int, part: str) -> AbstractContextManager[None]:  # noqa: ARG001
    return NOTHING
