"""Made-up steps for the lab's made-up result: batches over time, single rounds, step times.

Owns what an engine would have recorded in each mode, from a seed alone; tests/lab_results.py puts
it into the result. Nothing of it was ever measured.
"""

import random
from typing import Any

CAPACITY = 4.6
KEPT = {"continuous": 1.0, "static": 0.46, "dynamic": 0.55}
"""What a mode keeps of the capacity."""


def timeline(arm: str, fraction: float, pick: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"arm": arm, "fraction": fraction, "repeat": 0}
    names = ("begin_ms", "end_ms", "rows", "idle_rows", "running", "waiting")
    columns: dict[str, list[float]] = {name: [] for name in (*names, "prefill_tokens")}
    at, live, batch, waiting = 0.0, 8.0, 8, 0.0
    while at < 30_000:
        took = 12 + live * 1.4 + pick.random() * 4
        if arm == "continuous":
            live = max(0.0, min(16.0, live + pick.gauss(0, 1) + (fraction * 10 - live) * 0.05))
            batch = round(live)
        else:
            live -= pick.random() * 0.12
            if live < 1:
                live, batch, took = 16.0 * min(1, fraction), round(16 * min(1, fraction)), took + 90
        waiting = max(0.0, waiting + (fraction - KEPT.get(arm, 1)) * took * CAPACITY / 1000)
        row = (
            at,
            at + took,
            round(live),
            max(0, batch - round(live)),
            round(live),
            round(waiting),
            0,
        )
        for name, value in zip(columns, row, strict=True):
            columns[name].append(value)
        at += took + (30 if pick.random() < 0.02 else 0)
    return found | columns | {"decode_tokens": columns["rows"]}


def rounds(arm: str) -> dict[str, Any]:
    """Return twelve rounds of six requests, with ends in the middle."""
    fixed = arm != "continuous"
    last = {41: 3, 42: 8, 43: 5, 44: 11, 45: 4, 46: 11}
    first = {45: 0 if fixed else 4, 46: 0 if fixed else 6, 47: 12 if fixed else 9}
    steps = []
    for place in range(12):
        rows = [
            {"request": one, "kind": "prefill" if place == first.get(one, 0) else "decode"}
            | {"tokens": 38 + one if place == first.get(one, 0) else 1}
            for one in range(41, 48)
            if first.get(one, 0) <= place <= last.get(one, 11)
        ]
        steps.append(
            {
                "step": 900 + place,
                "begin_ms": 8000.0 + 20 * place,
                "end_ms": 8000.0 + 20 * place + (33.4 if place == 0 else 19.6),
                "admission_stop": "batch_closed" if fixed else "seqs",
                "waiting": 3,
                "idle_rows": 6 - len(rows) if fixed else 0,
                "rows": rows,
                "admitted": [one for one in range(41, 48) if first.get(one, 0) == place],
                "finished": [] if fixed else [o for o, end in last.items() if end == place],
            }
        )
    why = "the stretch with most ends and admissions"
    return {"arm": arm, "fraction": 0.95, "repeat": 0, "why": why, "steps": steps} | {
        "requests": [41, 42, 43, 44, 45, 46, 47]
    }


def step_time(arm: str, pick: random.Random) -> dict[str, Any]:
    sizes = list(range(1, 17))
    medians = [9.4 + 1.31 * size + pick.gauss(0, 0.25) for size in sizes]
    return {
        "arm": arm,
        "rows": sizes,
        "ms_p50": medians,
        "ms_p95": [value * 1.2 for value in medians],
        "steps": [400 - 20 * size for size in sizes],
        "fit": {"fixed_ms": 9.4, "row_ms": 1.31, "knee_rows": 7.2, "error_share": 0.014},
    }
