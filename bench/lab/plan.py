"""What an experiment will do: arms of one engine, rates, repeats, their order, and the presets.

Owns Plan, which is written before the first run and must be the same when an experiment goes on,
the presets quick and full, and the order of runs. experiment.py carries it out. Must never depend
on what was measured but the capacity, from which rates are taken.
"""

import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from bench.lab.make import Recipe
from bench.lab.workload import Slo

MODES = ("continuous", "static", "dynamic")
KV_BLOCK_TOKENS = 16
ARM_NAME_MAX = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A named setting of the engine; all else is the same for every arm."""

    name: str
    flags: tuple[str, ...]

    @property
    def safe_name(self) -> str:
        """Return its name as part of a file's."""
        return "".join(letter if letter.isalnum() else "_" for letter in self.name)


FACTORS: dict[str, tuple[Arm, ...]] = {
    "modes": tuple(Arm(name=mode, flags=("--batching", mode)) for mode in MODES),
    "chunking": (
        Arm(name="chunked", flags=()),
        Arm(name="chunks of 64", flags=("--long-prefill-tokens", "64")),
        Arm(name="whole prompts", flags=("--no-enable-chunked-prefill",)),
    ),
    "policies": tuple(
        Arm(name=policy, flags=("--scheduling-policy", policy))
        for policy in ("decode_first", "fcfs", "fair", "slo")
    ),
    "budgets": tuple(
        Arm(name=f"budget {tokens}", flags=("--max-num-batched-tokens", str(tokens)))
        for tokens in (256, 64, 1024)
    ),
    "launches": (
        Arm(name="one call", flags=("--attention-backend", "sdpa", "--dtype", "f32")),
        Arm(
            name="a call a request",
            flags=("--attention-backend", "per_request", "--dtype", "f32"),
        ),
    ),
}
"""Arms by factor; the first of each is the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An experiment. `fractions` are rates as parts of the baseline's capacity.

    `fresh_servers` starts every arm's server anew in each repeat, so that what one process happens
    to be like is drawn again.
    """

    name: str
    model: str
    recipe: Recipe
    arms: tuple[Arm, ...]
    fractions: tuple[float, ...]
    repeats: int
    seconds: float
    cut_off_s: float
    slo: Slo
    seed: int
    max_num_seqs: int
    flags: tuple[str, ...] = ()
    attainment_min: float = 0.9
    capacity_s: float = 8.0
    warm_up_s: float = 2.0
    ceiling_multiples: tuple[int, ...] = (5, 10, 20)
    fresh_servers: bool = True

    @property
    def runs(self) -> int:
        """Return how many runs there are."""
        return self.repeats * len(self.fractions) * len(self.arms)

    @property
    def baseline(self) -> Arm:
        """Return the arm that others are compared with."""
        return self.arms[0]

    @property
    def compares_modes(self) -> bool:
        """Return whether continuous batching is held against fixed batches and nothing else."""
        continuous, *fixed = (arm.flags for arm in FACTORS["modes"])
        others = all(arm.flags in fixed for arm in self.arms[1:])
        return others and self.baseline.flags in ((), continuous)

    def server_flags(self, arm: Arm) -> list[str]:
        """Return what an arm's server is started with; the KV pool holds a full fixed batch."""
        blocks = self.max_num_seqs * (self.recipe.context_tokens // KV_BLOCK_TOKENS + 2)
        shared = (
            *("--model", self.model, "--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", "256", "--kv-blocks", str(blocks)),
            *("--max-queue-requests", "100000", "--max-queue-tokens", str(2**30)),
            # Equal cache state: nothing is reused, unless a workload shares its beginnings.
            "--enable-prefix-caching" if self.shares_prefixes else "--no-enable-prefix-caching",
            *("--ttft-ms", str(self.slo.ttft_ms), "--tpot-ms", str(self.slo.tpot_ms)),
        )
        return [*shared, *self.flags, *arm.flags]

    @property
    def shares_prefixes(self) -> bool:
        """Return whether the workload has beginnings that requests share."""
        return self.recipe.source == "mooncake" or self.recipe.source.startswith("recorded:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the plan."""

    repeat: int
    fraction: float
    arm: Arm

    @property
    def name(self) -> str:
        """Return the name of its file, and what its request ids begin with."""
        return f"{self.repeat}-{self.fraction:.3f}-{self.arm.safe_name}"


def blocks(plan: Plan, repeat: int) -> Iterator[list[Cell]]:
    """Yield the runs of a repeat in their order, those of one rate together.

    Rates come in random order, so that a machine's drift is no trend over rates; the arms of one
    rate stand next to each other, in random order, so that they see the same minute.
    """
    pick = random.Random(f"order-{plan.seed}-{repeat}")
    for fraction in pick.sample(plan.fractions, len(plan.fractions)):
        arms = pick.sample(plan.arms, len(plan.arms))
        yield [Cell(repeat=repeat, fraction=fraction, arm=arm) for arm in arms]


def quick(model: str, ids_below: int) -> Plan:
    """Return the small experiment: three minutes on two cores."""
    return Plan(
        name="quick",
        model=model,
        recipe=Recipe(source="azure-conv", context_tokens=256, ids_below=ids_below),
        arms=FACTORS["modes"],
        fractions=(0.5, 1.25),
        repeats=3,
        seconds=4.5,
        cut_off_s=1.5,
        slo=Slo(500.0, 50.0),
        seed=1,
        max_num_seqs=16,
        capacity_s=4.0,
        warm_up_s=1.0,
        ceiling_multiples=(5, 10),
        fresh_servers=False,
    )


def full(model: str, ids_below: int) -> Plan:
    """Return the whole experiment: six rates from idle to overload, three modes, three repeats."""
    return replace(
        quick(model, ids_below),
        name="full",
        recipe=Recipe(source="azure-conv", context_tokens=512, ids_below=ids_below),
        fractions=(0.1, 0.35, 0.55, 0.75, 0.95, 1.25),
        seconds=15.0,
        cut_off_s=4.0,
        slo=Slo(1000.0, 60.0),
        capacity_s=12.0,
        warm_up_s=2.0,
        ceiling_multiples=(5, 10, 20),
        fresh_servers=True,
    )


def custom_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    """Return arms as told on the command line, NAME=FLAGS; raises ValueError."""
    found = []
    for text in texts:
        name, sign, flags = text.partition("=")
        if not name or not sign:
            raise ValueError(f"--arm {text!r} is not like NAME=--flag value")
        if len(name) > ARM_NAME_MAX or not name.isprintable():
            raise ValueError(f"--arm {name[:ARM_NAME_MAX]!r}: at most {ARM_NAME_MAX} letters")
        found.append(Arm(name=name, flags=tuple(shlex.split(flags))))
    # Runs are told apart by the names of their files, in which "a b" and "a-b" are one.
    if len({arm.safe_name for arm in found}) != len(found):
        raise ValueError("--arm: two have the same name, or names alike but for their signs")
    return tuple(found)


def plan_of(content: object) -> Plan:
    """Return the plan that an experiment's folder has as JSON; raises msgspec.ValidationError."""
    return msgspec.convert(content, Plan)
