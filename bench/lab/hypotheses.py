"""What is commonly said of continuous batching, as hypotheses, and what the runs say of each.

Owns the hypotheses, the rule that judges them and the queries on the recorded history that show
why. result.py calls it. A verdict rests on its comparisons, which hold together (Holm); one
that says "no difference" rests on intervals that lie inside a stated margin (Schuirmann's two
one-sided tests, 1987, at 90 % intervals; ours are wider). Of arms that are no modes of batching no
claim is judged; what changed is told. Must never call what was not told apart a win.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.lab.figures import FIGURES
from bench.lab.plan import Plan
from bench.lab.statistics import holm

UNTOLD = ("unknown", "too few repeats to tell.")
MARGIN = 0.10
"""Within so much, a difference is one that no client would notice."""

Row = dict[str, Any]
Query = Callable[[str, Sequence[object]], tuple[list[str], list[list[Any]]]]
"""Asks a run's history; gives columns and rows."""

ROWS_SQL = """
SELECT count(*) AS steps, round(avg(len(requests) + idle_rows), 2) AS rows_a_step,
       round(sum(idle_rows) / sum(len(requests) + idle_rows), 4) AS idle_share,
       round(sum(decode_tokens) / (($3 - $2) / 1e9), 1) AS decode_tokens_a_second,
       round(sum(device_ns) / ($3 - $2), 3) AS device_busy_share
FROM iteration WHERE run_id = $1 AND end_at_ns BETWEEN $2 AND $3
  AND len(requests) + idle_rows > 0"""
FIRST_SQL = """
SELECT c.cause, round(sum(c.ns) / 1e6 / count(DISTINCT c.request), 1) AS ms_a_request
FROM request_cause c JOIN request_end e USING (run_id, request)
WHERE run_id = $1 AND e.received_at_ns BETWEEN $2 AND $3
GROUP BY c.cause HAVING sum(c.ns) > 0 ORDER BY ms_a_request DESC, c.cause LIMIT 8"""
GAPS_SQL = """
WITH token AS (
  SELECT s.request, s.end_at_ns, i.prefill_tokens
  FROM slice s JOIN request_start r USING (run_id, request)
  JOIN iteration i USING (run_id, generation, step)
  WHERE s.run_id = $1 AND s.end_at_ns BETWEEN $2 AND $3
    AND s.start_position + s.token_count >= r.prompt_tokens
), gap AS (
  SELECT prefill_tokens > 0 AS beside_prefill, (end_at_ns - lag(end_at_ns) OVER (
    PARTITION BY request ORDER BY end_at_ns)) / 1e6 AS ms FROM token
)
SELECT beside_prefill, count(*) AS gaps, round(quantile_cont(ms, 0.5), 1) AS p50_ms,
       round(quantile_cont(ms, 0.99), 1) AS p99_ms
FROM gap WHERE ms IS NOT NULL GROUP BY beside_prefill ORDER BY beside_prefill"""
STOPS_SQL = """
SELECT admission_stop, count(*) AS steps, round(sum(end_at_ns - begin_at_ns) / 1e9, 2) AS seconds,
       round(avg(waiting), 1) AS waiting_mean, max(waiting) AS waiting_max
FROM iteration WHERE run_id = $1 AND end_at_ns BETWEEN $2 AND $3
GROUP BY admission_stop ORDER BY seconds DESC"""
HELD_SQL = """
SELECT count(*) AS requests,
       round(avg(freed_at_ns - decided_at_ns) / 1e6, 1) AS held_ms_mean,
       round(max(freed_at_ns - decided_at_ns) / 1e6, 1) AS held_ms_max
FROM request_end WHERE run_id = $1 AND received_at_ns BETWEEN $2 AND $3"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A claim about the baseline against every other arm.

    `figures` are judged at rates of at least `from_fraction`, or only at the lowest rate. `claims`
    is "better" (than every other arm), or "same" within MARGIN.
    """

    name: str
    question: str
    claim: str
    figures: tuple[str, ...]
    claims: str = "better"
    from_fraction: float = 0.0
    lowest_only: bool = False
    evidence: tuple[tuple[str, str], ...] = ()


HYPOTHESES = (
    Hypothesis(
        name="throughput",
        question="Does it yield more tokens a second?",
        claim="From {since:g} of its capacity on, {baseline} yields more tokens a second than "
        "{arms}.",
        figures=("output_tok_s",),
        from_fraction=0.9,
        evidence=(("rows in a step, and how many of them nobody waits for", ROWS_SQL),),
    ),
    Hypothesis(
        name="ttft",
        question="Does the first token come sooner?",
        claim="At every rate the slowest first tokens (p99) come sooner with {baseline}.",
        figures=("ttft_p99_ms",),
        evidence=(
            ("where a mean request's time went", FIRST_SQL),
            ("which check kept the line waiting", STOPS_SQL),
        ),
    ),
    Hypothesis(
        name="itl",
        question="Are the gaps between tokens shorter?",
        claim="At every rate the longest gaps between tokens (p99) are shorter with {baseline}.",
        figures=("itl_p99_ms",),
        evidence=(("gaps between tokens, beside a prompt's chunk and without", GAPS_SQL),),
    ),
    Hypothesis(
        name="goodput",
        question="Are more requests served within the objective?",
        claim="From {since:g} of its capacity on, {baseline} serves more requests within the "
        "objective.",
        figures=("goodput_share",),
        from_fraction=0.9,
        evidence=(("where a mean request's time went", FIRST_SQL),),
    ),
    Hypothesis(
        name="utilisation",
        question="Is the device used for more?",
        claim="At every rate more of the rows computed are ones that someone waits for.",
        figures=("useful_rows_share",),
        evidence=(
            ("rows in a step, and how many of them nobody waits for", ROWS_SQL),
            ("how long ended requests held their rows", HELD_SQL),
        ),
    ),
    Hypothesis(
        name="idle",
        question="Does it help where there is little load?",
        claim="At the lowest rate, {lowest:g} x capacity, a median answer takes as long with "
        "{arms}, within 10 %.",
        figures=("e2e_p50_ms",),
        claims="same",
        lowest_only=True,
        evidence=(("rows in a step, and how many of them nobody waits for", ROWS_SQL),),
    ),
)


def judge(plan: Plan, rows: Sequence[Row], fractions: Sequence[float]) -> list[dict[str, Any]]:
    """Return each hypothesis with its verdict, the reason, and the comparisons it rests on.

    They are claims about modes of batching. Of other arms, what is said of each hypothesis's figure
    is whether it changed. An experiment of one arm has nothing to say.
    """
    told = _claimed if plan.compares_modes else _changed
    return [told(one, plan, rows, fractions) for one in (HYPOTHESES if plan.arms[1:] else ())]


def _claimed(
    one: Hypothesis, plan: Plan, rows: Sequence[Row], fractions: Sequence[float]
) -> dict[str, Any]:
    places = [place for place, row in enumerate(rows) if _rests_on(one, row, fractions)]
    verdict, because = _verdict(one, [rows[place] for place in places])
    claim = one.claim.format(
        baseline=plan.baseline.name,
        arms=" and ".join(arm.name for arm in plan.arms[1:]),
        lowest=min(fractions, default=min(plan.fractions)),
        since=_since(one, fractions),
    )
    return {
        "name": one.name,
        "question": one.question,
        "claim": claim,
        "verdict": verdict,
        "because": because,
        "comparisons": places,
        "evidence": [],
    }


def _changed(
    one: Hypothesis, plan: Plan, rows: Sequence[Row], fractions: Sequence[float]
) -> dict[str, Any]:
    """Return what happened to a hypothesis's figure at every rate that was run; no question."""
    places = [
        place
        for place, row in enumerate(rows)
        if row["figure"] in one.figures and row["fraction"] in fractions
    ]
    title = " and ".join(FIGURES[figure].title for figure in one.figures)
    verdict, because = _apart([rows[place] for place in places])
    return {
        "name": one.name,
        "question": "",
        "claim": f"{title[0].upper()}{title[1:]}, against {plan.baseline.name} at every rate.",
        "verdict": verdict,
        "because": because,
        "comparisons": places,
        "evidence": [],
    }


def _rests_on(one: Hypothesis, row: Row, fractions: Sequence[float]) -> bool:
    if row["figure"] not in one.figures or not fractions:
        return False
    if one.lowest_only:
        return bool(row["fraction"] == min(fractions))
    return bool(row["fraction"] >= _since(one, fractions))


def _since(one: Hypothesis, fractions: Sequence[float]) -> float:
    """Return the rate from which a claim is judged: where none was so high, the highest."""
    return min(one.from_fraction, max(fractions, default=one.from_fraction))


def _verdict(one: Hypothesis, rows: Sequence[Row]) -> tuple[str, str]:
    if not _known(rows):
        return UNTOLD
    if one.claims == "same":
        return _alike(rows)
    # A row says how the other arm did against the baseline: its being worse is the claim.
    told = _beyond_chance(rows)
    for_it, against = told.count("worse"), told.count("better")
    because = (
        f"{for_it} of {len(rows)} comparisons show it beyond chance, {against} the "
        f"opposite, {len(rows) - for_it - against} nothing: {_figures(rows)}."
    )
    if for_it == len(rows):
        return "holds", because
    if for_it:
        return "mixed", because
    return ("fails" if against else "unknown"), because


def _apart(rows: Sequence[Row]) -> tuple[str, str]:
    if not _known(rows):
        return UNTOLD
    told = zip(rows, _beyond_chance(rows), strict=True)
    apart = [f"{_figures([row])}, {way}" for row, way in told if way in ("better", "worse")]
    because = f"{len(apart)} of {len(rows)} comparisons differ beyond chance"
    if not apart:
        return "unknown", f"{because}."
    return "changed", f"{because}: {'; '.join(apart)}."


def _known(rows: Sequence[Row]) -> bool:
    return any(row["p"] is not None for row in rows)


def _beyond_chance(rows: Sequence[Row]) -> list[str]:
    """Return how each arm did against the baseline, "same" where chance explains it."""
    stands = holm([row["p"] for row in rows])
    return [row["verdict"] if sure else "same" for row, sure in zip(rows, stands, strict=True)]


def _alike(rows: Sequence[Row]) -> tuple[str, str]:
    inside = [row for row in rows if _within(row)]
    apart = [row for row in rows if row["significant"] and not _within(row)]
    because = (
        f"{len(inside)} of {len(rows)} intervals lie within {MARGIN:.0%}, {len(apart)} are apart "
        f"beyond chance: {_figures(rows)}."
    )
    if len(inside) == len(rows):
        return "holds", because
    return ("fails" if len(apart) == len(rows) else "mixed" if apart else "unknown"), because


def _figures(rows: Sequence[Row]) -> str:
    """Return the comparisons in words, as the other arm stands against the baseline."""
    return "; ".join(
        f"{row['arm']} {_interval(row)} at {row['fraction']:g} x capacity"
        for row in rows
        if row["value"] is not None
    )


def _interval(row: Row) -> str:
    times = " times" if row["kind"] == "ratio" else " apart"
    sign = "" if row["kind"] == "ratio" else "+"
    value = f"{row['value']:{sign}.2f}"
    if row["low"] is None:
        return value + times
    return f"{value} ({row['low']:{sign}.2f} to {row['high']:{sign}.2f}){times}"


def _within(row: Row) -> bool:
    if row["kind"] != "ratio" or row["low"] is None:
        return False
    return bool(row["low"] > 1 / (1 + MARGIN) and row["high"] < 1 + MARGIN)


def queries_of(name: str) -> tuple[tuple[str, str], ...]:
    """Return title and SQL of what shows why, by a hypothesis's name."""
    return next(one.evidence for one in HYPOTHESES if one.name == name)


def shown_at(name: str, fractions: Sequence[float]) -> float:
    """Return the rate whose runs are asked for a hypothesis's evidence."""
    one = next(one for one in HYPOTHESES if one.name == name)
    if one.lowest_only:
        return min(fractions)
    return min(fractions, key=lambda fraction: abs(fraction - max(one.from_fraction, 0.75)))
