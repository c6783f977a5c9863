"""What the engine's own record says of one run: its clock, its steps, its causes, and the queries.

Owns the SELECTs that read a run's window from the server's history and what becomes of their rows.
measure.py asks when a run is over, verdicts show the same queries as their evidence. Instants of a
server count from its own start: what ties them to the client's clock is bounded by causality, for
a request cannot be received before it was sent nor read before it was written.
"""

from collections import Counter
from itertools import pairwise
from typing import Any

from bench.lab.serving import Served

DELIVERIES = """
SELECT e.external_id, e.received_at_ns, d.first_write_at_ns
FROM request_end e JOIN delivery d USING (run_id, request) WHERE e.external_id LIKE $1"""
STEPS = """
SELECT step, begin_at_ns, end_at_ns, device_ns, len(requests) AS rows, idle_rows, running, waiting,
       prefill_tokens, decode_tokens, admission_stop
FROM iteration WHERE run_id = $1 AND begin_at_ns < $3 AND end_at_ns > $2
ORDER BY end_at_ns LIMIT 8000"""
COLUMNS = (
    *("step", "begin_at_ns", "end_at_ns", "device_ns", "rows", "idle_rows", "running", "waiting"),
    *("prefill_tokens", "decode_tokens", "admission_stop"),
)
CAUSES = """
SELECT c.cause, sum(c.ns) / 1e6 AS ms
FROM request_cause c JOIN request_end e USING (run_id, request)
WHERE run_id = $1 AND e.external_id LIKE $2 GROUP BY c.cause ORDER BY ms DESC"""
ROUNDS = """
SELECT step, begin_at_ns, end_at_ns, admission_stop, waiting, idle_rows, requests, token_counts,
       start_positions, admitted, finished
FROM iteration WHERE run_id = $1 AND begin_at_ns < $3 AND end_at_ns > $2 AND len(requests) > 0
ORDER BY generation, step"""
PROMPTS = "SELECT request, prompt_tokens FROM request_start WHERE run_id = $1"
RUN_ID = "SELECT run_id FROM request_start WHERE external_id LIKE $1 LIMIT 1"
ROUNDS_SHOWN = 12


def clock_of(served: Served, load: dict[str, Any]) -> dict[str, Any]:
    """Return where the server's zero lies on the client's clock, ns, and how far off it may be.

    Sent before received and written before read bound it from both sides; the bounds of all
    requests together are narrow.
    """
    prefix = load["name"] + "-"
    zero_ns = load["zero_monotonic_ns"]
    asks = {f"{prefix}{ask['number']}": ask for ask in load["asks"]}
    low, high = None, None
    for name, received_ns, written_ns in served.sql(DELIVERIES, [prefix + "%"]):
        ask = asks.get(name)
        if ask is None:
            continue
        bound = zero_ns + ask["sent_ns"] - received_ns
        low = bound if low is None else max(low, bound)
        if written_ns is not None and ask["tokens_ns"]:
            bound = zero_ns + ask["tokens_ns"][0] - written_ns
            high = bound if high is None else min(high, bound)
    if low is None or high is None:
        return {"offset_ns": None, "error_ns": None}
    return {"offset_ns": (low + high) // 2, "error_ns": abs(high - low) // 2 + 1}


def window_of(served: Served, load: dict[str, Any], clock: dict[str, Any]) -> dict[str, Any]:
    """Return the run's id and its window on the server's clock: what evidence asks with."""
    found = served.sql(RUN_ID, [load["name"] + "-%"])
    if not found or clock["offset_ns"] is None:
        return {"run_id": None, "from_ns": None, "until_ns": None}
    begin_ns = load["zero_monotonic_ns"] - clock["offset_ns"]
    until_ns = begin_ns + int((load["seconds"] + load["cut_off_s"]) * 1e9)
    return {"run_id": found[0][0], "from_ns": begin_ns, "until_ns": until_ns}


def steps_of(served: Served, window: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the steps of a window by column."""
    rows: list[list[Any]] = []
    from_ns = window["from_ns"]
    while window["run_id"] is not None:
        page = served.sql(STEPS, [window["run_id"], from_ns, window["until_ns"]])
        if not page:
            break
        rows += page
        from_ns = page[-1][2]
    return {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}


def causes_of(served: Served, window: dict[str, Any], name: str) -> dict[str, float]:
    """Return the causes of all requests of a run, ms summed."""
    if window["run_id"] is None:
        return {}
    return dict(served.sql(CAUSES, [window["run_id"], name + "-%"]))


def engine_figures(steps: dict[str, list[Any]], window: dict[str, Any], seconds: float,
                   settle_share: float) -> dict[str, float | None]:  # fmt: skip
    """Return the engine's figures over the part of the run that counts."""
    if not steps["step"]:
        return {}
    begin_ns = window["from_ns"] + settle_share * seconds * 1e9
    end_ns = window["from_ns"] + seconds * 1e9
    inside = [
        place
        for place, ended_ns in enumerate(steps["end_at_ns"])
        if begin_ns <= ended_ns < end_ns and steps["rows"][place] + steps["idle_rows"][place]
    ]
    if not inside:
        return {"device_busy_share": 0.0}

    def of(name: str) -> list[Any]:
        return [steps[name][place] for place in inside]

    rows, idle = sum(of("rows")), sum(of("idle_rows"))
    walls = sorted(e - b for b, e in zip(of("begin_at_ns"), of("end_at_ns"), strict=True))
    return {
        "device_busy_share": min(1.0, sum(of("device_ns")) / (end_ns - begin_ns)),
        "useful_rows_share": rows / (rows + idle),
        "rows_mean": (rows + idle) / len(inside),
        "step_ms_p50": walls[len(walls) // 2] / 1e6,
    }


def idle_of(steps: dict[str, list[Any]]) -> dict[str, float]:
    """Return what rows of ended requests took: their share of rows, and of the device's time."""
    rows, idle, device_ns = steps["rows"], steps["idle_rows"], steps["device_ns"]
    spent = sum(
        device * empty / (full + empty)
        for device, full, empty in zip(device_ns, rows, idle, strict=True)
        if full + empty
    )
    return {
        "idle_rows_share": sum(idle) / max(1, sum(rows) + sum(idle)),
        "idle_row_ms": spent / 1e6,
    }


def rounds_of(served: Served, window: dict[str, Any]) -> dict[str, Any] | None:
    """Return consecutive steps that show how the batch changes: who joins, ends, and idles."""
    if window["run_id"] is None:
        return None
    where = [window["run_id"], window["from_ns"], window["until_ns"]]
    rows = served.sql(ROUNDS + " LIMIT 2000", where)
    if len(rows) < ROUNDS_SHOWN:
        return None
    begin = max(
        range(len(rows) - ROUNDS_SHOWN + 1),
        key=lambda place: (_telling(rows[place : place + ROUNDS_SHOWN]), -place),
    )
    prompts = dict(served.sql(PROMPTS, [window["run_id"]]))
    shown = rows[begin : begin + ROUNDS_SHOWN]
    lanes = list(dict.fromkeys(request for row in shown for request in row[6]))
    return {
        "requests": lanes,
        "steps": [_round(row, prompts, window["from_ns"]) for row in shown],
    }


def _telling(rows: list[list[Any]]) -> float:
    """Return how much of batching a stretch of steps shows, in a picture of few lanes.

    Ends and admissions are what it is about; of a fixed batch that rows fall idle early in it and
    that the next batch begins before its end.
    """
    lanes = len({request for row in rows for request in row[6]})
    ended = sum(len(row[10]) for row in rows)
    admitted = sum(len(row[9]) for row in rows[1:])
    idle: list[int] = [row[5] for row in rows]
    grows = sum(after > before for before, after in pairwise(idle))
    renewed = any(before and not after for before, after in pairwise(idle))
    many = max(0, lanes - 14)
    return float(
        min(ended, 4) + min(admitted, 4) + 2 * min(grows, 3) + 4 * renewed + lanes / 4 - many
    )


def _round(row: list[Any], prompts: dict[int, int], from_ns: int) -> dict[str, Any]:
    step, begin_ns, end_ns, stop, waiting, idle, requests, counts, starts, admitted, finished = row
    rows = [
        {
            "request": request,
            "kind": "prefill" if start < prompts.get(request, 0) else "decode",
            "tokens": count,
        }
        for request, count, start in zip(requests, counts, starts, strict=True)
    ]
    return {
        "step": step,
        "begin_ms": (begin_ns - from_ns) / 1e6,
        "end_ms": (end_ns - from_ns) / 1e6,
        "admission_stop": stop,
        "waiting": waiting,
        "idle_rows": idle,
        "rows": rows,
        "admitted": admitted,
        "finished": finished,
    }


def decode_steps(steps: dict[str, list[Any]]) -> dict[int, list[float]]:
    """Return the device's ms of steps that only decoded, by rows computed, idle ones included."""
    found: dict[int, list[float]] = {}
    names = ("rows", "idle_rows", "prefill_tokens", "device_ns")
    for rows, idle, prefill, device_ns in zip(*(steps[name] for name in names), strict=True):
        if rows and not prefill:
            found.setdefault(rows + idle, []).append(device_ns / 1e6)
    return found


def stops_of(steps: dict[str, list[Any]]) -> dict[str, int]:
    """Return how often each check ended admission."""
    return dict(Counter(steps["admission_stop"]))
