"""Whether all arms answered alike: greedy tokens of the same request, arm by arm.

Owns the comparison of two loads token by token and, where they part, the gap between the two tokens
that were chosen, which the baseline's server is asked for. In f32 none may part; elsewhere a first
difference is allowed only where that gap is under the dtype's tolerance, for there the order of
sums decides. experiment.py calls it while the servers stand.
"""

from typing import Any

from bench.lab.serving import Served
from bench.lab.workload import Workload

TOLERANCES = {"f32": 0.0, "bf16": 0.5, "int8": 1.0}
"""Of the gap between two logits, by dtype; what is not listed has that of int8.

Logits of about 20 lie 0.125 apart in bf16. In int8 a step of few rows reads weights in another form
than a step of many (README, On a CPU), so that who is in the batch moves a logit by a few of those.
"""
ASKED_MAX = 60
"""Differences of one rate that the server is asked about; of the rest nothing is known."""


def differences(load: dict[str, Any], baseline: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """Return how many requests could be compared, and where those that part do so."""
    others = {ask["number"]: ask["ids"] for ask in baseline["asks"]}
    compared, found = 0, []
    for ask in load["asks"]:
        ours, theirs = ask["ids"], others.get(ask["number"], [])
        if not ours or not theirs:
            continue
        compared += 1
        for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if one != other:
                found.append(
                    {"request": ask["number"], "at_token": place, "tokens": [one, other]}
                    | {"before": theirs[:place]}
                )
                break
    return compared, found


def judged(
    served: Served, workload: Workload, parted: list[dict[str, Any]], dtype: str
) -> list[dict[str, Any]]:
    """Return the differences with their gaps, as the server that is asked has them.

    Gap and allowed are None where it was not asked or did not say.
    """
    tolerance = TOLERANCES.get(dtype, TOLERANCES["int8"])
    found = []
    for number, one in enumerate(parted):
        gap = None
        prompt = workload.asks[one["request"]].prompt
        if number < ASKED_MAX and isinstance(prompt, list):
            gap = _gap(served, prompt + one["before"], one["tokens"])
        told = {name: one[name] for name in ("request", "at_token", "tokens")}
        allowed = None if gap is None else gap <= tolerance
        found.append(told | {"gap": gap, "tolerance": tolerance, "allowed": allowed})
    return found


def _gap(served: Served, prompt: list[int], tokens: list[int]) -> float | None:
    """Return how far apart the scores of two tokens are after a prompt; None if it is not told."""
    scores = {}
    for token in tokens:
        body = {"prompt": [*prompt, token], "max_tokens": 0, "echo": True, "logprobs": 1}
        answer = served.post("/v1/completions", body)
        if answer.is_error:
            return None
        scores[token] = answer.json()["choices"][0]["logprobs"]["token_logprobs"][-1]
    return abs(float(scores[tokens[0]]) - float(scores[tokens[1]]))
