"""A small experiment for tests, as a program: `python -m tests.lab_bench OUT MODEL`.

Owns an experiment of one arm whose server parrots on a beat, and one of two arms whose servers
compute the tiny model. tests/test_lab.py starts the first as a process, to be killed and stopped.
"""

import sys
from dataclasses import replace
from pathlib import Path

from bench.lab.experiment import Bench
from bench.lab.lab_command import carry_out
from bench.lab.make import Recipe
from bench.lab.plan import FACTORS, Plan
from bench.lab.workload import Slo

BEAT_MS = 5
PARROT = ("-m", "tests.paced_server", "--step-ms", str(BEAT_MS))


def plan(model: Path) -> Plan:
    return Plan(
        name="small",
        model=str(model),
        recipe=Recipe(source="azure-conv", context_tokens=96, ids_below=200),
        arms=FACTORS["modes"][:2],
        fractions=(0.3, 1.2),
        repeats=1,
        seconds=0.6,
        cut_off_s=0.4,
        slo=Slo(500.0, 50.0),
        seed=1,
        max_num_seqs=4,
        capacity_s=0.5,
        warm_up_s=0.2,
        ceiling_multiples=(),
    )


def bench(out: Path, model: Path) -> Bench:
    """Return an experiment of one arm on a parrot: no model is loaded, so it starts quickly."""
    of = replace(plan(model), arms=FACTORS["modes"][:1], repeats=2, fresh_servers=False)
    return Bench(out=out, plan=of, programs={arm.name: PARROT for arm in of.arms})


def real_bench(out: Path, model: Path) -> Bench:
    """Return an experiment at one rate on the tiny model, in f32 so that answers must be equal."""
    of = replace(
        plan(model),
        fractions=(1.0,),
        seconds=1.0,
        flags=("--dtype", "f32", "--engine-threads", "1"),
    )
    return Bench(out=out, plan=of, programs={})


if __name__ == "__main__":
    sys.exit(carry_out(bench(Path(sys.argv[1]), Path(sys.argv[2]))))
