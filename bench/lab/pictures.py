"""What of the engine's own record a report draws: batches over time, rounds, step times, waits.

Owns the reduction of whole runs to what pictures and tables need; result.py calls it with the run
files. One run stands for each arm and rate where a picture shows steps, all runs where it sums.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.lab.plan import Plan
from bench.lab.record import decode_steps, idle_of
from bench.workload import percentile

STEPS_SHOWN_MAX = 2000
STEPS_MIN = 5
"""Of one batch size, below which its median says little."""

Wholes = Sequence[dict[str, Any]]


def at(wholes: Wholes, arm: str, fraction: float) -> list[dict[str, Any]]:
    """Return the runs of an arm at a rate, by repeat."""
    found = [w for w in wholes if w["run"]["arm"] == arm and w["run"]["fraction"] == fraction]
    return sorted(found, key=lambda whole: int(whole["run"]["repeat"]))


def timelines(wholes: Wholes, plan: Plan) -> list[dict[str, Any]]:
    """Return the steps of the first repeat of each arm and rate, by column, ms from its begin."""
    found = []
    for arm in plan.arms:
        for fraction in plan.fractions:
            for whole in at(wholes, arm.name, fraction)[:1]:
                steps, run = whole["steps"], whole["run"]
                if not steps["step"]:
                    continue
                every = slice(0, STEPS_SHOWN_MAX)
                from_ns = run["engine"]["from_ns"]
                columns = ("rows", "idle_rows", "running", "waiting", "prefill_tokens")
                found.append(
                    _where(run)
                    | {
                        "begin_ms": _since(steps["begin_at_ns"][every], from_ns),
                        "end_ms": _since(steps["end_at_ns"][every], from_ns),
                    }
                    | {name: steps[name][every] for name in (*columns, "decode_tokens")}
                )
    return found


def _since(instants_ns: list[int], from_ns: int) -> list[float]:
    return [round((at_ns - from_ns) / 1e6, 2) for at_ns in instants_ns]


def _where(run: dict[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in ("arm", "fraction", "repeat")}


def rounds(wholes: Wholes, plan: Plan) -> list[dict[str, Any]]:
    """Return for each arm the rounds of the rate nearest to capacity."""
    near = sorted(plan.fractions, key=lambda fraction: abs(fraction - 1))
    found = []
    for arm in plan.arms:
        for fraction in near:
            whole = next((w for w in at(wholes, arm.name, fraction) if w["rounds"]), None)
            if whole is not None:
                why = "consecutive steps of the record with most joining, ending and idling"
                found.append(_where(whole["run"]) | {"why": why} | whole["rounds"])
                break
    return found


def step_times(wholes: Wholes, plan: Plan) -> list[dict[str, Any]]:
    """Return how long steps that only decode took by batch size, and the line through them."""
    found = []
    for arm in plan.arms:
        by_rows: dict[int, list[float]] = {}
        for whole in wholes:
            if whole["run"]["arm"] == arm.name:
                for rows, times in decode_steps(whole["steps"]).items():
                    by_rows.setdefault(rows, []).extend(times)
        sizes = sorted(rows for rows, times in by_rows.items() if len(times) >= STEPS_MIN)
        if not sizes:
            continue
        found.append(
            {
                "arm": arm.name,
                "rows": sizes,
                "ms_p50": [percentile(by_rows[rows], 0.5) for rows in sizes],
                "ms_p95": [percentile(by_rows[rows], 0.95) for rows in sizes],
                "steps": [len(by_rows[rows]) for rows in sizes],
                "fit": fit(sizes, [percentile(by_rows[rows], 0.5) for rows in sizes]),
            }
        )
    return found


def fit(rows: Sequence[int], ms: Sequence[float]) -> dict[str, float | None] | None:
    """Return T(B) = fixed + row x B by least squares over medians, each size counting alike.

    The knee is fixed / row: there rows cost as much as the step does without any, and tokens a
    second are half of what no batch size can exceed. None of fewer than three sizes, or where more
    rows cost nothing.
    """
    if len(rows) < 3:
        return None
    row_ms, fixed_ms = (float(one) for one in np.polyfit(rows, ms, 1))
    if row_ms <= 0 or fixed_ms <= 0:
        return None
    off = [abs(fixed_ms + row_ms * size - time) for size, time in zip(rows, ms, strict=True)]
    return {
        "fixed_ms": fixed_ms,
        "row_ms": row_ms,
        "knee_rows": fixed_ms / row_ms,
        "error_share": sum(off) / sum(ms),
    }


def waits(wholes: Wholes, plan: Plan) -> list[dict[str, Any]]:
    """Return where a mean request's time went, ms by cause, all repeats together."""
    found = []
    for arm in plan.arms:
        for fraction in plan.fractions:
            here = at(wholes, arm.name, fraction)
            requests = sum(whole["run"]["requests"]["sent"] for whole in here)
            if not requests:
                continue
            causes: dict[str, float] = {}
            for whole in here:
                for cause, ms in whole["causes"].items():
                    causes[cause] = causes.get(cause, 0.0) + ms / requests
            found.append(
                {"arm": arm.name, "fraction": fraction, "requests": requests, "causes": causes}
            )
    return found


def static_lost(wholes: Wholes, plan: Plan) -> list[dict[str, Any]]:
    """Return what fixed batches cost: rows nobody waits for, ends held, a batch that is closed."""
    found = []
    for wait in waits(wholes, plan):
        here = at(wholes, wait["arm"], wait["fraction"])
        idle = [idle_of(whole["steps"]) for whole in here]
        found.append(
            {
                "arm": wait["arm"],
                "fraction": wait["fraction"],
                "idle_rows_share": sum(one["idle_rows_share"] for one in idle) / len(idle),
                "idle_row_ms": sum(one["idle_row_ms"] for one in idle) / len(idle),
                "batch_held_ms": wait["causes"].get("batch_held", 0.0),
                "batch_closed_ms": wait["causes"].get("queue_batch_closed", 0.0),
            }
        )
    return found
