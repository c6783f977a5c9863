"""One moment of a watched server as plain values: what `iterscope top` draws, or prints as JSON.

Owns which figures there are and what each means; server/top_frame.py draws them. A picture is a
pure function of the watch and an instant. Must never hold text that was cleaned or cut: that is the
drawing's work.
"""

from dataclasses import dataclass
from typing import Any

from server.pace import Percentiles, Rates, percentiles
from server.watch import Watch, Watched
from telemetry.records import Iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sequence that runs. `state`: prefill, decode, recompute, admitted, or passed over."""

    request_id: str
    external_id: str | None
    tenant: str
    state: str
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    kv_blocks: int
    age_s: float
    gap_ms: float | None
    """Between its last two tokens."""
    silent_ms: float | None
    """Since its last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A sequence that waits: for what, behind whom, and what it lost if it was preempted."""

    request_id: str
    external_id: str | None
    tenant: str
    prompt_tokens: int
    output_tokens: int
    age_s: float
    reason: str
    behind: str | None
    preempted: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The last iteration. `rows` has the phase of each row of its batch."""

    number: int
    ended_s_ago: float
    rows: list[str]
    rows_max: int
    prefill_tokens: int
    decode_tokens: int
    padding_tokens: int
    idle_rows: int
    token_budget: int
    admission_stop: str
    blocker: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """KV blocks after the last iteration."""

    used: int
    cached: int
    total: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Counted since this watch began, or since the server did if that was later."""

    ended: dict[str, int]
    rejected: int
    preemptions: int
    faults: int
    records_lost: int
    iterations_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One moment of one server."""

    url: str
    run_id: str | None
    generation: int
    model: str | None
    policy: str | None
    batching: str | None
    up_s: float
    rates: Rates
    step: Step | None
    kv: Cache | None
    running: list[Row]
    waiting: list[Wait]
    ttft: Percentiles | None
    """Received to first write, of sequences that ended."""
    itl: Percentiles | None
    """Between the commits of a sequence's tokens."""
    seen: Seen


def picture_of(watch: Watch, url: str, here_ns: int) -> Picture:
    """Return the watched server at this machine's instant `here_ns`."""
    now_ns = watch.now_ns(here_ns)
    run, step = watch.run, watch.last
    passed = dict(zip(step.passed_over, step.passed_over_reasons, strict=True)) if step else {}
    order = {request: row for row, request in enumerate(step.requests)} if step else {}
    running = [(number, one) for number, one in watch.requests.items() if one.phase is not None]
    running.sort(key=lambda pair: order.get(pair[0], len(order)))
    return Picture(
        url=url,
        run_id=watch.run_id,
        generation=watch.generation,
        model=run.model if run else None,
        policy=run.policy if run else None,
        batching=run.batching if run else None,
        up_s=now_ns / 1e9,
        rates=watch.pace.rates(now_ns),
        step=_step(watch, step, now_ns) if step else None,
        kv=_cache(watch, step) if step else None,
        running=[_row(one, passed.get(number), now_ns) for number, one in running],
        waiting=[
            _wait(watch, one, passed.get(number), now_ns)
            for number, one in watch.requests.items()
            if one.phase is None
        ],
        ttft=percentiles(watch.pace.firsts_ns),
        itl=percentiles(watch.pace.gaps_ns),
        seen=Seen(
            ended=dict(watch.ended),
            rejected=watch.rejected,
            preemptions=watch.preemptions,
            faults=watch.faults,
            records_lost=watch.lost,
            iterations_dropped=watch.engine_lost,
        ),
    )


def _step(watch: Watch, step: Iteration, now_ns: int) -> Step:
    return Step(
        number=step.step,
        ended_s_ago=(now_ns - step.end_at_ns) / 1e9,
        rows=watch.phases,
        rows_max=watch.run.seqs_max if watch.run else len(watch.phases),
        prefill_tokens=step.prefill_tokens,
        decode_tokens=step.decode_tokens,
        padding_tokens=step.padding_tokens,
        idle_rows=step.idle_rows,
        token_budget=step.token_budget,
        admission_stop=step.admission_stop,
        blocker=_id_of(watch, step.admission_blocker),
    )


def _cache(watch: Watch, step: Iteration) -> Cache:
    return Cache(
        used=step.kv_blocks_used,
        cached=step.kv_blocks_cached,
        total=watch.run.kv_blocks_total if watch.run else 0,
        tokens=step.kv_tokens,
    )


def _who(one: Watched) -> dict[str, Any]:
    start = one.start
    return {
        "request_id": start.request_id,
        "external_id": start.external_id,
        "tenant": start.tenant,
        "prompt_tokens": start.prompt_tokens,
        "output_tokens": one.output,
    }


def _row(one: Watched, passed: str | None, now_ns: int) -> Row:
    since_ns = now_ns - one.token_at_ns if one.token_at_ns is not None else None
    return Row(
        **_who(one),
        state=f"passed over: {passed}" if passed else one.phase or "admitted",
        computed_tokens=one.computed,
        max_tokens=one.start.max_tokens,
        kv_blocks=one.blocks,
        age_s=(now_ns - one.start.arrived_at_ns) / 1e9,
        gap_ms=one.gap_ns / 1e6 if one.gap_ns is not None else None,
        silent_ms=max(0, since_ns) / 1e6 if since_ns is not None else None,
    )


def _wait(watch: Watch, one: Watched, passed: str | None, now_ns: int) -> Wait:
    step = watch.last
    reason, behind = "no step yet", None
    if passed is not None:
        reason = passed
    elif step is not None and step.end_at_ns >= one.start.arrived_at_ns:
        reason = step.admission_stop if step.admission_stop != "no_waiting" else "the next step"
        if step.admission_blocker not in {None, one.start.request}:
            behind = _id_of(watch, step.admission_blocker)
    elif step is not None:
        reason = "the next step"
    return Wait(
        **_who(one),
        age_s=(now_ns - one.start.arrived_at_ns) / 1e9,
        reason=reason,
        behind=behind,
        preempted=one.preempted,
    )


def _id_of(watch: Watch, request: int | None) -> str | None:
    """Return the name of a request in flight: its client's, if that gave one."""
    one = watch.requests.get(request) if request is not None else None
    return (one.start.external_id or one.start.request_id) if one else None
