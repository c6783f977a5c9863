"""What holds a setting back: which part of the objective is missed, and by which cause.

Owns the counting of late requests by what was late, and the words for the causes that the engine's
own record gives; tune_command.py prints them. A cause is an amount of a mean request's life, not a
guess. Reads no record itself.
"""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from bench.lab.figures import met
from bench.lab.tune import Trial
from bench.lab.workload import Slo

FIRST = MappingProxyType(
    {
        "queue_seqs": "a place in the batch: max_num_seqs is what holds them",
        "queue_budget": "the token budget of a step, which is full",
        "queue_prefill_cap": "the cap on prompts that are computed in part at a time",
        "queue_kv": "KV blocks: the pool is full, and no setting searched here makes it larger",
        "queue_batch_closed": "a batch that takes nobody",
        "queue_policy": "the policy's quota",
        "queue_slo": "the policy, which puts them off for others",
        "passed_over": "a part of a step's token budget",
        "preempted_kv": "KV blocks that they had to give back",
        "neighbour_prefill": "the prompts of others in the same steps",
        "neighbour_decode": "the rows of others in the same steps",
        "own_prefill": "their own prompts: the machine computes no faster",
    }
)
"""What a first token waits for, by cause."""

LATER = MappingProxyType(
    {
        "neighbour_prefill": "the prompts of others, which lengthen steps",
        "neighbour_decode": "the rows of others, which lengthen steps",
        "own_decode": "their own rows: a step alone takes as long",
        "preempted_kv": "KV blocks that they had to give back",
        "recompute": "what they compute again after they lost their blocks",
        "passed_over": "a part of a step's token budget",
        "scheduler": "the host's part of a step",
    }
)
"""What a later token waits for, by cause."""


def late_of(load: dict[str, Any], slo: Slo) -> tuple[int, int, int]:
    """Return how many asks were late by their first token, by a later one, and were judged."""
    first = later = judged = 0
    for ask in load["asks"]:
        in_time = met(ask, ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms)
        judged += in_time is not None
        if in_time is False:
            ttft, _ = ask["slo"] or (slo.ttft_ms, slo.tpot_ms)
            tokens = ask["tokens_ns"]
            on_time = tokens and (tokens[0] - ask["scheduled_ns"]) / 1e6 <= ttft
            first, later = (first, later + 1) if on_time else (first + 1, later)
    return first, later, judged


def binding(trials: Iterable[Trial]) -> dict[str, Any]:
    """Return what binds over some runs: the part of the objective, the cause, and its ms."""
    runs = list(trials)
    first, later = sum(one.late_ttft for one in runs), sum(one.late_tpot for one in runs)
    judged = sum(one.judged for one in runs)
    part = "ttft" if first >= later else "tpot"
    known = FIRST if part == "ttft" else LATER
    totals = {cause: _mean([one.causes.get(cause, 0.0) for one in runs]) for cause in known}
    cause = max(totals, key=lambda name: totals[name]) if any(totals.values()) else None
    return {
        "late": first + later,
        "late_ttft": first,
        "late_tpot": later,
        "judged": judged,
        "slo": part if first + later else None,
        "cause": cause if first + later else None,
        "cause_ms": totals[cause] if cause and first + later else None,
        "causes_ms": {name: ms for name, ms in sorted(totals.items(), key=lambda x: -x[1]) if ms},
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def in_words(found: dict[str, Any]) -> str:
    """Return what binds as a sentence."""
    late, judged = found["late"], found["judged"]
    if not judged:
        return "nothing was judged"
    if not late:
        return f"all {judged} requests were in time: nothing binds at this rate"
    part = "first token" if found["slo"] == "ttft" else "tokens after the first"
    most = max(found["late_ttft"], found["late_tpot"])
    whole = f"{late} of {judged} requests were late, {most} of them by their {part}"
    if found["cause"] is None:
        return whole
    table = FIRST if found["slo"] == "ttft" else LATER
    return f"{whole}; a mean request spent {found['cause_ms']:.0f} ms on {table[found['cause']]}"
