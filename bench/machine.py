"""What a figure was measured on: the machine, the versions, and how much of it others took.

Owns the lines that every script in bench/ puts into its JSON. A figure without them says nothing
on shared machines. Measures no product.
"""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PACKAGES = ("iterscope", "torch", "numpy", "duckdb", "msgspec")


def _ticks() -> tuple[int, int]:
    """Return (stolen, all) CPU time in clock ticks since boot; zeros where unknown."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    fields = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
    return fields[7], sum(fields)


class StolenTime:
    """The share of CPU time that the host took from this machine inside the `with`."""

    def __init__(self) -> None:
        self.share = 0.0
        self.seconds = 0.0
        self._from = (0, 0)
        self._began = 0.0

    def __enter__(self) -> Self:
        self._from, self._began = _ticks(), time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stolen, total = _ticks()
        self.share = (stolen - self._from[0]) / max(1, total - self._from[1])
        self.seconds = time.monotonic() - self._began


def describe(stolen: StolenTime) -> dict[str, Any]:
    """Return machine, versions, revision and stolen share."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0].split(":")[1].strip() if names else model
    return {
        "machine": {"cpu": model, "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {name: _version(name) for name in PACKAGES},
        "revision": _revision(),
        "stolen_share": stolen.share,
        "seconds": stolen.seconds,
        "load_average": os.getloadavg()[0],
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _revision() -> str:
    # Of the checkout that this file is of, wherever the command was given; a wheel has none.
    here = Path(__file__).parents[1]
    if not (here / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # installed where there is no git
        return "unknown"
    return found.stdout.strip() or "unknown"
