"""The work that servers are compared by: requests, when they arrive, what is read off the stamps.

Owns lengths, arrivals and rates; every peer gets the same. Ids are random and salted anew for each
run, so that no prefix cache can help. Standard library alone, since each peer runs it in an
environment of its own.
"""

import math
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path

DEMO_MODEL = Path.home() / ".cache/iterscope/models/SmolLM2-135M-Instruct.Q4_1.gguf"
FIRST_ID, LAST_ID = 300, 49_000
MIX_REQUESTS, MIX_SEED = 64, 1234
MIX_PROMPT, MIX_ANSWER = (16, 512), (8, 256)
SINGLE_PROMPT, SINGLE_ANSWER = 32, 129
BATCH_PROMPT, BATCH_ANSWER = 192, 64
PREFILL = 512


@dataclass(frozen=True)
class Job:
    """A request: its prompt's ids, the tokens it wants, and when it comes, s from the start."""

    ids: list[int]
    answer: int
    at_s: float = 0.0


@dataclass
class Life:
    """What a client saw of a job: when it came and each token's instant, s."""

    arrived_s: float
    wanted: int
    tokens_s: list[float] = field(default_factory=list)


def job(prompt: int, answer: int, salt: str, at_s: float = 0.0) -> Job:
    """Return a request of so many random tokens."""
    pick = random.Random(salt)
    return Job([pick.randrange(FIRST_ID, LAST_ID) for _ in range(prompt)], answer, at_s)


def mix_lengths() -> list[tuple[int, int]]:
    """Return prompt and answer lengths of the mix, log-uniform."""
    pick = random.Random(MIX_SEED)

    def length(low: int, high: int) -> int:
        return round(math.exp(pick.uniform(math.log(low), math.log(high))))

    return [(length(*MIX_PROMPT), length(*MIX_ANSWER)) for _ in range(MIX_REQUESTS)]


def jobs_of(phase: str, salt: str) -> list[Job]:
    """Return the jobs of single, prefill, batch:B, mix, or poisson:RATE:SECONDS."""
    name, *sizes = phase.split(":")
    if name == "single":
        return [job(SINGLE_PROMPT, SINGLE_ANSWER, salt)]
    if name == "prefill":
        return [job(PREFILL, 1, salt)]
    if name == "batch":
        rows = range(int(sizes[0]))
        return [job(BATCH_PROMPT, BATCH_ANSWER, f"{salt}-{row}") for row in rows]
    if name == "mix":
        lengths = mix_lengths()
        return [job(*pair, f"{salt}-{number}") for number, pair in enumerate(lengths)]
    if name == "poisson":
        lengths, arrivals = mix_lengths(), poisson(float(sizes[0]), float(sizes[1]))
        return [
            job(*lengths[number % MIX_REQUESTS], f"{salt}-{number}", at_s)
            for number, at_s in enumerate(arrivals)
        ]
    raise ValueError(f"no such phase: {phase}")


def poisson(rate: float, seconds: float, seed: int = 7) -> list[float]:
    """Return instants of arrivals at so many a second."""
    pick, at, arrivals = random.Random(seed), 0.0, []
    while (at := at + pick.expovariate(rate)) <= seconds:
        arrivals.append(at)
    return arrivals


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of them lies, NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures(phase: str, lives: list[Life]) -> dict[str, float]:
    """Return what a phase is judged by; raises ValueError if any request fell short."""
    short = [life for life in lives if len(life.tokens_s) != life.wanted]
    if short:
        raise ValueError(f"{len(short)} of {len(lives)} requests got other tokens than they wanted")
    if phase == "prefill":
        return {"tok_s": PREFILL / (lives[0].tokens_s[0] - lives[0].arrived_s)}
    if phase == "single" or phase.startswith("batch"):
        return {"tok_s": together(lives)}
    first = [1e3 * (life.tokens_s[0] - life.arrived_s) for life in lives]
    gaps = [
        1e3 * (after - before)
        for life in lives
        for before, after in zip(life.tokens_s, life.tokens_s[1:], strict=False)
    ]
    end = max(life.tokens_s[-1] for life in lives)
    spent = end - min(life.arrived_s for life in lives)
    found = {
        "tok_s": sum(len(life.tokens_s) for life in lives) / spent,
        "requests_s": len(lives) / spent,
    }
    for name, values in (("ttft", first), ("itl", gaps)):
        for share in (50, 95, 99):
            found[f"{name}_p{share}_ms"] = percentile(values, share / 100)
    return found


def together(lives: list[Life]) -> float:
    """Return tokens a second of all while every one of them decodes."""
    begin = max(life.tokens_s[0] for life in lives)
    end = min(life.tokens_s[-1] for life in lives)
    inside = sum(1 for life in lives for at in life.tokens_s if begin < at <= end)
    return inside / (end - begin) if end > begin else math.nan


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return each figure's median over runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}
