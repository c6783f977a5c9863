"""What every part of the page asks a result for: its arms in order, its rates, its objective.

Owns the order of arms, the baseline first, which decides their colours, and how a rate and an
objective are called in words. The parts under bench/lab/page use it. Must never fail on a result
that is not complete: what is not there yet is empty.
"""

from typing import Any

from bench.lab.figures import SETTLE_SHARE
from bench.lab.page.numbers import TIMES, short, valued

Result = dict[str, Any]


def names_of(result: Result) -> list[str]:
    """Return the arms' names, the baseline first."""
    arms = sorted(result.get("arms") or [], key=lambda arm: not arm.get("baseline"))
    return [str(arm["name"]) for arm in arms]


def baseline_of(result: Result) -> str:
    """Return what the others are compared with."""
    return next(iter(names_of(result)), "the baseline")


def place_of(result: Result, arm: str) -> int:
    """Return an arm's place among the arms."""
    names = names_of(result)
    return names.index(arm) if arm in names else len(names)


def in_order(result: Result, rows: list[Result]) -> list[Result]:
    """Return rows by rate, then by arm."""
    return sorted(rows, key=lambda row: (row["fraction"] or 0.0, place_of(result, row["arm"])))


def rate_of(result: Result, fraction: float) -> float | None:
    """Return the rate of a fraction of the capacity."""
    for rate in result.get("rates") or []:
        if rate["fraction"] == fraction:
            return float(rate["requests_s"])
    return None


def rate_in_words(result: Result, fraction: float | None) -> str:
    """Return a rate as people read it: of the capacity, and in requests a second."""
    if fraction is None:
        return "all rates"
    rate = rate_of(result, fraction)
    shown = f"{short(fraction)}{TIMES}"
    return shown if rate is None else f"{shown} · {short(rate)}/s"


def objective_in_words(result: Result) -> str:
    """Return the objective, and how many requests have to meet it."""
    settings = result.get("settings") or {}
    slo = settings.get("slo") or {}
    if not slo:
        return "the objective"
    share = settings.get("attainment_min", 0.9)
    first, each = valued(slo["ttft_ms"], "ms"), valued(slo["tpot_ms"], "ms")
    return f"first token within {first}, then {each} a token, for {valued(share, 'share')} of them"


def counted_in_words() -> str:
    """Return why a goodput may lie above the rate beside it."""
    settles = valued(SETTLE_SHARE, "share")
    return (
        f"Goodput is of requests that came after the first {settles} of a run, "
        "over the seconds that are left: where arrivals are uneven, more may come in these than "
        "the rate says."
    )


def closest(fractions: set[float], to: float) -> float | None:
    """Return the fraction that lies nearest."""
    return min(fractions, key=lambda fraction: (abs(fraction - to), fraction), default=None)
