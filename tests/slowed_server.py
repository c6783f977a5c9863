"""A real `iterscope serve` whose every step takes a planted share longer, to be found out.

Owns the planting, around the real runner (the Runner seam), and the program,
`python -m tests.slowed_server --slower 0.1 serve ...`; tests/test_lab_soak.py starts it. The step
waits out its share after its result is there, so the device's own work is untouched. With
`--beat-ms` a step lasts a beat, and the share is one of the beat: a machine that changes its speed
from second to second by more than the share does not hide it.
"""

import argparse
import functools
import importlib
import sys
import time
import types
from dataclasses import dataclass
from typing import Any

import server.engine_process
from engine.plan import Plan, StepOutput
from engine.process import EngineStart, engine_process
from server.cli import main


@dataclass(frozen=True)
class Planted:
    """The share of a step's time that is added, and how long a step lasts: 0 for its own time."""

    slower: float
    beat_ms: float


class SlowedStep:
    """A pending step that is done a share of its time later."""

    def __init__(self, pending: Any, began: float, planted: Planted) -> None:
        self._pending = pending
        self._began = began
        self._planted = planted

    def wait(self) -> StepOutput:
        output: StepOutput = self._pending.wait()
        now, share = time.perf_counter(), self._planted.slower
        until = now + share * (now - self._began)
        if self._planted.beat_ms:
            until = self._began + self._planted.beat_ms / 1e3 * (1 + share)
        while time.perf_counter() < until:
            time.sleep(0)
        return output


class SlowedRunner:
    """The real runner, its steps slowed."""

    def __init__(self, runner: Any, planted: Planted) -> None:
        self._runner = runner
        self._planted = planted

    def run(self, plan: Plan) -> SlowedStep:
        began = time.perf_counter()
        return SlowedStep(self._runner.run(plan), began, self._planted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def slowed_process(planted: Planted, start: EngineStart) -> None:
    """Be the engine process, with the real engine built and its runner wrapped."""
    real = importlib.import_module("engine.build")
    stand_in = types.ModuleType("engine.build")

    def build(*given: Any, **settings: Any) -> Any:
        core, run = real.build(*given, **settings)
        core._runner = SlowedRunner(core._runner, planted)
        return core, run

    stand_in.build = build  # type: ignore[attr-defined]
    sys.modules["engine.build"] = stand_in
    engine_process(start)


def run() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slower", type=float, default=0.1)
    parser.add_argument("--beat-ms", type=float, default=0.0)
    flags, rest = parser.parse_known_args()
    server.engine_process.engine_process = functools.partial(  # type: ignore[assignment]
        slowed_process, Planted(flags.slower, flags.beat_ms)
    )
    return main(rest)


if __name__ == "__main__":
    sys.exit(run())
