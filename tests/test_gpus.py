"""Figures of GPUs: NVIDIA's own package asks a driver; without one there are none, and no harm.

GIVEN the real nvidia-ml-py and, in place of a driver, a small library in C with the functions that
it calls, WHEN the GPUs are read, THEN every figure has its unit and label, and what a GPU does not
know is left out. Without a driver a server's scrape has no GPU in it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.config import ConfigError
from engine.ranges import ranges
from telemetry.gpus import Gpus, opened
from telemetry.metric_device import GPUS
from telemetry.metrics import Metrics, Outside
from tests import samples
from tests.servers import wait
from tests.test_metrics import Scrape, metered

DRIVER = r"""
#include <string.h>
#define SUPPORTED 0
#define NOT_SUPPORTED 3
typedef struct { unsigned gpu, memory; } use;
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "told by a stand-in"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "600.1"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{ *device = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned size)
{ strcpy(text, "NVIDIA Example"); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size)
{ strcpy(text, device == (void *)1L ? "GPU-a" : "GPU-b"); return 0; }
int nvmlDeviceGetUtilizationRates(void *device, use *found)
{ found->gpu = 87; found->memory = 40; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory *found)
{ found->total = 1000; found->used = 300; found->free = 700; return 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts)
{ *milliwatts = 512500; return device == (void *)1L ? 0 : NOT_SUPPORTED; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *degrees)
{ *degrees = 61; return 0; }
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *megahertz)
{ *megahertz = kind == 1 ? 1980 : 3201; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons)
{ *reasons = 0x1 | 0x4 | 0x40; return 0; }
"""
ASK = (
    "import json; from telemetry.gpus import opened, read; found = read(opened()); "
    "print(json.dumps({name: [[list(k), v] for k, v in of.items()] for name, of in found.items()}))"
)
ROOT = Path(__file__).resolve().parent.parent

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
here = opened() is not None
needs_none = pytest.mark.skipif(here, reason="there is an NVIDIA driver here")


@needs_compiler
def test_each_figure_has_its_unit_and_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True, timeout=60)
    asked = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    told = {
        name.removeprefix("iterscope_gpu_"): {tuple(labels): value for labels, value in pairs}
        for name, pairs in json.loads(asked.stdout).items()
    }
    assert told["info"] == {
        ("0", "NVIDIA Example", "GPU-a", "600.1"): 1,
        ("1", "NVIDIA Example", "GPU-b", "600.1"): 1,
    }
    assert told["utilization_ratio"][("0",)] == 0.87
    assert told["memory_bytes"][("1", "used")] == 300
    assert told["memory_bytes"][("1", "total")] == 1000
    assert told["power_watts"] == {("0",): 512.5}, "the second does not know its own"
    assert told["temperature_celsius"][("0",)] == 61
    assert told["clock_hertz"][("0", "sm")] == 1.98e9
    assert told["clock_hertz"][("0", "memory")] == 3.201e9
    throttled = {reason for (gpu, reason), held in told["throttled"].items() if held}
    assert throttled == {"power_cap", "hardware_thermal"}
    by_name = {spec.name.removeprefix("iterscope_gpu_"): spec for spec in GPUS}
    assert set(told) == set(by_name)
    for name, series in told.items():
        assert all(len(labels) == len(by_name[name].labels) for labels in series), name


@needs_none
def test_without_a_driver_a_scrape_has_no_gpus_in_it() -> None:
    assert opened() is None
    bus, _ = metered()
    gpus = Gpus()
    metrics = Metrics(bus=bus, model_name="tiny", outside=Outside(gpus=gpus))
    metrics.start()
    bus.publish(samples.run())
    wait(lambda: not gpus._thread.is_alive(), 10)
    assert "iterscope_gpu" not in Scrape(metrics).text
    metrics.stop()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has NVTX")
def test_ranges_for_profilers_are_refused_where_there_are_none() -> None:
    with ranges(False)(1, "forward"):
        pass
    with pytest.raises(ConfigError, match="--nvtx: this PyTorch was built without NVTX"):
        ranges(True)
