"""The parts of the device check, in their order, and what is told at its end.

Owns which parts there are and the time each wants; bench/device_check.py calls `check`. A part that
raises is bad and hides no other. Loads torch, and Triton where it is.
"""

import sys
import time
from pathlib import Path

import torch

from bench.device import engines, kernels, steps, sweep
from bench.device.table import Bench, Part, Row, printed
from telemetry import gpus


def driver(_bench: Bench) -> list[Row]:
    """Return what NVIDIA's driver says of the device now."""
    nvml = gpus.opened()
    if nvml is None:
        why = "no driver, or not the extra nvml"
        return [Row(part="driver", case="NVML", figure=why, verdict="skipped")]
    told = gpus.read(nvml)
    return [
        Row(part="driver", case=name.removeprefix("iterscope_gpu_"), figure=str(dict(values)))
        for name, values in sorted(told.items())
        if "throttled" not in name or any(values.values())
    ]


PARTS: tuple[tuple[str, Part, float], ...] = (
    ("attention", kernels.attention, 20),
    ("ops", kernels.ops, 10),
    ("graphs", steps.graphs, 30),
    ("memory", engines.memory, 20),
    ("model step", steps.model, 60),
    ("engine", engines.whole, 60),
    ("telemetry", engines.record, 60),
    ("driver", driver, 1),
    ("sweep", sweep.tiles, 30),
)
"""Each part with the seconds it wants at least: one that has less is left out, and says so."""


def run(bench: Bench, only: tuple[str, ...]) -> list[Row]:
    """Run every part there is time for; one that raises is bad, and the others go on."""
    rows: list[Row] = []
    for name, part, wanted_s in PARTS:
        if name not in only:
            continue
        if not bench.tiny and bench.left_s < wanted_s:
            rows.append(Row(part=name, case="all of it", figure="no time", verdict="skipped"))
            continue
        began = time.monotonic()
        try:
            found = part(bench)
        except Exception as error:  # noqa: BLE001  one part's fault must not hide the others
            told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            found = [Row(part=name, case="raised", figure=told[:100], verdict="bad")]
        rows += found
        spent_s = time.monotonic() - began
        print(f"{name}: {len(found)} rows, {spent_s:.1f} s", file=sys.stderr, flush=True)
    return rows


def check(bench: Bench, only: tuple[str, ...]) -> int:
    """Run the parts, print the table, keep it; return 1 if anything is wrong."""
    if bench.device == "cpu":
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        print("PyTorch finds no CUDA device here; --device cpu --tiny runs the parts")
        return 2
    rows = run(bench, only)
    text = "\n".join((described(bench.device), "", printed(rows), "", verdict(rows)))
    print(text)
    if out := bench.out:
        keep(out, text)
    return 1 if any(row.verdict == "bad" for row in rows) else 0


def keep(folder: Path, text: str) -> None:
    """Write the table; the sweep has written its tiles beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device_check.txt").write_text(text + "\n", encoding="utf-8")


def described(device: str) -> str:
    """Return what was checked, in one line."""
    if device == "cpu":
        return f"a CPU, PyTorch {torch.__version__}: no figure here says anything of a GPU"
    name = torch.cuda.get_device_name()
    return f"{name}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}"


def verdict(rows: list[Row]) -> str:
    """Return the sum of the table."""
    kinds = ("ok", "bad", "over", "told", "skipped")
    counts = {kind: sum(row.verdict == kind for row in rows) for kind in kinds}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
