"""Where the time of a decode step goes: products, attention, the rest of C++, and Python.

The real core on the demo model in process, as bench/engine.py has it. The C++ step tells its parts
(kernels/cpu/profile.h), waiting at their barriers included; what remains of an iteration's wall
time is Python's, from planning to the record. Prints shares; the first row is the whole step.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.engine import ANSWER, CONTEXT, Bench
from bench.machine import StolenTime, describe
from engine.device import step_profile

STEPS = 32


def profile(bench: Bench, rows: int) -> dict[str, float]:
    """Return the microseconds of each part of a step in which so many rows decode."""
    core, recorder = bench.core, bench.recorder
    recorder.clear()
    for _ in range(rows):
        bench.add(CONTEXT, ANSWER + 2 * rows)
    core.wake()
    while not recorder.iterations or recorder.iterations[-1].decode_tokens < rows:
        core.step()
    recorder.clear()
    step_profile(on=True)
    for _ in range(STEPS):
        core.step()
    parts, steps = step_profile(on=False), list(recorder.iterations)
    while core.has_work:
        core.step()
    assert all(step.decode_tokens == rows and not step.prefill_tokens for step in steps)
    spent_ns = sum(step.end_at_ns - step.begin_at_ns for step in steps)
    found = {"step": spent_ns} | parts | {"python": spent_ns - sum(parts.values())}
    return {name: value / len(steps) / 1e3 for name, value in found.items()}


def main() -> int:
    """Measure; print a column for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", default="auto", help="int8:bf16: keys and values in bf16")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    bench = Bench(flags.dtype, "native", None)
    with StolenTime() as stolen:
        found = {rows: _medians(bench, rows, flags.rounds) for rows in flags.rows}
    print(f"{bench.run.dtype}, us a step" + "".join(f"{rows:>12} rows" for rows in found))
    for name in next(iter(found.values())):
        cells = (f"{one[name]:9.0f} {one[name] / one['step']:6.1%}" for one in found.values())
        print(f"{name:18}" + " ".join(cells))
    if flags.json:
        report: dict[str, Any] = {f"rows_{rows}_us": one for rows, one in found.items()}
        flags.json.write_text(json.dumps(report | describe(stolen)))
    return 0


def _medians(bench: Bench, rows: int, rounds: int) -> dict[str, float]:
    found = [profile(bench, rows) for _ in range(rounds)]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


if __name__ == "__main__":
    sys.exit(main())
