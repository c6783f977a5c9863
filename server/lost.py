"""What the server puts on record for sequences whose engine died before it could, and of itself.

Owns the refusal of what no engine took in, the end of what one had begun, and the state in which it
was last seen, told from the iterations that the bus still holds. engine_client.py publishes them.
Never guesses: what nobody saw stays None.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from server.sequence import Sequence, Submission
from telemetry.bus import Bus
from telemetry.records import Iteration, Rejection, RequestEnd, RequestStart

TOLD_MAX = 64
"""Live sequences that a fault lists."""


def refusal(submission: Submission, now_ns: int) -> Rejection:
    """Return the record of a submission that no engine took into its queue."""
    return Rejection(
        request_id=submission.request_id,
        external_id=submission.external_id,
        tenant=submission.tenant,
        rejected_at_ns=now_ns,
        reason="engine_down",
        retry_after_s=None,
    )


def iterations_held(bus: Bus) -> list[Iteration]:
    """Return this generation's iterations that the bus still holds, oldest first."""
    with bus.reader(bus.tail_snapshot().seq, label="post-mortem") as reader:
        entries = reader.take(bus.capacity).entries
    return [
        entry.record
        for entry in entries
        if isinstance(entry.record, Iteration) and entry.generation == bus.generation
    ]


def last_seen(iterations: list[Iteration], live: Iterable[Sequence], now_ns: int) -> str:
    """Return the scheduler's state as it was last told, and who was live, one line each."""
    lines = ["no step was seen"]
    if iterations:
        last = iterations[-1]
        lines = [
            f"last step {last.step}, {(now_ns - last.end_at_ns) / 1e9:.3f} s ago: "
            f"{last.running} running, {last.waiting} waiting, admission stopped by "
            f"{last.admission_stop}, {last.kv_blocks_used} KV blocks used, "
            f"{last.kv_blocks_cached} cached",
            f"its rows: requests {last.requests}, positions {last.start_positions}, "
            f"tokens {last.token_counts}",
        ]
    lines += [
        f"live: request {one.request} ({one.request_id}), prompt {len(one.submission.prompt)}, "
        f"received {one.received_tokens} of {one.submission.max_tokens} tokens"
        for one in islice(live, TOLD_MAX)
    ]
    return "\n".join(lines)


@dataclass(slots=True)
class Witness:
    """What the iterations that the bus still holds say of one sequence's life."""

    admitted_at_ns: int | None = None
    first_token_at_ns: int | None = None
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    lost_tokens: int = 0
    preemptions: int = 0
    iterations: int = 0


def witnesses(
    starts: Mapping[int, RequestStart], iterations: Iterable[Iteration]
) -> dict[int, "Witness"]:
    """Read the lives of these sequences out of iterations, oldest first."""
    found = {request: Witness() for request in starts}
    for record in iterations:
        planned_at_ns = record.begin_at_ns + record.gap_ns
        for request, lost in zip(record.preempted, record.preempted_lost_tokens, strict=True):
            if one := found.get(request):
                one.preemptions += 1
                one.lost_tokens = lost
        for request, hit in zip(record.admitted, record.admitted_cached_tokens, strict=True):
            if one := found.get(request):
                one.recomputed_tokens += max(0, one.lost_tokens - hit)
                one.lost_tokens = 0
                if one.admitted_at_ns is None:
                    one.admitted_at_ns, one.cached_tokens = planned_at_ns, hit
        for request, start, count in zip(
            record.requests, record.start_positions, record.token_counts, strict=True
        ):
            if one := found.get(request):
                one.iterations += 1
                if one.first_token_at_ns is None and start + count >= starts[request].prompt_tokens:
                    one.first_token_at_ns = record.end_at_ns - record.commit_ns
    return found


def lost_end(
    start: RequestStart,
    sequence: Sequence | None,
    witness: Witness,
    *,
    error: str,
    now_ns: int,
) -> RequestEnd:
    """Return the end that a dead engine can no longer write, from what the server saw.

    A finish that reached the server stands. What the bus has forgotten is None or too low.
    """
    finish = sequence.finish if sequence and sequence.finish else "error"
    return RequestEnd(
        request=start.request,
        request_id=start.request_id,
        external_id=start.external_id,
        parent_id=start.parent_id,
        tenant=start.tenant,
        received_at_ns=sequence.submission.received_at_ns if sequence else start.arrived_at_ns,
        arrived_at_ns=start.arrived_at_ns,
        admitted_at_ns=witness.admitted_at_ns,
        first_scheduled_at_ns=witness.admitted_at_ns,
        prefill_finished_at_ns=witness.first_token_at_ns,
        first_token_at_ns=witness.first_token_at_ns,
        cancel_requested_at_ns=None,
        decided_at_ns=now_ns,
        freed_at_ns=now_ns,
        released_at_ns=now_ns,
        prompt_tokens=start.prompt_tokens,
        cached_tokens=witness.cached_tokens,
        output_tokens=sequence.received_tokens if sequence else 0,
        recomputed_tokens=witness.recomputed_tokens,
        dropped_tokens=0,
        wasted_tokens=0,
        preemptions=witness.preemptions,
        iterations=witness.iterations,
        finish=finish,
        cancel_cause=None,
        error=error if finish == "error" else None,
    )
