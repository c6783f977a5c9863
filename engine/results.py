"""A step's results: on their way from the device, and what they say once they are on the host.

Owns what is asked of a step beyond a token a row, the pending step, and the reading of results,
rows that are no numbers included. engine/runner.py launches and waits. Decides nothing and never
touches the cache.
"""

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

import torch

from engine.batch import Filled
from engine.logprobs import ScoredPrompts, ScoredRows, Scores, told_by_request, told_of_prompts
from engine.messages import TokenLogprobs
from engine.penalties import BiasBatch, PenaltyBatch
from engine.plan import Plan, StepOutput


class Extras(NamedTuple):
    """What the histories of a plan ask for beyond a token a row; plain steps ask for nothing."""

    penalties: PenaltyBatch | None = None
    biases: BiasBatch | None = None
    rows: ScoredRows | None = None
    prompts: ScoredPrompts | None = None


class Launched(NamedTuple):
    """A step's results on their way to the host; `graph` says whether a captured step ran."""

    tokens: torch.Tensor
    best: torch.Tensor
    scores: Scores | None
    prompt_scores: Scores | None
    mark: int
    graph: bool
    copied: "torch.cuda.Event | None"


class Pending:
    """A launched step; `finish` waits for the device and builds the output."""

    def __init__(self, finish: Callable[[], StepOutput]) -> None:
        self._finish = finish

    def wait(self) -> StepOutput:
        """Return the step's output once its tokens are on the host."""
        return self._finish()


def told_of_step(
    plan: Plan, filled: Filled, extras: Extras, launched: Launched, *, device_ns: int
) -> tuple[StepOutput, set[int]]:
    """Return the output of a step whose results are on the host, and the rows that are wrong."""
    bad: set[int] = set()
    best = launched.best.tolist()
    if not all(map(isfinite, best)):
        wanted = [row for row, samples in enumerate(plan.samples) if samples]
        bad.update(row for row, most in zip(wanted, best, strict=True) if not isfinite(most))
    logprobs, prompt_logprobs = {}, {}
    if extras.rows and launched.scores:
        logprobs = told_by_request(launched.scores, extras.rows)
    if extras.prompts and launched.prompt_scores:
        prompt_logprobs = told_of_prompts(launched.prompt_scores, extras.prompts)
        if not bool(launched.prompt_scores.chosen.isfinite().all()):
            bad.update(_without_sense(plan, prompt_logprobs))
    output = StepOutput(
        tokens=launched.tokens.tolist(),
        device_ns=device_ns,
        padding_tokens=filled.padding_tokens,
        bucket=filled.bucket,
        graph=launched.graph,
        errors={
            plan.requests[row]: f"its logits were not finite in step {plan.step}" for row in bad
        },
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return output, bad


def _without_sense(
    plan: Plan, prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]]
) -> list[int]:
    """Return the rows whose prompts have scores that are no numbers, and take these out."""
    rows = [
        row
        for row, request in enumerate(plan.requests)
        if request in prompt_logprobs
        and not all(isfinite(one.logprob) for one in prompt_logprobs[request][1])
    ]
    for row in rows:
        del prompt_logprobs[plan.requests[row]]
    return rows
