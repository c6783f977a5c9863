"""A run's figures as its clients saw them: throughput, goodput, latencies, who was not finished.

Owns what each figure means, its unit and which way is better, and the part of a run that counts;
the collector and tune call it with what a generator wrote. Latencies count from the scheduled
instant. Who had no first token at the cut-off stands in with the time until then, a lower bound,
and is counted: a run that loses its slowest looks fast. Reads no clock.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.workload import percentile

SETTLE_SHARE = 0.1
"""So much of a run, at its begin, is left out: the batch fills from nothing."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What a figure is called, what it counts, and whether more or less of it is better."""

    title: str
    unit: str
    better: str = "less"
    share: bool = False


FIGURES: dict[str, Figure] = {
    "output_tok_s": Figure("output tokens a second", "tokens/s", "more"),
    "requests_s": Figure("requests finished a second", "requests/s", "more"),
    "goodput_requests_s": Figure("requests a second within the objective", "requests/s", "more"),
    "goodput_share": Figure("requests within the objective", "share", "more", share=True),
    "ttft_p50_ms": Figure("time to first token, median", "ms"),
    "ttft_p99_ms": Figure("time to first token, p99", "ms"),
    "tpot_p50_ms": Figure("time per output token of a request, median", "ms"),
    "tpot_p99_ms": Figure("time per output token of a request, p99", "ms"),
    "itl_p50_ms": Figure("gap between two tokens, median", "ms"),
    "itl_p99_ms": Figure("gap between two tokens, p99", "ms"),
    "e2e_p50_ms": Figure("whole answer, median", "ms"),
    "e2e_p99_ms": Figure("whole answer, p99", "ms"),
    "unfinished_share": Figure("requests unfinished at the cut-off", "share", share=True),
    "device_busy_share": Figure("device busy", "share", "none", share=True),
    "useful_rows_share": Figure("rows computed for someone who waits", "share", "more", share=True),
    "rows_mean": Figure("rows in a step", "rows", "none"),
    "step_ms_p50": Figure("step, median", "ms", "none"),
}
CLIENT_FIGURES = tuple(name for name in FIGURES)[:13]


def client_figures(
    load: dict[str, Any], *, ttft_ms: float, tpot_ms: float
) -> dict[str, float | None]:
    """Return the clients' figures of one load; the objective holds for asks that have none."""
    whole_s = load["seconds"]
    begin_ns, end_ns = SETTLE_SHARE * whole_s * 1e9, whole_s * 1e9
    seconds = (end_ns - begin_ns) / 1e9
    cut_ns = int((whole_s + load["cut_off_s"]) * 1e9)
    asks = [ask for ask in load["asks"] if begin_ns <= ask["scheduled_ns"] < end_ns]
    inside = sum(
        1 for ask in load["asks"] for at_ns in ask["tokens_ns"] if begin_ns <= at_ns < end_ns
    )
    ended = sum(
        1
        for ask in load["asks"]
        if ask["outcome"] == "finished" and begin_ns <= ask["ended_ns"] < end_ns
    )
    judged = [met(ask, ttft_ms=ttft_ms, tpot_ms=tpot_ms) for ask in asks]
    good = sum(1 for one in judged if one)
    due = sum(1 for one in judged if one is not None)
    found: dict[str, float | None] = {
        "output_tok_s": inside / seconds,
        "requests_s": ended / seconds,
        "goodput_requests_s": good / seconds,
        "goodput_share": good / due if due else None,
        "unfinished_share": _share(asks, "unfinished"),
    }
    values = {
        "ttft": [ttft for ask in asks if (ttft := first_ms(ask, cut_ns)) is not None],
        "tpot": [tpot for ask in asks if (tpot := per_token_ms(ask)) is not None],
        "itl": [gap for ask in asks for gap in gaps_ms(ask)],
        "e2e": [whole for ask in asks if (whole := whole_ms(ask, cut_ns)) is not None],
    }
    for name, of_all in values.items():
        for share in (50, 99):
            found[f"{name}_p{share}_ms"] = percentile(of_all, share / 100) if of_all else None
    return found


def _share(asks: list[dict[str, Any]], outcome: str) -> float | None:
    return sum(ask["outcome"] == outcome for ask in asks) / len(asks) if asks else None


def first_ms(ask: dict[str, Any], cut_ns: int) -> float | None:
    """Return the time to the first token; until the cut-off without one, None for who left."""
    if ask["tokens_ns"]:
        return float(ask["tokens_ns"][0] - ask["scheduled_ns"]) / 1e6
    return None if ask["outcome"] == "left" else (cut_ns - ask["scheduled_ns"]) / 1e6


def whole_ms(ask: dict[str, Any], cut_ns: int) -> float | None:
    """Return the time to the answer's end; until the cut-off without one, None for who left."""
    if ask["outcome"] == "finished":
        return float(ask["ended_ns"] - ask["scheduled_ns"]) / 1e6
    return None if ask["outcome"] == "left" else (cut_ns - ask["scheduled_ns"]) / 1e6


def per_token_ms(ask: dict[str, Any]) -> float | None:
    """Return the time per token after the first, None of fewer than two."""
    tokens = ask["tokens_ns"]
    return (tokens[-1] - tokens[0]) / (len(tokens) - 1) / 1e6 if len(tokens) > 1 else None


def gaps_ms(ask: dict[str, Any]) -> list[float]:
    """Return the gaps between an ask's tokens."""
    return [(after - before) / 1e6 for before, after in pairwise(ask["tokens_ns"])]


def met(ask: dict[str, Any], *, ttft_ms: float, tpot_ms: float) -> bool | None:
    """Return whether every token came in time: token j by ttft + j x tpot, as the record judges.

    Who left before anything was overdue is not judged: None. What was refused or cut off is late.
    """
    ttft, tpot = ask["slo"] or (ttft_ms, tpot_ms)
    since = [(at_ns - ask["scheduled_ns"]) / 1e6 for at_ns in ask["tokens_ns"]]
    in_time = all(at_ms <= ttft + place * tpot for place, at_ms in enumerate(since))
    if ask["outcome"] == "left":
        overdue_ms = (ask["ended_ns"] - ask["scheduled_ns"]) / 1e6
        return None if in_time and overdue_ms <= ttft + len(since) * tpot else False
    return in_time and ask["outcome"] == "finished" and bool(since)


def counts(load: dict[str, Any]) -> dict[str, int]:
    """Return how many asks went which way, and how many had no first token at the cut-off."""
    outcomes = [ask["outcome"] for ask in load["asks"]]
    names = {"finished": "finished", "left": "cancelled", "failed": "failed"}
    found = {told: outcomes.count(name) for name, told in names.items()}
    tokenless = sum(not ask["tokens_ns"] and ask["outcome"] != "left" for ask in load["asks"])
    return {"sent": len(outcomes), **found, "refused": outcomes.count("refused")} | {
        "unfinished": outcomes.count("unfinished"),
        "without_first_token": tokenless,
    }
