"""Runs of a search: a server a run, the round's load on it, and the rate that the search is at.

Owns the time a search may take and the servers it starts, one after the other, each with a history
of its own that is gone with it; tune_command.py makes it, tune.py asks it for trials. The first
rate is one at which the settings to begin with miss the objective now and then: where all is in
time, or nothing is, settings cannot be told apart. Must never run two servers at once.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.lab import tune_reasons
from bench.lab.make import Recipe, make
from bench.lab.measure import Send, measure, sent
from bench.lab.serving import PROGRAM, Served, ServerFailed, serving
from bench.lab.tune import Setting, Trial
from bench.lab.workload import Slo, Workload

CUT_OFF_S, WARM_S, START_S = 2.0, 1.0, 3.0
"""What a run takes beyond its seconds, at first; then what runs have taken."""
ASKS_A_SECOND = 60
"""More than any server here answers: what a closed loop takes from."""
SHARE_LOW, SHARE_HIGH = 0.5, 0.97
PROBES_MAX = 4
SATURATED_ROUND, PROBE_ROUND = 900, 901
SATURATED_S, FULL_SEQS = 6.0, 16


@dataclass(slots=True)
class Tuning:
    """A search on its way: its budget, what every server is started with, how long runs take."""

    folder: Path
    shared: tuple[str, ...]
    recipe: Recipe
    slo: Slo
    seed: int
    deadline: float
    seconds: float
    says: Callable[[str], None]
    fixed: Workload | None = None
    rate: float = 0.0
    program: tuple[str, ...] = PROGRAM
    start_s: float = START_S
    longest_s: float = 0.0
    starts: int = 0
    notes: list[str] = field(default_factory=list)

    def has_time(self, runs: int) -> bool:
        """Return whether so many runs fit what is left."""
        each = self.longest_s or self.seconds + CUT_OFF_S + WARM_S + self.start_s
        return time.monotonic() + runs * each <= self.deadline

    def trial(self, setting: Setting, number: int) -> Trial | None:
        """Run one setting under one round's load; None if a server fails so, which is noted.

        Raises ServerFailed where no server has ever run.
        """
        began = time.monotonic()
        load = self.fixed or self._load(number, self.rate)
        try:
            with self._server(setting) as served:
                measured = measure(served, load, self._send(f"tune-{number}", CUT_OFF_S))
        except ServerFailed as error:
            if not self.longest_s:
                raise
            self.notes.append(f"{setting}: {str(error).splitlines()[0]}")
            return None
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        first, later, judged = tune_reasons.late_of(measured.load, self.slo)
        asked = max(1, len(measured.load["asks"]))
        trial = Trial(
            figures=measured.run["figures"],
            late_ttft=first,
            late_tpot=later,
            judged=judged,
            causes={cause: ms / asked for cause, ms in measured.causes.items()},
        )
        what = "finding the rate" if number == PROBE_ROUND else f"round {number + 1}"
        self._say(what, setting, trial)
        return trial

    def guess_rate(self, base: Setting) -> None:
        """Set the rate to a little less than what all places full would end."""
        self.rate = 0.9 * self._saturated(base)

    def find_rate(self, base: Setting) -> None:
        """Move the rate to where `base` serves some, but not all, in time."""
        for _ in range(PROBES_MAX):
            trial = self.trial(base, PROBE_ROUND)
            if trial is None or SHARE_LOW <= trial.share <= SHARE_HIGH:
                return
            self.rate *= 1.25 if trial.share > SHARE_HIGH else 0.75

    def _saturated(self, base: Setting) -> float:
        """Return how many requests a second all places full would end."""
        load = make(
            self.recipe,
            rate=ASKS_A_SECOND,
            seconds=max(SATURATED_S, self.seconds),
            seed=self.seed * 1000 + SATURATED_ROUND,
            concurrency=min(base.max_num_seqs, FULL_SEQS),
        )
        with self._server(base) as served:
            found = sent(served.url, load, self._send("full", 0.0))
        wanted = sum(ask["wanted"] for ask in found["asks"]) / max(1, len(found["asks"]))
        instants = [at_ns for ask in found["asks"] for at_ns in ask["tokens_ns"]]
        if not instants:
            raise ServerFailed("no token came while all places of the batch were full")
        # All places prefill at once at the begin: the latter half is what a full batch does. A
        # fast server has answered all before the time is over.
        end_ns = min(load.seconds * 1e9, max(instants))
        tokens = sum(end_ns / 2 <= at_ns <= end_ns for at_ns in instants)
        return float(tokens / (end_ns / 2e9) / wanted)

    @contextmanager
    def _server(self, setting: Setting) -> Iterator[Served]:
        """Start a server that has served for a moment."""
        self.starts += 1
        began = time.monotonic()
        folder = self.folder / f"server-{self.starts}"
        slo = ("--ttft-ms", str(self.slo.ttft_ms), "--tpot-ms", str(self.slo.tpot_ms))
        try:
            with serving(folder, [*self.shared, *setting.flags, *slo], self.program) as served:
                warm = make(
                    self.recipe,
                    rate=ASKS_A_SECOND,
                    seconds=WARM_S,
                    seed=self.seed,
                    concurrency=min(setting.max_num_seqs, 8),
                )
                sent(served.url, warm, self._send("warm", WARM_S))
                served.wait_idle()
                self.start_s = max(1.0, time.monotonic() - began - 2 * WARM_S)
                yield served
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _load(self, number: int, rate: float) -> Workload:
        seed = self.seed * 1000 + number
        return make(self.recipe, rate=rate, seconds=self.seconds, seed=seed)

    def _send(self, name: str, cut_off_s: float) -> Send:
        return Send(name=name, cut_off_s=cut_off_s, slo=self.slo, scratch=self.folder)

    def _say(self, what: str, setting: Setting, trial: Trial) -> None:
        left_s = max(0.0, self.deadline - time.monotonic())
        ttft, tpot = (trial.figures.get(name) or 0.0 for name in ("ttft_p99_ms", "tpot_p99_ms"))
        self.says(
            f"{self.rate:.2f} requests/s, {what}: {setting}: {100 * trial.share:.0f} % in time, "
            f"first token p99 {ttft:.0f} ms, per token p99 {tpot:.0f} ms; {left_s:.0f} s left"
        )


def ground_of(tuning: Tuning) -> dict[str, Any]:
    """Return what a search stands on."""
    return {
        "rate_requests_s": tuning.rate,
        "seconds_a_run": tuning.fixed.seconds if tuning.fixed else tuning.seconds,
        "servers_started": tuning.starts,
        "notes": tuning.notes,
    }
