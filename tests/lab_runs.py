"""Simulated runs of the lab: summaries with figures that are known, and noise that is seeded.

Owns the making of them for tests of statistics, curves and verdicts, so that what a machine needs
an hour for is proved in a second. The shapes are those of real runs (bench/lab/measure.py).
"""

import random
from collections.abc import Callable
from typing import Any

from bench.lab.make import Recipe
from bench.lab.plan import FACTORS, Plan
from bench.lab.workload import Slo

Truth = Callable[[str, float], dict[str, float]]
"""An arm's and a rate's true figures."""


def plan(**changed: Any) -> Plan:
    settings: dict[str, Any] = {
        "name": "simulated",
        "model": "none",
        "recipe": Recipe(),
        "arms": FACTORS["modes"][:2],
        "fractions": (0.5, 1.0),
        "repeats": 5,
        "seconds": 10.0,
        "cut_off_s": 2.0,
        "slo": Slo(1000.0, 100.0),
        "seed": 1,
        "max_num_seqs": 16,
    }
    return Plan(**(settings | changed))


def runs(of: Plan, truth: Truth, seed: int, *, noise: float = 0.02, weather: float = 0.2) -> Any:
    """Return every run of a plan. `noise` is each run's own; `weather` is shared by a pair."""
    draw = random.Random(seed)
    found = []
    for repeat in range(of.repeats):
        for fraction in of.fractions:
            shared = draw.gauss(0, weather)
            for arm in of.arms:
                figures = {}
                for name, value in truth(arm.name, fraction).items():
                    factor = 1 + shared + draw.gauss(0, noise)
                    figures[name] = value if name.endswith("share") else value * factor
                found.append(run(arm.name, repeat, fraction, figures))
    return found


def run(arm: str, repeat: int, fraction: float, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "arm": arm,
        "repeat": repeat,
        "fraction": fraction,
        "requests_s": 10 * fraction,
        "figures": figures,
    }
