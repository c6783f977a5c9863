"""NVIDIA's own figures of this machine's GPUs, where the driver and the extra `nvml` are there.

Owns the reading, once a second in a thread of its own: a scrape never waits for a driver, and one
that hangs costs its figures alone. server/metering.py makes one and tells metrics of it. Must never
keep a server from starting.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from telemetry.histogram import LabelValues, Values

PERIOD_S = 1.0
GPUS_MAX = 16
THROTTLES = MappingProxyType(
    {
        "application_clocks": 0x2,
        "power_cap": 0x4,
        "hardware": 0x8,
        "sync_boost": 0x10,
        "thermal": 0x20,
        "hardware_thermal": 0x40,
        "power_brake": 0x80,
        "display_clock": 0x100,
    }
)
"""Reasons by NVML's bits; an idle GPU's low clocks (0x1) are no throttling."""


class Gpus:
    """The newest figures of each GPU, by metric; empty where there are none."""

    def __init__(self) -> None:
        self._values: Mapping[str, Values] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, name="gpus", daemon=True)

    def start(self) -> None:
        """Begin to read in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading; a driver that hangs is not waited for."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(PERIOD_S)

    def values(self) -> Mapping[str, Values]:
        """Return what was read last."""
        return self._values

    def _live(self) -> None:
        nvml = opened()
        while nvml is not None:
            try:
                self._values = read(nvml)
            except nvml.NVMLError as error:
                self._values = {}
                logging.getLogger("iterscope.metrics").warning("the GPUs cannot be read: %s", error)
                return
            if self._stopping.wait(PERIOD_S):
                nvml.nvmlShutdown()
                return


def opened() -> Any:
    """Return NVIDIA's module, ready to be asked; None without it, without a driver or a GPU."""
    try:
        import pynvml  # noqa: PLC0415  an extra
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def read(nvml: Any) -> dict[str, Values]:
    """Return every figure of each GPU; what a GPU does not know is left out."""
    driver = nvml.nvmlSystemGetDriverVersion()
    found: dict[str, dict[LabelValues, float]] = {}

    def tell(name: str, labels: LabelValues, ask: Callable[[], float]) -> None:
        try:
            found.setdefault(f"iterscope_gpu_{name}", {})[labels] = ask()
        except nvml.NVMLError_NotSupported:
            return

    for index in range(min(GPUS_MAX, nvml.nvmlDeviceGetCount())):
        device, gpu = nvml.nvmlDeviceGetHandleByIndex(index), str(index)
        what = (gpu, nvml.nvmlDeviceGetName(device), nvml.nvmlDeviceGetUUID(device), driver)
        tell("info", what, lambda: 1)
        _tell_of(nvml, device, lambda name, ask, *more, gpu=gpu: tell(name, (gpu, *more), ask))
    return {name: dict(of) for name, of in found.items() if of}


def _tell_of(nvml: Any, device: Any, tell: Callable[..., None]) -> None:
    """Tell one GPU's figures in the units that metrics have."""
    tell("utilization_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)
    tell("memory_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(device).used, "used")
    tell("memory_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(device).total, "total")
    tell("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000)
    tell(
        "temperature_celsius",
        lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
    )
    for clock, kind in (("sm", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM)):
        tell(
            "clock_hertz",
            lambda kind=kind: nvml.nvmlDeviceGetClockInfo(device, kind) * 1e6,
            clock,
        )
    for reason, bit in THROTTLES.items():
        tell(
            "throttled",
            lambda bit=bit: bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device) & bit),
            reason,
        )
