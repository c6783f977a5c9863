"""Whether an engine is right and fast on this device: one command, one table, within 8 minutes.

Kernels against the reference, replays against eager steps, decode steps against memory's floor,
whole engines, what the record costs, what the driver tells, a sweep of tiles. `--device cpu --tiny`
runs every part in seconds, in Triton's interpreter where Triton is, so that CI keeps the script
alive. Exits with 1 when anything is wrong; `--plant wrong-scale` shows that it can.
"""

import argparse
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

BUDGET_S, TINY_BUDGET_S = 460.0, 60.0
PARTS = (
    *("attention", "ops", "graphs", "memory", "model step", "engine", "telemetry", "driver"),
    "sweep",
)


def main() -> int:
    """Check this device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes: seconds, on a CPU")
    parser.add_argument("--plant", choices=("wrong-scale",), help="plant an error, to see it found")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, comma separated")
    parser.add_argument("--budget-s", type=float, help="seconds that all of it may take")
    parser.add_argument("--out", type=Path, help="folder for the table and the tiles found best")
    parser.add_argument("--interpreted", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    only = tuple(flags.only.split(","))
    if unknown := sorted(set(only) - set(PARTS)):
        parser.error(f"--only: no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if flags.device == "cpu" and not flags.interpreted:
        interpret()
    # After `interpret`, and so that a wrong flag costs no second: these load torch.
    from bench.device.check import check  # noqa: PLC0415
    from bench.device.table import Bench  # noqa: PLC0415

    bench = Bench(
        device=flags.device,
        tiny=flags.tiny,
        wrong_scale=flags.plant == "wrong-scale",
        until_s=time.monotonic() + (flags.budget_s or (TINY_BUDGET_S if flags.tiny else BUDGET_S)),
        out=flags.out,
    )
    return check(bench, only)


def interpret() -> None:
    """Begin anew with Triton's interpreter, which must be asked for before Triton is loaded."""
    if find_spec("triton") is not None:
        again = [sys.executable, "-m", "bench.device_check", *sys.argv[1:], "--interpreted"]
        os.execvp("env", ["env", "TRITON_INTERPRET=1", *again])


if __name__ == "__main__":
    sys.exit(main())
