"""From runs to curves: means over repeats, arms against the baseline, the best operating point.

Owns the reduction of run summaries to figures by rate, the paired comparisons with Holm's
correction inside each figure's family, and the rate that an objective allows. result.py calls it.
Works on summaries alone: no file, no clock, so that simulated runs prove it.
"""

from collections.abc import Sequence
from typing import Any

from bench.lab.figures import FIGURES
from bench.lab.plan import Plan
from bench.lab.statistics import Compared, compare, holm, mean_of, verdict

Runs = Sequence[dict[str, Any]]


def values_of(runs: Runs, plan: Plan, arm: str, fraction: float, figure: str) -> list[float | None]:
    """Return a figure by repeat; None where a run is missing or does not know it."""
    found = {
        run["repeat"]: run["figures"].get(figure)
        for run in runs
        if run["arm"] == arm and run["fraction"] == fraction
    }
    return [found.get(repeat) for repeat in range(plan.repeats)]


def curves(runs: Runs, plan: Plan) -> list[dict[str, Any]]:
    """Return each arm's figures at each rate: mean, interval, and the repeats they come from."""
    found = []
    for arm in plan.arms:
        for fraction in plan.fractions:
            here = [r for r in runs if r["arm"] == arm.name and r["fraction"] == fraction]
            if not here:
                continue
            figures = {}
            for name in FIGURES:
                values = values_of(runs, plan, arm.name, fraction, name)
                known = [value for value in values if value is not None]
                if known:
                    mean = mean_of(known)
                    figures[name] = {
                        "mean": mean.value,
                        "low": mean.low,
                        "high": mean.high,
                        "values": values,
                    }
            rate = sum(run["requests_s"] for run in here) / len(here)
            found.append(
                {"arm": arm.name, "fraction": fraction, "requests_s": rate, "figures": figures}
            )
    return found


def comparisons(runs: Runs, plan: Plan) -> list[dict[str, Any]]:
    """Return every figure of every arm against the baseline at each rate.

    A family, inside which Holm's correction holds, is one figure of one arm over all rates.
    """
    found = []
    for name in FIGURES:
        for arm in plan.arms[1:]:
            family = [
                _row(name, fraction, arm.name, plan, *_pair(runs, plan, arm.name, fraction, name))
                for fraction in plan.fractions
            ]
            known = [row for row in family if row["pairs"]]
            for row, stands in zip(known, holm([row["p"] for row in known]), strict=True):
                row["holm"] = stands
            found += known
    return found


def _pair(
    runs: Runs, plan: Plan, arm: str, fraction: float, figure: str
) -> tuple[list[float | None], list[float | None]]:
    of_arm = values_of(runs, plan, arm, fraction, figure)
    of_baseline = values_of(runs, plan, plan.baseline.name, fraction, figure)
    return of_arm, of_baseline


def _row(
    figure: str,
    fraction: float | None,
    arm: str,
    plan: Plan,
    of_arm: Sequence[float | None],
    of_baseline: Sequence[float | None],
) -> dict[str, Any]:
    kind = FIGURES.get(figure)
    compared = compare(of_arm, of_baseline, as_share=kind is not None and kind.share)
    both = [
        (a, b) for a, b in zip(of_arm, of_baseline, strict=True) if a is not None and b is not None
    ]
    return {
        "figure": figure,
        "fraction": fraction,
        "arm": arm,
        "baseline": plan.baseline.name,
        "pairs": compared.pairs,
        "kind": compared.kind,
        "arm_mean": sum(a for a, _ in both) / len(both) if both else None,
        "baseline_mean": sum(b for _, b in both) / len(both) if both else None,
        "holm": False,
        "verdict": verdict(compared, kind.better if kind else "more"),
    } | _interval(compared)


def _interval(compared: Compared) -> dict[str, Any]:
    return {
        "value": compared.value,
        "low": compared.low,
        "high": compared.high,
        "p": compared.p,
        "significant": compared.significant,
    }


def at_objective(points: Sequence[tuple[float, float, float]], least: float) -> tuple[float, float]:
    """Return the highest rate at which `least` of the requests are in time, and tokens/s there.

    `points` are (rate, share in time, tokens/s) by ascending rate; between two the share and the
    tokens are taken as straight, from rate 0, where all would be in time, to the first. The first
    crossing counts: a share that recovers beyond it is chance or a queue that ended the run.
    """
    before = (0.0, 1.0, 0.0)
    for rate, share, tokens in points:
        if share < least:
            part = (before[1] - least) / (before[1] - share)
            return (
                before[0] + part * (rate - before[0]),
                before[2] + part * (tokens - before[2]),
            )
        before = (rate, share, tokens)
    return before[0], before[2]


def operating_points(runs: Runs, plan: Plan) -> list[dict[str, Any]]:
    """Return each arm's best rate by goodput, and the highest rate that keeps the objective."""
    found = []
    every = curves(runs, plan)
    for arm in plan.arms:
        mine = [c for c in every if c["arm"] == arm.name and "goodput_share" in c["figures"]]
        if not mine:
            continue
        best = max(mine, key=lambda curve: curve["figures"]["goodput_requests_s"]["mean"])
        points = [_point(c["requests_s"], c["figures"], "mean") for c in mine]
        rate, tokens = at_objective(points, plan.attainment_min)
        found.append(
            {
                "arm": arm.name,
                "fraction": best["fraction"],
                "requests_s": best["requests_s"],
                "goodput_requests_s": best["figures"]["goodput_requests_s"]["mean"],
                "goodput_share": best["figures"]["goodput_share"]["mean"],
                "at_slo_requests_s": rate,
                "at_slo_output_tok_s": tokens,
                "interpolated": rate < points[-1][0],
            }
        )
    return found


def open_ended(result: dict[str, Any]) -> set[str]:
    """Return the arms that kept the objective at the highest rate: it is no limit of theirs."""
    points = result.get("operating_points") or []
    return {point["arm"] for point in points if not point.get("interpolated")}


def _point(rate: float, figures: dict[str, Any], key: str) -> tuple[float, float, float]:
    return rate, figures["goodput_share"][key], figures["output_tok_s"][key]


def at_slo(runs: Runs, plan: Plan) -> list[dict[str, Any]]:
    """Return what the objective allows each arm against the baseline, paired by repeat."""
    allowed: dict[str, list[tuple[float, float] | None]] = {}
    for arm in plan.arms:
        allowed[arm.name] = []
        for repeat in range(plan.repeats):
            mine = sorted(
                (
                    (r["requests_s"], r["figures"]["goodput_share"], r["figures"]["output_tok_s"])
                    for r in runs
                    if r["arm"] == arm.name
                    and r["repeat"] == repeat
                    and r["figures"].get("goodput_share") is not None
                ),
            )
            whole = len(mine) == len(plan.fractions)
            allowed[arm.name].append(at_objective(mine, plan.attainment_min) if whole else None)
    found = []
    for arm in plan.arms[1:]:
        for place, figure in enumerate(("at_slo_requests_s", "at_slo_output_tok_s")):
            of_arm = [None if one is None else one[place] for one in allowed[arm.name]]
            of_baseline = [
                None if one is None else one[place] for one in allowed[plan.baseline.name]
            ]
            row = _row(figure, None, arm.name, plan, of_arm, of_baseline)
            if row["pairs"]:
                found.append(row | {"holm": row["significant"]})
    return found
