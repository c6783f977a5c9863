"""What the device check tells: rows of one table, and whether any of them is bad.

Owns the row, the verdicts and the printing; every part returns rows. A figure that misses its aim
is `over` and no failure: one machine's figure is read by a person. What is wrong is `bad`.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.timer import event
from engine.uploads import upload

Verdict = Literal["ok", "bad", "over", "told", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line: what was looked at, what was found, what it is held to."""

    part: str
    case: str
    figure: str
    aim: str = ""
    verdict: Verdict = "told"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where the check runs, until when, and the folder for what it finds.

    `wrong_scale` plants an error into every kernel.
    """

    device: str
    tiny: bool
    wrong_scale: bool
    until_s: float
    out: Path | None = None

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.until_s - time.monotonic()

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the types that kernels are checked in."""
        return (torch.float32,) if self.device == "cpu" else (torch.bfloat16, torch.float16)

    def whole(self, values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return numbers on the device."""
        return upload(values, self.device, dtype)

    def random(self, *shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        """Return normal numbers on the device, the same for a seed."""
        made = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=made).to(device=self.device, dtype=dtype)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, work: Callable[[], object], rounds: int) -> float:
        """Return the median time of some work on the device, after one run that does not count."""
        work()
        return sorted(self._once_ms(work) for _ in range(rounds))[rounds // 2]

    def _once_ms(self, work: Callable[[], object]) -> float:
        self.synchronize()
        if self.device == "cpu":
            began = time.perf_counter()
            work()
            return (time.perf_counter() - began) * 1e3
        first, second = event(), event()
        first.record()
        work()
        second.record()
        second.synchronize()
        return float(first.elapsed_time(second))


Part = Callable[[Bench], list[Row]]


def differing(found: torch.Tensor, true: torch.Tensor) -> float:
    """Return the largest difference over the largest true value; infinite if one is no number."""
    difference = (found.double() - true.double()).abs().max()
    share = float(difference / true.double().abs().max().clamp(min=1e-9))
    return math.inf if math.isnan(share) else share


def compared(part: str, case: str, difference: float, tolerance: float) -> Row:
    """Return the row of a comparison."""
    verdict: Verdict = "ok" if difference <= tolerance else "bad"
    return Row(
        part=part,
        case=case,
        figure=f"{difference:.1e}",
        aim=f"<= {tolerance:.0e}",
        verdict=verdict,
    )


def printed(rows: list[Row]) -> str:
    """Return the table."""
    columns = [("part", "case", "figure", "aim", "verdict")]
    columns += [(row.part, row.case, row.figure, row.aim, row.verdict) for row in rows]
    widths = [max(len(line[at]) for line in columns) for at in range(5)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in columns
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
