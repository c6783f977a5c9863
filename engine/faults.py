"""What an exception means for those it hit: one request, a step's requests, or the whole engine.

Owns the reading of exceptions into kinds and their record; core.py and process.py call it. Knows
torch's errors by name and text, since the core loads no torch. Never raises and never decides who
ends: that is the scheduler's.
"""

import traceback
from typing import Literal

from telemetry.records import Fault

Kind = Literal["memory", "device", "step"]
LINE_CHARS_MAX = 300
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
DEVICE_LOST = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side assert")


class DeviceLost(Exception):
    """The device answers nothing any more: this process must end, another one may do better."""


def kind_of(error: BaseException) -> Kind:
    """Return what broke: memory ran out, the device is lost, or something in this one step."""
    text = str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "memory"
    if isinstance(error, RuntimeError) and any(part in text for part in OUT_OF_MEMORY):
        return "memory"
    if isinstance(error, RuntimeError) and any(part in text for part in DEVICE_LOST):
        return "device"
    return "step"


def line_of(error: BaseException) -> str:
    """Return an exception's kind and the first line of what it says, cut to a readable length."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:LINE_CHARS_MAX]


def fault_of(error: BaseException, *, where: str, now_ns: int, step: int | None = None) -> Fault:
    """Return the record of an exception."""
    return Fault(
        fault_at_ns=now_ns,
        step=step,
        where=where,
        error=line_of(error),
        traceback="".join(traceback.format_exception(error)),
    )
