"""The result of an experiment: one JSON value made from the files of its folder, at any moment.

Owns its form, which reports are drawn from and docs/lab.md tells, and the notes that limit what it
says. lab_command.py calls it when runs end, are cut short, or were done long ago. Reads the folder
and the histories in it, starts nothing.
"""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.lab import curves, hypotheses, pictures
from bench.lab.experiment import Bench
from bench.lab.figures import FIGURES
from bench.lab.files import read_json
from bench.lab.plan import Arm, Plan
from bench.lab.recorded import RecordReader
from bench.lab.statistics import CONFIDENCE
from bench.lab.workload import WorkloadError, read
from bench.workload import percentile

FORM = "iterscope-lab-1"
STOLEN_MAX, CROWD_MAX = 0.04, 0.08
"""Of the CPU; the lab itself and the servers of the other arms, which wait, take some 4 %."""


def collect(bench: Bench, command: str) -> dict[str, Any]:
    """Return the result of the runs that are there."""
    plan, out = bench.plan, bench.out
    wholes = [read_json(path) for path in sorted((out / "runs").glob("*.json.gz"))]
    runs = sorted((whole["run"] for whole in wholes), key=lambda run: int(run["order"]))
    rows = curves.comparisons(runs, plan)
    starts = read_json(out / "machine.json") if (out / "machine.json").exists() else [{}]
    judged = hypotheses.judge(plan, rows, sorted({run["fraction"] for run in runs}))
    _add_evidence(judged, bench, runs)
    equal = equality(out, plan)
    return {
        "form": FORM,
        "name": plan.name,
        "complete": len(runs) == plan.runs,
        "runs_planned": plan.runs,
        "runs_done": len(runs),
        **_machine(starts, runs),
        "settings": _settings(plan, command),
        "arms": [
            {"name": arm.name, "flags": list(arm.flags), "baseline": arm == plan.baseline}
            for arm in plan.arms
        ],
        "capacity": _known(out / "capacity.json"),
        "rates": _rates(plan, runs),
        "workload": workload_summary(out, plan),
        "runs": runs,
        "figures": {
            name: {"title": one.title, "unit": one.unit, "better": one.better}
            for name, one in FIGURES.items()
        },
        "curves": curves.curves(runs, plan),
        "comparisons": rows,
        "operating_points": curves.operating_points(runs, plan),
        "at_slo": curves.at_slo(runs, plan),
        "hypotheses": judged,
        "equality": equal,
        "timelines": pictures.timelines(wholes, plan),
        "rounds": pictures.rounds(wholes, plan),
        "step_time": pictures.step_times(wholes, plan),
        "waits": pictures.waits(wholes, plan),
        "static_lost": pictures.static_lost(wholes, plan),
        "generator": _generator(runs, out),
        "notes": list(notes(plan, runs, equal)),
    }


def _known(path: Path) -> Any:
    return read_json(path) if path.exists() else None


def _machine(starts: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last = starts[-1]
    stolen = [run["stolen_share"] for run in runs]
    return {
        "machine": last.get("machine", {}),
        "versions": last.get("versions", {}),
        "revision": last.get("revision", "unknown"),
        "stolen_share": fmean(stolen) if stolen else 0.0,
        "seconds": sum(start.get("seconds", 0.0) for start in starts),
        "load_average": last.get("load_average"),
        "starts": len(starts),
    }


def _settings(plan: Plan, command: str) -> dict[str, Any]:
    return {
        "model": plan.model,
        "seed": plan.seed,
        "repeats": plan.repeats,
        "seconds": plan.seconds,
        "cut_off_s": plan.cut_off_s,
        "slo": {"ttft_ms": plan.slo.ttft_ms, "tpot_ms": plan.slo.tpot_ms},
        "attainment_min": plan.attainment_min,
        "confidence": CONFIDENCE,
        "flags": plan.server_flags(Arm(name="all", flags=())),
        "fresh_servers": plan.fresh_servers,
        "command": command,
    }


def _rates(plan: Plan, runs: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    found = []
    for fraction in sorted(plan.fractions):
        rates = [run["requests_s"] for run in runs if run["fraction"] == fraction]
        if rates:
            found.append({"fraction": fraction, "requests_s": fmean(rates)})
    return found


def workload_summary(out: Path, plan: Plan) -> dict[str, Any]:
    """Return what all workloads of an experiment together were."""
    made = [read(path) for path in sorted((out / "workloads").glob("*.json.gz"))]
    if not made:
        return {}
    asks = [ask for workload in made for ask in workload.asks]
    prompts = [float(ask.prompt_tokens) for ask in asks if ask.prompt_tokens is not None]
    first = made[0]
    return {
        "name": first.name,
        "source": first.source,
        "licence": first.licence,
        "arrivals": first.arrivals,
        "seed": plan.seed,
        "scale": first.scale,
        "context_tokens": first.context_tokens,
        "requests": len(asks),
        "prompt_tokens": _lengths(prompts),
        "output_tokens": _lengths([float(ask.max_tokens) for ask in asks]),
        "tenants": len({ask.tenant for ask in asks}),
        "cancelled_share": fmean(ask.leaves_after_s is not None for ask in asks),
    }


def _lengths(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "mean": fmean(values),
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }


def _generator(runs: Sequence[dict[str, Any]], out: Path) -> dict[str, Any]:
    told = [run["generator"] for run in runs]
    return {
        "top_rate_requests_s": max((run["requests_s"] for run in runs), default=0.0),
        "late_ms_p99_max": max((one["late_ms_p99"] for one in told), default=0.0),
        "late_ms_max": max((one["late_ms_max"] for one in told), default=0.0),
        "cpu_share_max": max((one["cpu_share"] for one in told), default=0.0),
        "bottleneck_runs": sum(one["bottleneck"] for one in told),
        "ceiling": _known(out / "ceiling.json"),
    }


def equality(out: Path, plan: Plan) -> dict[str, Any]:
    """Return whether arms answered alike, over all rates and repeats compared so far."""
    files = [read_json(path) for path in sorted((out / "equality").glob("*.json"))]
    rows = [row for file in files for row in file]
    parted = [{"arm": row["arm"]} | one for row in rows for one in row["parted"]]
    checked = sum(row["compared"] for row in rows)
    return {
        "checked": checked,
        "same": checked - len(parted),
        "differing": parted,
        "allowed": all(one["allowed"] is not False for one in parted),
        "not_known": sum(one["allowed"] is None for one in parted),
        "how": "greedy token ids of the same request in each arm, against "
        f"{plan.baseline.name}; where they part, the gap of the two tokens' log-probabilities "
        "after the same beginning, as its server scores them",
    }


def _add_evidence(
    judged: list[dict[str, Any]], bench: Bench, runs: Sequence[dict[str, Any]]
) -> None:
    """Ask the histories on disk; one that cannot be read leaves its evidence out."""
    readers: dict[str, RecordReader] = {}
    fractions = sorted({run["fraction"] for run in runs})
    try:
        for one in judged if fractions else []:
            fraction = hypotheses.shown_at(one["name"], fractions)
            for arm in bench.plan.arms:
                here = [r for r in runs if r["arm"] == arm.name and r["fraction"] == fraction]
                if not here or here[0]["engine"]["run_id"] is None:
                    continue
                run = min(here, key=lambda run: int(run["repeat"]))
                for title, sql in hypotheses.queries_of(one["name"]):
                    found = _evidence(bench, run, title, sql, readers)
                    one["evidence"] += [found] if found else []
    finally:
        for reader in readers.values():
            reader.close()


def _evidence(
    bench: Bench,
    run: dict[str, Any],
    title: str,
    sql: str,
    readers: dict[str, RecordReader],
) -> dict[str, Any] | None:
    folder = bench.out / run["history"]
    window = run["engine"]
    begin_ns = window["from_ns"]
    parameters = [window["run_id"], begin_ns, begin_ns + int(bench.plan.seconds * 1e9)]
    try:
        if run["history"] not in readers:
            readers[run["history"]] = RecordReader(folder)
        answer = readers[run["history"]].ask(sql, parameters)
    except WorkloadError:
        return None
    asked = sql.strip()
    for place, value in enumerate(parameters, 1):
        asked = asked.replace(f"${place}", f"'{value}'" if place == 1 else str(value))
    return {
        "title": title,
        **{name: run[name] for name in ("arm", "fraction", "repeat")},
        "sql": sql.strip(),
        "parameters": parameters,
        "command": f"iterscope sql --history {shlex.quote(str(folder))} {shlex.quote(asked)}",
        "columns": [column["name"] for column in answer.columns],
        "rows": answer.rows,
    }


def notes(plan: Plan, runs: Sequence[dict[str, Any]], equal: dict[str, Any]) -> Iterator[str]:
    """Yield in people's words what limits the verdicts."""
    if len(runs) < plan.runs:
        yield f"{len(runs)} of {plan.runs} runs were done: what is missing says nothing."
    stolen = sum(run["stolen_share"] > STOLEN_MAX for run in runs)
    if stolen:
        yield f"In {_many(stolen, 'run')} the host took more than {STOLEN_MAX:.0%} of the CPU."
    crowded = sum(run["others_cpu_share"] > CROWD_MAX for run in runs)
    if crowded:
        told = _many(crowded, "run")
        yield f"In {told} other programs took more than {CROWD_MAX:.0%} of the CPU."
    slow = sum(run["generator"]["bottleneck"] for run in runs)
    if slow:
        told = f"In {_many(slow, 'run')} the load generator itself was late"
        yield f"{told}: latencies hold its delay."
    tokenless = sum(run["requests"]["without_first_token"] for run in runs)
    if tokenless:
        yield (
            f"{_many(tokenless, 'request')} had no first token at the cut-off, "
            f"{plan.cut_off_s:g} s after the last arrival; they count with the time until then, "
            "less than the truth."
        )
    broken = sum(run.get("faults", 0) > 0 for run in runs)
    if broken:
        told = _many(broken, "run")
        yield f"In {told} the engine failed (table `fault`): figures hold what that cost."
    failed = sum(run["requests"]["failed"] + run["requests"]["refused"] for run in runs)
    if failed:
        yield f"{_many(failed, 'request')} failed or refused."
    if plan.repeats < 5:
        yield (
            f"With {_many(plan.repeats, 'repeat')} only differences that are large against their "
            "spread are told from chance; what is called the same may differ."
        )
    if not equal["allowed"]:
        yield "Some answers differed between arms by more than rounding explains."
    if equal["not_known"]:
        told = _many(equal["not_known"], "answer")
        yield f"In {told} that differed nobody asked how far apart they were."


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
