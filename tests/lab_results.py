"""A made-up result of the lab, for tests of its report: no figure in it was ever measured.

Owns a plausible whole one (three modes, rates up to overload, repeats), from a seed alone, in the
form that `iterscope lab` writes; tests change what they need. Real results look as it does, never
the other way round.
"""

import random
from statistics import fmean, stdev
from typing import Any

from bench.lab.figures import FIGURES
from bench.lab.statistics import compare
from tests.lab_steps import CAPACITY, KEPT, rounds, step_time, timeline

ARMS = ("continuous", "static", "dynamic")
FRACTIONS = (0.2, 0.5, 0.8, 0.95, 1.1, 1.4)
REPEATS = 3


def result(
    arms: tuple[str, ...] = ARMS, seed: int = 1, fractions: tuple[float, ...] = FRACTIONS
) -> dict[str, Any]:
    """Return the made-up result."""
    pick = random.Random(seed)
    values = {
        (arm, fraction): [_figures(arm, fraction, pick) for _ in range(REPEATS)]
        for arm in arms
        for fraction in fractions
    }
    compared = [
        _comparison(figure, arm, arms[0], fraction, values)
        for figure in FIGURES
        for fraction in fractions
        for arm in arms[1:]
    ]
    return {
        "form": "iterscope-lab-1",
        "name": "made up",
        "complete": True,
        "runs_planned": 54,
        "runs_done": 54,
        **_ground(arms),
        "rates": [{"fraction": f, "requests_s": f * CAPACITY} for f in fractions],
        "runs": [_run(arm, f, r, pick) for f in fractions for r in range(REPEATS) for arm in arms],
        "figures": {
            name: {"title": one.title, "unit": one.unit, "better": one.better}
            for name, one in FIGURES.items()
        },
        "curves": [_curve(arm, f, values[arm, f]) for arm in arms for f in fractions],
        "comparisons": compared,
        "operating_points": [_point(arm, values, fractions) for arm in arms],
        "at_slo": [_at_slo(arm, arms[0]) for arm in arms[1:]],
        "hypotheses": _hypotheses(arms),
        "equality": {
            "checked": 240,
            "same": 239,
            "allowed": True,
            "how": "Greedy answers to the same 80 prompts, each mode against each prompt alone.",
            "differing": [
                {"arm": arms[-1], "request": 17, "at_token": 23, "gap": 0.012, "tolerance": 0.05}
                | {"allowed": True}
            ],
        },
        "timelines": [timeline(arm, f, pick) for arm in arms for f in fractions if f != 0.8],
        "rounds": [rounds(arm) for arm in arms],
        "step_time": [step_time(arms[0], pick)],
        "waits": [_waits(arm, f) for f in fractions for arm in arms],
        "static_lost": [_lost(arm, f) for f in fractions for arm in arms[1:]],
        "generator": {
            "top_rate_requests_s": 6.4,
            "late_ms_max": 3.1,
            "cpu_share_max": 0.06,
            "bottleneck_runs": 0,
            "ceiling": {"requests_s": 310.0, "tok_s": 21000.0, "seconds": 5.0},
        },
        "notes": [
            "At 1.4 of capacity static left 38 % unfinished: its latencies are lower bounds."
        ],
    }


def _figures(arm: str, fraction: float, pick: random.Random) -> dict[str, float]:
    load = fraction / KEPT[arm] if arm in KEPT else fraction
    queue = 40 + 60 * load / (1 - min(load, 0.93)) + max(0.0, load - 0.93) * 16_000
    offered = fraction * CAPACITY
    served = min(offered, CAPACITY * KEPT.get(arm, 1.0))
    good = max(0.02, min(1.0, 1.25 - max(0.0, load - 0.7) * 1.1))
    step = 12 + 22 * min(1.0, load)
    stutter = 3.4 if arm == "continuous" else 1.4
    values = {
        "output_tok_s": served * 62,
        "requests_s": served,
        "goodput_requests_s": served * good,
        "goodput_share": good * min(1.0, served / offered),
        "ttft_p50_ms": queue,
        "ttft_p99_ms": queue * 3.1,
        "tpot_p50_ms": step,
        "tpot_p99_ms": step * 1.7,
        "itl_p50_ms": step * 0.9,
        "itl_p99_ms": step * stutter,
        "e2e_p50_ms": queue + 62 * step,
        "e2e_p99_ms": queue * 3 + 140 * step,
        "unfinished_share": max(0.0, 1 - 1.15 * served / offered),
        "device_busy_share": min(0.99, 0.3 + load * 0.7),
        "useful_rows_share": 1.0 if arm == "continuous" else 0.62,
        "rows_mean": min(16.0, 1 + 14 * load),
        "step_ms_p50": step * 0.95,
    }
    noisy = {name: value * pick.gauss(1, 0.04) for name, value in values.items()}
    shares = [name for name, one in FIGURES.items() if one.share]
    return noisy | {name: min(1.0, noisy[name]) for name in shares}


def _curve(arm: str, fraction: float, repeats: list[dict[str, float]]) -> dict[str, Any]:
    found = {}
    for name in FIGURES:
        values = [one[name] for one in repeats]
        half = 4.303 * stdev(values) / len(values) ** 0.5
        middle = fmean(values)
        found[name] = {"mean": middle, "low": middle - half, "high": middle + half}
        found[name]["values"] = values
    return {"arm": arm, "fraction": fraction, "requests_s": fraction * CAPACITY, "figures": found}


def _comparison(
    figure: str, arm: str, baseline: str, fraction: float, values: Any
) -> dict[str, Any]:
    ours = [one[figure] for one in values[arm, fraction]]
    theirs = [one[figure] for one in values[baseline, fraction]]
    found = compare(ours, theirs, as_share=FIGURES[figure].share)
    return {
        "figure": figure,
        "fraction": fraction,
        "requests_s": fraction * CAPACITY,
        "arm": arm,
        "baseline": baseline,
        "pairs": found.pairs,
        "kind": found.kind,
        "arm_mean": fmean(ours),
        "baseline_mean": fmean(theirs),
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "p": found.p,
        "significant": found.significant,
        "holm": found.p is not None and found.p < 0.01,
        "verdict": "worse" if found.significant else "same",
    }


def _point(arm: str, values: Any, fractions: tuple[float, ...]) -> dict[str, Any]:
    best = max(fractions, key=lambda f: fmean(v["goodput_requests_s"] for v in values[arm, f]))
    good = fmean(one["goodput_requests_s"] for one in values[arm, best])
    return {
        "arm": arm,
        "fraction": best,
        "requests_s": best * CAPACITY,
        "goodput_requests_s": good,
        "goodput_share": 0.95,
        "at_slo_requests_s": 4.3 * KEPT.get(arm, 1.0),
        "interpolated": True,
        "at_slo_output_tok_s": 260 * KEPT.get(arm, 1.0),
    }


def _at_slo(arm: str, baseline: str) -> dict[str, Any]:
    kept = KEPT.get(arm, 1.0)
    return {
        "figure": "at_slo_requests_s",
        "fraction": None,
        "requests_s": None,
        "arm": arm,
        "baseline": baseline,
        "pairs": 3,
        "kind": "ratio",
        "arm_mean": 4.3 * kept,
        "baseline_mean": 4.3,
        "value": kept,
        "low": kept * 0.94,
        "high": kept * 1.07,
        "p": 0.002,
        "significant": True,
        "holm": True,
        "verdict": "worse",
    }


def _hypotheses(arms: tuple[str, ...]) -> list[dict[str, Any]]:
    evidence = {
        "title": "Rows computed for nobody",
        "arm": arms[-1],
        "fraction": 0.95,
        "repeat": 0,
        "sql": "SELECT sum(idle_rows) AS idle_rows, sum(len(requests)) AS rows\nFROM iteration "
        "WHERE run_id = $1 AND begin_at_ns < $3 AND end_at_ns > $2",
        "parameters": ["01JMADEUP", 1200000000, 31200000000],
        "command": 'iterscope sql --file runs/17/record.duckdb "SELECT ..."',
        "columns": ["idle_rows", "rows", "share"],
        "rows": [[8123, 13040, 0.384]],
    }
    common = {"comparisons": [0, 1, 2, 3], "evidence": [evidence]}
    return [
        {
            "name": "throughput",
            "question": "Does a batch that anyone may join serve more?",
            "claim": "Continuous batching serves more at the objective than a fixed batch.",
            "verdict": "holds",
            "because": "Static serves 0.46 times as much within the objective (0.43 to 0.49).",
        }
        | common,
        {
            "name": "itl",
            "question": "Are gaps between tokens shorter?",
            "claim": "Gaps between tokens are no longer than a fixed batch's.",
            "verdict": "fails",
            "because": "Prompts join running batches: the 99th percentile is 2.4 times as long.",
        }
        | common,
        {
            "name": "idle",
            "question": "Does it help a server that has nothing to do?",
            "claim": "At a fifth of the capacity it makes no difference.",
            "verdict": "mixed",
            "because": "Throughput is the same; first tokens come sooner.",
        }
        | common,
    ]


def _run(arm: str, fraction: float, repeat: int, pick: random.Random) -> dict[str, Any]:
    return {
        "arm": arm,
        "repeat": repeat,
        "fraction": fraction,
        "requests_s": fraction * CAPACITY,
        "order": pick.randrange(1000),
        "began_unix_s": 1_796_000_000.0 + pick.random() * 3000,
        "seconds": 31.0,
        "figures": {},
        "requests": {"sent": 97, "finished": 95, "cancelled": 2, "failed": 0, "refused": 0}
        | {"unfinished": 0},
        "generator": {"late_ms_p50": 0.2, "late_ms_max": 2.1, "cpu_share": 0.04}
        | {"loop_lag_ms_max": 1.0, "bottleneck": False},
        "clock": {"offset_ns": 5, "error_ns": 210_000},
        "engine": {"run_id": "01JMADEUP", "from_ns": 0, "until_ns": 31_000_000_000},
        "stolen_share": 0.012,
        "server_cpu_share": 1.4,
        "history": "history",
    }


def _waits(arm: str, fraction: float) -> dict[str, Any]:
    load = fraction / KEPT.get(arm, 1.0)
    queue = "queue_seqs" if arm == "continuous" else "queue_batch_closed"
    return {
        "arm": arm,
        "fraction": fraction,
        "requests": 291,
        "causes": {
            queue: 40 * load**3,
            "batch_held": 0.0 if arm == "continuous" else 480 * min(load, 1.2),
            "step_boundary": 9.0,
            "own_prefill": 60.0,
            "own_decode": 900.0,
            "neighbour_prefill": 120 * load,
            "neighbour_decode": 300 * min(1.0, load),
            "queue_kv": 30 * max(0.0, load - 1),
            "preempted_kv": 12 * max(0.0, load - 1),
            "scheduler": 14.0,
            "output": 5.0,
            "tokenize": 1.5,
        },
    }


def _lost(arm: str, fraction: float) -> dict[str, Any]:
    causes = _waits(arm, fraction)["causes"]
    return {
        "arm": arm,
        "fraction": fraction,
        "idle_rows_share": 0.38,
        "idle_row_ms": 5100.0 * fraction,
        "batch_held_ms": causes["batch_held"],
        "batch_closed_ms": causes.get("queue_batch_closed", 0.0),
    }


def _ground(arms: tuple[str, ...]) -> dict[str, Any]:
    lengths = {"mean": 112.0, "p50": 96, "p99": 420, "max": 448}
    return {
        "machine": {"cpu": "made-up processor", "cores": 2, "system": "Linux"},
        "versions": {"iterscope": "0.0", "torch": "0.0"},
        "revision": "made-up",
        "stolen_share": 0.013,
        "seconds": 2100.0,
        "load_average": 1.8,
        "settings": {
            "model": "/models/made-up",
            "seed": 7,
            "repeats": REPEATS,
            "seconds": 30.0,
            "cut_off_s": 10.0,
            "slo": {"ttft_ms": 1000.0, "tpot_ms": 60.0},
            "attainment_min": 0.9,
            "confidence": 0.95,
            "flags": ["--max-num-seqs", "16"],
            "command": "iterscope lab full",
        },
        "arms": [
            {"name": arm, "flags": ["--batching", arm], "baseline": place == 0}
            for place, arm in enumerate(arms)
        ],
        "capacity": {"requests_s": CAPACITY, "output_tok_s": 290.0, "arm": arms[0]}
        | {"concurrency": 16, "seconds": 20.0},
        "workload": {
            "name": "made-up",
            "source": "a random generator",
            "licence": "none needed",
            "arrivals": "poisson",
            "seed": 7,
            "scale": 0.24,
            "context_tokens": 512,
            "requests": 1746,
            "prompt_tokens": lengths,
            "output_tokens": lengths,
            "tenants": 3,
            "cancelled_share": 0.02,
        },
    }
