"""Log-probabilities of tokens: of those a step samples, and of a prompt's own.

Owns which rows and positions of a plan are scored, the arithmetic, and the way from tensors to the
messages. engine/runner.py calls it. Scores are those of the model's own logits, before any
parameter changes them, and always finite: JSON has no infinity.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from engine.messages import TokenLogprobs
from engine.plan import Plan
from engine.uploads import upload

FLOOR = -9999.0
"""What is told of a token that the model excludes."""

VALUES_MAX = 2**23
"""Bound of positions x vocabulary of a prompt's logits that exist at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probabilities of L tokens, and of the k most probable tokens at each one's place."""

    chosen: torch.Tensor  # [L] float32
    top_tokens: torch.Tensor  # [L, k] int64
    top: torch.Tensor  # [L, k] float32

    def to_host(self) -> "Scores":
        """Return the same on the host; on CUDA the copies are on their way."""
        return Scores(
            chosen=self.chosen.to("cpu", non_blocking=True),
            top_tokens=self.top_tokens.to("cpu", non_blocking=True),
            top=self.top.to("cpu", non_blocking=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """The sampling rows whose tokens are scored, with how many others each one wants told."""

    rows: torch.Tensor  # [L] int64, among the sampling rows
    requests: list[int]
    tops: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompts:
    """The pack's tokens whose successor in the prompt is scored, prompt after prompt."""

    places: torch.Tensor  # [N] int64, indices into the pack
    targets: torch.Tensor  # [N] int64, the successors
    requests: list[int]
    firsts: list[int]  # positions of each prompt's first successor
    counts: list[int]
    tops: list[int]


def scored_rows(plan: Plan, places: Mapping[int, int], device: str) -> ScoredRows | None:
    """Return whose sampled tokens are scored; `places` maps plan rows to sampling rows."""
    wanted = [
        (places[history.row], plan.requests[history.row], top)
        for history in plan.histories
        if history.row in places and (top := plan.sampling[history.row].logprobs) is not None
    ]
    if not wanted:
        return None
    return ScoredRows(
        rows=upload([place for place, _, _ in wanted], device),
        requests=[request for _, request, _ in wanted],
        tops=[top for _, _, top in wanted],
    )


def scored_prompts(plan: Plan, device: str) -> ScoredPrompts | None:
    """Return which of a plan's tokens score their successor: those not told before alone.

    The last token of a prompt is none of them: its successor is sampled.
    """
    places: list[int] = []
    targets: list[int] = []
    spans: list[tuple[int, int, int, int]] = []
    for history in plan.histories:
        row = history.row
        top = plan.sampling[row].prompt_logprobs
        if top is None:
            continue
        start, offset = plan.start_positions[row], sum(plan.token_counts[:row])
        first = max(start, history.scored - 1)
        last = min(start + plan.token_counts[row], history.prompt_tokens - 1)
        if first < last:
            places.extend(range(offset + first - start, offset + last - start))
            targets.extend(map(int, history.tokens[first + 1 : last + 1]))
            spans.append((plan.requests[row], first + 1, last - first, top))
    if not spans:
        return None
    requests, firsts, counts, tops = (list(column) for column in zip(*spans, strict=True))
    return ScoredPrompts(
        places=upload(places, device),
        targets=upload(targets, device),
        requests=requests,
        firsts=firsts,
        counts=counts,
        tops=tops,
    )


def score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Scores:
    """Score one token [L] a row of float32 logits [L, vocabulary], and the `top` largest.

    A row that is not finite has a chosen value that is not a number.
    """
    norm = logits.logsumexp(-1, keepdim=True)
    largest = logits.topk(min(top, logits.shape[1]), dim=-1)
    return Scores(
        chosen=(logits.gather(1, tokens[:, None]) - norm).squeeze(1).clamp_(min=FLOOR),
        top_tokens=largest.indices,
        top=(largest.values - norm).clamp_(min=FLOOR),
    )


def score_prompts(
    logits_of: Callable[[torch.Tensor], torch.Tensor], wanted: ScoredPrompts, vocab_size: int
) -> Scores:
    """Score prompts' tokens; `logits_of` gives the logits of some of the pack's tokens."""
    size = max(1, VALUES_MAX // vocab_size)
    parts = [
        score(
            logits_of(wanted.places[first : first + size]),
            wanted.targets[first : first + size],
            max(wanted.tops),
        )
        for first in range(0, len(wanted.places), size)
    ]
    return Scores(
        chosen=torch.cat([part.chosen for part in parts]),
        top_tokens=torch.cat([part.top_tokens for part in parts]),
        top=torch.cat([part.top for part in parts]),
    )


def told(scores: Scores, tops: Iterable[int]) -> list[TokenLogprobs]:
    """Return scores on the host as messages, each with as many others as it wants."""
    return [
        TokenLogprobs(chosen, tokens[:top], logprobs[:top])
        for chosen, tokens, logprobs, top in zip(
            scores.chosen.tolist(),
            scores.top_tokens.tolist(),
            scores.top.tolist(),
            tops,
            strict=True,
        )
    ]


def told_by_request(scores: Scores, wanted: ScoredRows) -> dict[int, TokenLogprobs]:
    """Return the scores of sampled tokens by request."""
    return dict(zip(wanted.requests, told(scores, wanted.tops), strict=True))


def told_of_prompts(
    scores: Scores, wanted: ScoredPrompts
) -> dict[int, tuple[int, list[TokenLogprobs]]]:
    """Return each prompt's first scored position and scores, by request."""
    found = {}
    tops = [
        top for top, count in zip(wanted.tops, wanted.counts, strict=True) for _ in range(count)
    ]
    every = iter(told(scores, tops))
    for request, first, count in zip(wanted.requests, wanted.firsts, wanted.counts, strict=True):
        found[request] = (first, [next(every) for _ in range(count)])
    return found
