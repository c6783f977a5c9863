"""The metrics of the GPUs: use, memory, power, clocks, and what holds the clocks down.

Owns their names, types, labels and words; metric_table.py makes the one table of it, gpus.py reads
the values where NVIDIA's driver and the extra `nvml` are there. Without them they are left out.
"""

from telemetry.metric_spec import MetricSpec


def _gauge(name: str, text: str, unit: str, *labels: str) -> MetricSpec:
    return MetricSpec(
        name=f"iterscope_gpu_{name}",
        type="gauge",
        help=text,
        labels=("gpu", *labels),
        unit=unit,
        query="slowest_steps",
    )


GPUS = (
    MetricSpec(
        name="iterscope_gpu_info",
        type="gauge",
        help="1; a GPU of this machine as NVIDIA's driver counts it, in labels.",
        labels=("gpu", "name", "uuid", "driver"),
        query="runs",
    ),
    _gauge("utilization_ratio", "Share of time in which any kernel ran, of late.", "ratio"),
    _gauge("memory_bytes", "Memory: used by anybody, and total.", "bytes", "state"),
    _gauge("power_watts", "Power drawn now.", "W"),
    _gauge("temperature_celsius", "Temperature of the chip.", "degrees Celsius"),
    _gauge("clock_hertz", "Clocks of multiprocessors and of memory, now.", "Hz", "clock"),
    _gauge("throttled", "1 while this reason holds the clocks down.", "", "reason"),
)
