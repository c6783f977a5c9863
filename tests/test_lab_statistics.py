"""What the lab calls significant is: proved on simulated runs, where the truth is known.

GIVEN runs with seeded noise and weather that pairs share, WHEN arms are compared, THEN a mode
against itself is rarely told apart, a planted tenth nearly always, and intervals hold as often as
they say. The same is proved with the real engine in `make soak` (tests/test_lab_soak.py).
"""

import math
import random

import pytest

from bench.lab import curves, hypotheses
from bench.lab.plan import FACTORS
from bench.lab.statistics import Compared, compare, holm, mean_of, p_of, verdict
from tests import lab_runs

COMPARISONS = 20


def comparisons(factor: float, seed: int, pairs: int = 6, noise: float = 0.03) -> list[Compared]:
    """Return comparisons of an arm that is slower by a factor, in weather that pairs share."""
    draw = random.Random(seed)
    found = []
    for _ in range(COMPARISONS):
        weather = [draw.gauss(0, 0.3) for _ in range(pairs)]
        base = [100 * math.exp(one + draw.gauss(0, noise)) for one in weather]
        arm = [100 * factor * math.exp(one + draw.gauss(0, noise)) for one in weather]
        found.append(compare(arm, base))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_mode_against_itself_is_rarely_told_apart(seed: int) -> None:
    assert sum(one.significant for one in comparisons(1.0, seed)) <= 3


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_tenth_is_found(seed: int) -> None:
    found = comparisons(1 / 1.1, seed)
    assert sum(one.significant and verdict(one, "more") == "worse" for one in found) >= 18


def test_intervals_hold_as_often_as_they_say() -> None:
    found = [one for seed in range(100) for one in comparisons(0.9, seed)]
    held = sum(one.low <= 0.9 <= one.high for one in found if one.low and one.high) / len(found)
    assert 0.935 < held < 0.965


def test_p_is_students() -> None:
    """Known quantiles of the table: two-sided 5 % at 1, 2 and many degrees of freedom."""
    assert p_of(12.7062, 1.0, 1) == pytest.approx(0.05, abs=1e-5)
    assert p_of(4.30265, 1.0, 2) == pytest.approx(0.05, abs=1e-5)
    assert p_of(1.959964, 1.0, 10**6) == pytest.approx(0.05, abs=1e-5)
    assert p_of(2.0, 1.0, 5) == pytest.approx(0.1019395, abs=1e-6)
    assert (p_of(0.0, 0.0, 3), p_of(1.0, 0.0, 3)) == (1.0, 0.0)


def test_what_cannot_be_compared_is_unknown() -> None:
    nothing = compare([None, None], [1.0, 2.0])
    assert (nothing.pairs, nothing.value, verdict(nothing, "more")) == (0, None, "unknown")
    one = compare([2.0, None], [1.0, 2.0])
    assert (one.pairs, one.value, one.low, verdict(one, "more")) == (1, 2.0, None, "unknown")
    assert mean_of([3.0]).low is None


def test_a_figure_that_is_zero_is_compared_by_difference() -> None:
    found = compare([0.0, 0.1, 0.0], [0.9, 1.0, 0.95])
    assert found.kind == "difference"
    assert found.value == pytest.approx(-0.9167, abs=1e-3)
    assert found.significant


def test_holm_is_stricter_than_each_alone() -> None:
    assert holm([0.04, 0.001, None, 0.03]) == [False, True, False, False]
    assert holm([0.01, 0.02, 0.04]) == [True, True, True]
    assert holm([]) == []


def test_the_rate_that_an_objective_allows_lies_between_two() -> None:
    points = [(1.0, 1.0, 10.0), (2.0, 0.95, 20.0), (3.0, 0.45, 24.0)]
    assert curves.at_objective(points, 0.9) == pytest.approx((2.1, 20.4))
    assert curves.at_objective(points[:2], 0.9) == (2.0, 20.0)
    assert curves.at_objective([(1.0, 0.5, 10.0)], 0.9) == pytest.approx((0.2, 2.0))


def truth(arm: str, fraction: float) -> dict[str, float]:
    """The arm loses a third of the throughput at capacity, and wins nothing where it is idle."""
    loses = arm == "static" and fraction >= 1
    return {
        "output_tok_s": 67.0 if loses else 100.0 * fraction,
        "ttft_p99_ms": 900.0 if arm == "static" else 100.0,
        "itl_p99_ms": 20.0 if arm == "static" else 30.0,
        "e2e_p50_ms": 500.0,
        "goodput_share": 0.2 if loses else 1.0,
    }


def test_verdicts_say_what_was_planted() -> None:
    plan = lab_runs.plan()
    runs = lab_runs.runs(plan, truth, seed=3)
    rows = curves.comparisons(runs, plan)
    found = {one["name"]: one["verdict"] for one in hypotheses.judge(plan, rows, plan.fractions)}
    assert found == {
        "throughput": "holds",
        "ttft": "holds",
        "itl": "fails",
        "goodput": "holds",
        "utilisation": "unknown",
        "idle": "holds",
    }
    (tokens,) = [row for row in rows if row["figure"] == "output_tok_s" and row["fraction"] == 1.0]
    assert tokens["low"] < 0.67 < tokens["high"]
    (at_slo, _) = curves.at_slo(runs, plan)
    assert at_slo["arm_mean"] == pytest.approx(5 + 5 * 0.1 / 0.8)
    assert at_slo["baseline_mean"] == pytest.approx(10.0)


def test_of_other_arms_no_claim_about_batching_is_judged() -> None:
    """A planted tenth is told, what chance explains is not, and nobody is said to win."""

    def slower(arm: str, _: float) -> dict[str, float]:
        return {"ttft_p99_ms": 110.0 if arm == "fcfs" else 100.0, "output_tok_s": 90.0}

    plan = lab_runs.plan(arms=FACTORS["policies"][:2])
    rows = curves.comparisons(lab_runs.runs(plan, slower, seed=1, noise=0.005), plan)
    found = {one["name"]: one for one in hypotheses.judge(plan, rows, plan.fractions)}
    first = found["ttft"]
    assert first["claim"] == "Time to first token, p99, against decode_first at every rate."
    assert first["verdict"] == "changed"
    assert first["because"].startswith("2 of 2 comparisons differ beyond chance: fcfs 1.1")
    assert first["because"].endswith(" at 1 x capacity, worse.")
    assert [rows[place]["figure"] for place in first["comparisons"]] == ["ttft_p99_ms"] * 2
    tokens = found["throughput"]
    assert tokens["verdict"] == "unknown"
    assert tokens["because"] == "0 of 2 comparisons differ beyond chance."
    assert not any(one["question"] or "yields" in one["claim"] for one in found.values())
    assert found["idle"]["because"] == "too few repeats to tell."


def test_an_experiment_cut_short_still_says_what_it_knows() -> None:
    plan = lab_runs.plan()
    runs = lab_runs.runs(plan, truth, seed=3)[:3]
    rows = curves.comparisons(runs, plan)
    assert {row["pairs"] for row in rows} == {1}
    assert all(one["verdict"] == "unknown" for one in hypotheses.judge(plan, rows, [0.5, 1.0]))
    assert len(curves.curves(runs, plan)) == 3
    assert curves.at_slo(runs, plan) == []
    assert hypotheses.judge(plan, [], [])[0]["verdict"] == "unknown"
