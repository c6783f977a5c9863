"""The plan of one step and its results, as columns: what the scheduler hands to the runner.

Owns the two types that cross between scheduler (writer of Plan), runner (writer of StepOutput) and
core (reader of both), and the Runner and Clock protocols, two of the three seams that tests may
fake. Holds no policy and no torch; a plan is never changed after `Scheduler.plan` returned it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.messages import SamplingParams, TokenLogprobs
from engine.request import Ids, Request
from engine.rows import Reservation
from telemetry.records import AdmissionStop, PreemptionCause


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The past of a row whose sampling needs it, or that tells more than its token.

    `tokens` are the ids of the sequence's prompt and of what was sampled and read: look at them
    before the next plan is made. `scored` prompt tokens have had their log-probabilities told; the
    first has none.
    """

    row: int
    tokens: Sequence[int] | Ids
    prompt_tokens: int
    scored: int = 1


@dataclass(slots=True)
class Plan:
    """One step, row by row; position in the lists is the batch row.

    token_ids is flat: token_counts[0] ids of row 0, then row 1, ...; a sampled token that the host
    has not read is request.PLACEHOLDER (loop depth 2 only). A row with samples[i] computes
    the last known token of its sequence, so the runner samples its next one, at output index
    output_indices[i] (0 for the first token after the prompt). block_tables are the pool's live
    lists: read them before the next plan is made. groups name each row's line, for policies
    that account by it. histories are those of rows whose sampling is not plain. The
    idle columns are rows that a fixed batch keeps after their end: one token each at its old
    position, computed after all others and never sampled. `rows` and
    `reserved` are the scheduler's own, for its commit.
    """

    step: int
    token_budget: int
    requests: list[int] = field(default_factory=list)
    start_positions: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    kv_block_counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)
    output_indices: list[int] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    idle_token_ids: list[int] = field(default_factory=list)
    idle_positions: list[int] = field(default_factory=list)
    idle_block_tables: list[list[int]] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    admission_stop: AdmissionStop = "no_waiting"
    admission_blocker: int | None = None
    admitted: list[int] = field(default_factory=list)
    admitted_cached_tokens: list[int] = field(default_factory=list)
    passed_over: list[int] = field(default_factory=list)
    passed_over_reasons: list[str] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    preempted_causes: list[PreemptionCause] = field(default_factory=list)
    preempted_blocks: list[int] = field(default_factory=list)
    preempted_lost_tokens: list[int] = field(default_factory=list)
    preempted_beneficiaries: list[int] = field(default_factory=list)
    allocation_failures: int = 0
    kv_blocks_peak: int = 0
    rows: list[Request] = field(default_factory=list)
    reserved: Reservation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step brought back: one token per sampling row, in row order; times in ns.

    errors: what was wrong with a request's row (non-finite logits), by request; its token is void.
    logprobs: those of the token of each request that asked; prompt_logprobs: which of its prompt's
    tokens is the first of these, counted from 0, and those computed in this step.
    """

    tokens: list[int]
    device_ns: int
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    padding_tokens: int = 0
    bucket: int = 0
    graph: bool = False
    errors: dict[int, str] = field(default_factory=dict)


class PendingStep(Protocol):
    """A launched step; `wait` blocks until its tokens are on the host."""

    def wait(self) -> StepOutput: ...


class Runner(Protocol):
    """Executes plans in the order they are given."""

    def run(self, plan: Plan) -> PendingStep: ...

    def forget(self, request: int) -> None:
        """Drop whatever is kept for a sequence that ended."""
        ...


class Clock(Protocol):
    """Nanoseconds since the server's start, on CLOCK_MONOTONIC."""

    def now_ns(self) -> int: ...
