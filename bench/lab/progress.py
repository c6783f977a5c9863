"""How far an experiment is, for the person who waits: a bar at a terminal, lines in a log.

Owns what is printed while runs go on, and the estimate of the time left: the plan's own times at
first, then what runs have taken since the first began. experiment.py tells it of each run. Must
never slow a run down: a run in progress moves the bar a few times a second and no more.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

FIRST_GUESS_S = 3.0
"""Beyond its load, what a run is thought to take before any has."""


class Shown:
    """The progress of an experiment of so many runs, each of so many seconds at least."""

    def __init__(
        self,
        runs: int,
        run_s: float,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._runs, self._run_s = runs, run_s
        self._done = 0
        self._here = 0
        self._began: float | None = None
        self._ran = 0.0
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bar: Progress | None = None
        if sys.stderr.isatty() and not quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("starting", total=runs * run_s, left="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def skipped(self, runs: int) -> None:
        """Take note of runs that an earlier start has done."""
        self._done += runs
        if runs:
            self._console.print(f"{runs} of {self._runs} runs are there already")

    def says(self, text: str) -> None:
        """Tell what is done now."""
        if self._bar is None:
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            self._bar.update(self._task, description=text)

    def ticks(self, seconds: float) -> None:
        """Move the bar inside a run; the first one begins the measure of the time left."""
        if self._began is None:
            self._began = self._clock() - seconds
        if self._bar is not None:
            at_s = self._done * self._run_s + min(seconds, self._run_s)
            self._bar.update(self._task, completed=at_s, left=f"{left(self.left_s)} left")

    def ran(self, text: str, seconds: float) -> None:
        """Tell what a run found."""
        self._done += 1
        self._here += 1
        self._ran = self._clock()
        if self._began is None:
            self._began = self._ran - seconds
        line = f"[{self._done}/{self._runs}] {text}; {left(self.left_s)} left"
        self._console.print(line, markup=False, soft_wrap=True)
        self.ticks(0.0)

    @property
    def left_s(self) -> float:
        """Return how long the rest will take; what lies between runs is in it."""
        runs = self._runs - self._done
        if not self._here or self._began is None:
            each_s, since_s = self._run_s + FIRST_GUESS_S, 0.0
            if self._began is not None:
                since_s = self._clock() - self._began
        else:
            each_s = (self._ran - self._began) / self._here
            since_s = self._clock() - self._ran
        # A run that takes longer than those before it does not make the ones after it shorter.
        return runs * each_s - min(since_s, each_s) if runs else 0.0


def left(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
