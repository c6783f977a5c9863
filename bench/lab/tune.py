"""The search for the settings that an objective allows: halving by measured runs, then a proof.

Owns which settings are tried, who stays in the race, and what is said in the end; tune_command.py
hands it a function that measures one setting under one round's load. All settings of a round get
the same requests, so they are compared in pairs. The winner of a race is lucky too: what is said of
it rests on the rounds after the race alone. Knows no server and no clock.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from bench.lab.statistics import Compared, Mean, compare, mean_of
from bench.lab.workload import Slo

CHUNK_LEAST, SEQS_MOST, TOKENS_MOST = 16, 1024, 16384
NUMBERS = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_tokens")
ALIKE = 0.02
"""Shares of requests in time that are closer than this say nothing; then latencies decide."""
RACING_LEAST = 2
PROOFS_LEAST, PROOFS_MOST = 3, 12


@dataclass(frozen=True, slots=True)
class Setting:
    """Rows of a batch, tokens of a step, and most prompt tokens of one request a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_tokens: int | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Return what a server is started with."""
        cap = self.long_prefill_tokens
        return (
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *(() if cap is None else ("--long-prefill-tokens", str(cap))),
        )

    def __str__(self) -> str:
        cap = "" if self.long_prefill_tokens is None else f", chunks {self.long_prefill_tokens}"
        return f"seqs {self.max_num_seqs}, tokens {self.max_num_batched_tokens}{cap}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a setting: its clients' figures, who was late, the causes of a mean request."""

    figures: dict[str, float | None]
    late_ttft: int
    late_tpot: int
    judged: int
    causes: dict[str, float]

    @property
    def share(self) -> float:
        """Return the share of requests in time."""
        return self.figures.get("goodput_share") or 0.0

    def pressure(self, slo: Slo) -> float:
        """Return how much of the objective the slowest hundredth takes: 1 is just in time."""
        ttft, tpot = self.figures.get("ttft_p99_ms"), self.figures.get("tpot_p99_ms")
        return max((ttft or 0.0) / slo.ttft_ms, (tpot or 0.0) / slo.tpot_ms)


Measure = Callable[[Setting, int], Trial | None]
"""Runs a setting under a round's load; None if no server could run so."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has: every trial by setting and round, and from which round on it is proof."""

    base: Setting
    slo: Slo
    trials: dict[Setting, dict[int, Trial]] = field(default_factory=dict)
    proof_from: int | None = None
    best: Setting | None = None
    out_of_time: bool = False
    stopped: bool = False

    def runs(self) -> int:
        """Return how many runs there are."""
        return sum(len(rounds) for rounds in self.trials.values())


def neighbours(base: Setting, most: int = 8) -> list[Setting]:
    """Return settings that differ from `base` in one number, the most telling first."""
    seqs, tokens = base.max_num_seqs, base.max_num_batched_tokens
    cap = base.long_prefill_tokens or tokens
    wanted = [
        replace(base, max_num_seqs=seqs // 2),
        replace(base, max_num_batched_tokens=tokens // 2),
        replace(base, long_prefill_tokens=cap // 4),
        replace(base, max_num_seqs=seqs // 4),
        replace(base, max_num_batched_tokens=tokens // 4),
        replace(base, long_prefill_tokens=cap // 8),
        replace(base, max_num_seqs=seqs * 2),
        replace(base, max_num_batched_tokens=tokens * 2),
        replace(base, long_prefill_tokens=None),
    ]
    possible = [one for one in wanted if one != base and is_possible(one)]
    return list(dict.fromkeys(possible))[:most]


def is_possible(setting: Setting) -> bool:
    """Return whether a server takes it, and whether it can be meant."""
    cap = setting.long_prefill_tokens
    return (
        1 <= setting.max_num_seqs <= SEQS_MOST
        and setting.max_num_seqs <= setting.max_num_batched_tokens <= TOKENS_MOST
        and (cap is None or CHUNK_LEAST <= cap < setting.max_num_batched_tokens)
    )


def search(
    found: Found, measure: Measure, has_time: Callable[[int], bool], *, most: int, seed: int
) -> Found:
    """Return what the runs say; `has_time` is asked before each round, for so many runs.

    Ctrl-C ends it with what has run by then.
    """
    racing = neighbours(found.base, most)
    while len(racing) > RACING_LEAST and not has_time(len(racing) + 1):
        racing = racing[:-1]  # the least telling stay out where time is short
    number = 0
    try:
        while len(racing) > 1 and has_time(len(racing) + 1):
            racing = _round(found, measure, racing, number, seed)
            racing = best_of(found, racing, max(1, len(racing) // 2))
            if number == 0:
                both = combined(found)
                racing += [both] if both is not None and both not in racing else []
            number += 1
    except KeyboardInterrupt:
        ran = best_of(found, [one for one in found.trials if one != found.base], 1)
        return replace(found, best=ran[0] if ran else None, out_of_time=True, stopped=True)
    if number:
        racing = best_of(found, racing, 1)
    if len(racing) != 1:
        return replace(found, out_of_time=True)
    (winner,) = racing
    first, stopped = number, False
    try:
        while number - first < PROOFS_MOST and has_time(2):
            if not _round(found, measure, [winner], number, seed):
                break
            number += 1
    except KeyboardInterrupt:
        stopped = True
    few = number - first < PROOFS_LEAST
    return replace(found, proof_from=first, best=winner, out_of_time=few, stopped=stopped)


def _round(
    found: Found, measure: Measure, racing: Sequence[Setting], number: int, seed: int
) -> list[Setting]:
    """Run the base and all that race, in random order; return who could run."""
    order = [found.base, *racing]
    random.Random(f"tune-{seed}-{number}").shuffle(order)
    for setting in order:
        trial = measure(setting, number)
        if trial is not None:
            found.trials.setdefault(setting, {})[number] = trial
    return [one for one in racing if number in found.trials.get(one, {})]


def rank(found: Found, setting: Setting) -> tuple[int, float]:
    """Return what orders settings, the best highest: share in time, then room in the objective."""
    trials = list(found.trials[setting].values())
    share = fmean(trial.share for trial in trials)
    return round(share / ALIKE), -fmean(trial.pressure(found.slo) for trial in trials)


def best_of(found: Found, racing: Sequence[Setting], count: int) -> list[Setting]:
    """Return the best so many of those that have run."""
    ran = [one for one in racing if found.trials.get(one)]
    return sorted(ran, key=lambda one: rank(found, one), reverse=True)[:count]


def combined(found: Found) -> Setting | None:
    """Return the best value of each number in one setting, where more than one helped alone."""
    if not found.trials.get(found.base):
        return None
    base, own = found.base, rank(found, found.base)
    best: dict[str, tuple[tuple[int, float], Any]] = {}
    for setting in found.trials:
        changed = [one for one in NUMBERS if getattr(setting, one) != getattr(base, one)]
        if len(changed) == 1 and found.trials[setting]:
            reached = rank(found, setting)
            if reached > own and reached > best.get(changed[0], (own, None))[0]:
                best[changed[0]] = (reached, getattr(setting, changed[0]))
    if len(best) < 2:
        return None
    both = replace(base, **{name: value for name, (_, value) in best.items()})
    return both if is_possible(both) and both not in found.trials else None


def proof(found: Found) -> Compared:
    """Return the winner against the base by requests in time a second, over the rounds of proof."""
    rounds = sorted(_proofs(found))
    ours = [_good(found, found.best or found.base, number) for number in rounds]
    theirs = [_good(found, found.base, number) for number in rounds]
    return compare(ours, theirs)


def _proofs(found: Found) -> Iterator[int]:
    if found.best is not None and found.proof_from is not None:
        for number in found.trials[found.best]:
            if number >= found.proof_from and number in found.trials[found.base]:
                yield number


def _good(found: Found, setting: Setting, number: int) -> float | None:
    return found.trials[setting][number].figures.get("goodput_requests_s")


def is_better(found: Found) -> bool:
    """Return whether the winner beats the base beyond chance."""
    against = proof(found)
    if against.value is None or not against.significant:
        return False
    return against.value > (1.0 if against.kind == "ratio" else 0.0)


def counting(found: Found, setting: Setting) -> list[Trial]:
    """Return a setting's trials: those of the proof alone, where it is one."""
    rounds = found.trials.get(setting, {})
    proofs = set(_proofs(found))
    if len(proofs) >= PROOFS_LEAST and proofs <= set(rounds):
        return [rounds[number] for number in sorted(proofs)]
    return list(rounds.values())


def mean_figure(found: Found, setting: Setting, figure: str) -> Mean | None:
    """Return a figure's mean over the rounds of a setting that count."""
    trials = counting(found, setting)
    values = [value for one in trials if (value := one.figures.get(figure)) is not None]
    return mean_of(values) if values else None
