"""The conservation laws in SQL on random engines: any mode, policy, depth and pool, none is broken.

Owns the proof that laws have no false alarms: cancels, failing steps, preemptions and prefix hits
included. That each law can be broken is proved in test_lints.py.
"""

import random
from pathlib import Path

import duckdb
import pytest

from bench.laws import laws
from engine.plan import Plan
from telemetry.records import Iteration, Record
from tests.sick_runs import of, recorded, write_runs
from tests.simulation import Simulation
from tests.traffic import arrive, random_settings


def random_run(seed: int) -> list[Record]:
    """A random engine under random traffic, each request to its end."""
    pick = random.Random(seed)
    simulated = Simulation(**random_settings(pick))  # type: ignore[arg-type]
    failing = pick.randrange(5, 60) if pick.random() < 0.3 else -9

    error = pick.choice((RuntimeError("a step that fails"), MemoryError()))
    times = pick.randrange(1, 4)

    def fails(plan: Plan) -> Exception | None:
        return error if failing <= plan.step < failing + times else None

    simulated.runner.fails = fails
    for _ in range(pick.randrange(5, 40)):
        arrive(simulated, pick)
        for _ in range(pick.randrange(4)):
            if simulated.core.has_work and not simulated.core.opens_in_ns():
                simulated.step()
        if pick.random() < 0.15:
            simulated.cancel(pick.choice(list(simulated.names.values())))
    simulated.drain(20_000)
    return recorded(simulated)


def check(folder: Path, seeds: range) -> None:
    runs = {f"seed-{seed}": random_run(seed) for seed in seeds}
    steps = [step for records in runs.values() for step in of(Iteration, records)]
    assert any(step.preempted for step in steps)
    assert any(sum(step.admitted_cached_tokens) for step in steps)
    with duckdb.connect(write_runs(folder / "runs.duckdb", runs), read_only=True) as connection:
        for title, law in laws().items():
            breaches = connection.execute(law.sql, law.parameters).fetchall()
            assert breaches == [], title


def test_no_law_is_broken_on_random_engines(tmp_path: Path) -> None:
    check(tmp_path, range(12))


@pytest.mark.soak
def test_no_law_is_broken_on_many_random_engines(tmp_path: Path) -> None:
    check(tmp_path, range(12, 260))
