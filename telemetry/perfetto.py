"""Records as a trace that ui.perfetto.dev opens: the Trace Event Format, one JSON event at a time.

Owns what becomes a track, a slice, a counter and an arrow: for each run a process of the engine
(steps with their parts, the device, counters) and one of requests, a lane each (lanes.py).
`trace_events` is a pure generator from records in order to events; server/export_command.py writes
them with `write_trace`. Keeps only what is alive, so a long range needs no more memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

import msgspec

from telemetry.lanes import Lanes, Slice
from telemetry.reading import Placed
from telemetry.records import (
    Delivery,
    Fault,
    Iteration,
    Record,
    Rejection,
    RequestEnd,
    RequestStart,
    Run,
)
from telemetry.spans import Span, shown

STEPS, DEVICE = 1, 2
PARTS = ("gap", "plan", "launch", "wait", "commit")
"""The parts of a tile in the order in which they happen."""
HALVES_KEPT = 4096
FLOWS_A_RUN = 10**9

Event = dict[str, Any]
Kept = TypeVar("Kept")


@dataclass(slots=True)
class Track:
    """One run on its way into a trace: its two processes, its clock, and what is alive.

    `zero_ns` is the trace's zero on the run's clock: it may be negative.
    """

    span: Span
    engine: int
    requests: int
    zero_ns: int
    lanes: Lanes = field(default_factory=Lanes)
    device_until_ns: int = 0
    flows: int = 0
    ended: dict[int, tuple[int, int]] = field(default_factory=dict)
    delivered: dict[int, Delivery] = field(default_factory=dict)

    def us(self, at_ns: int) -> float:
        """Return an instant in us of the trace; exact to the ns for 100 days."""
        return (at_ns - self.zero_ns) / 1000


def trace_events(spans: list[Span], records: Iterable[Placed]) -> Iterator[Event]:
    """Yield the trace of records that come span by span, by seq in each.

    The zero of the trace is the begin of the earliest span. Slices of one lane never overlap, but
    may come out of order: what was before the queue is known at the end.
    """
    tracks: dict[str, Track] = {}
    zero_us = min(span.from_unix_us for span in spans)
    for place, span in enumerate(spans):
        zero_ns = (zero_us - span.started_unix_us) * 1000
        tracks[span.run_id] = Track(span, 2 * place + 1, 2 * place + 2, zero_ns)
    current: Track | None = None
    for placed in records:
        track = tracks[placed.run_id]
        if current is not track:
            if current is not None:
                yield from _drawn(current, current.lanes.finish())
            current = track
            yield from _opening(track)
        yield from _events(track, placed.record)
    if current is not None:
        yield from _drawn(current, current.lanes.finish())


def write_trace(events: Iterable[Event], spans: list[Span], file: IO[bytes]) -> int:
    """Write the events as one JSON document; return how many there were."""
    encode = msgspec.json.Encoder().encode
    about = {"from": shown(spans[0].from_unix_us), "to": shown(spans[-1].to_unix_us)}
    file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(about) + b',"traceEvents":[\n')
    count = 0
    for event in events:
        file.write((b",\n" if count else b"") + encode(event))
        count += 1
    file.write(b"\n]}\n")
    return count


def _events(track: Track, record: Record) -> Iterator[Event]:
    match record:
        case Iteration():
            yield from _step(track, record)
        case RequestStart():
            track.lanes.start(record, from_ns=track.span.from_ns)
            label = f"#{record.request} {record.external_id or record.request_id}"
            yield from _named(track.requests, record.request, label)
        case RequestEnd():
            yield from _end(track, record)
        case Delivery():
            yield from _delivery(track, record)
        case Run():
            label = f"engine of {record.model} ({record.policy}, {record.batching})"
            yield _meta(track.engine, "process_name", {"name": f"{label}, {track.span.run_id}"})
        case Fault():
            facts = {"error": record.error, "step": record.step}
            yield _mark(track, STEPS, f"fault: {record.where}", record.fault_at_ns, facts)
        case Rejection():
            facts = {"request": record.external_id or record.request_id}
            yield _mark(track, STEPS, f"rejected: {record.reason}", record.rejected_at_ns, facts)
        case _:
            pass  # a step model, causes and shares are no events in time


# ---- the engine


def _step(track: Track, record: Iteration) -> Iterator[Event]:
    drawn = track.lanes.step(record, from_ns=track.span.from_ns)
    if record.lost_before:
        lost = {"iterations": record.lost_before}
        yield _mark(track, STEPS, "lost on the way", record.begin_at_ns, lost)
    facts: dict[str, Any] = {
        "step": record.step,
        "rows": len(record.requests),
        "prefill_tokens": record.prefill_tokens,
        "decode_tokens": record.decode_tokens,
        "token_budget": record.token_budget,
        "admission_stop": record.admission_stop,
        "admission_blocker": record.admission_blocker,
    }
    begin = record.begin_at_ns
    yield from _slice(track, STEPS, f"step {record.step}", (begin, record.end_at_ns), facts)
    for part in PARTS:
        length: int = getattr(record, f"{part}_ns")
        yield from _slice(track, STEPS, part, (begin, begin + length), {})
        begin += length
    if record.device_ns:
        # The device is done when the wait is; what it did before, a step launched ahead hides.
        done = record.end_at_ns - record.commit_ns
        begin = max(done - record.device_ns, track.device_until_ns)
        facts = {"step": record.step, "device_ns": record.device_ns}
        yield from _slice(track, DEVICE, "device", (begin, done), facts)
        track.device_until_ns = done
    yield from _counters(track, record)
    yield from _drawn(track, drawn)
    yield from _flows(track, record)


def _counters(track: Track, record: Iteration) -> Iterator[Event]:
    series = {
        "KV blocks": {"used": record.kv_blocks_used, "cached": record.kv_blocks_cached},
        "running": {"sequences": record.running},
        "waiting": {"sequences": record.waiting},
        "tokens": {"prefill": record.prefill_tokens, "decode": record.decode_tokens},
    }
    for name, values in series.items():
        yield {
            "ph": "C",
            "name": name,
            "pid": track.engine,
            "ts": track.us(max(record.end_at_ns, track.span.from_ns)),
            "args": values,
        }


def _flows(track: Track, record: Iteration) -> Iterator[Event]:
    """Draw an arrow from each victim to the sequence that got its blocks."""
    decided = record.begin_at_ns + record.gap_ns + record.plan_ns // 2
    for victim, beneficiary in zip(record.preempted, record.preempted_beneficiaries, strict=True):
        live = track.lanes.live
        if victim == beneficiary or victim not in live or beneficiary not in live:
            continue
        track.flows += 1
        flow = {
            "name": "preempted for",
            "cat": "preemption",
            # A number: Perfetto's importer takes no other text for the id of a flow.
            "id": track.requests * FLOWS_A_RUN + track.flows,
            "pid": track.requests,
            "ts": track.us(max(decided, track.span.from_ns)),
        }
        yield flow | {"ph": "s", "tid": victim}
        yield flow | {"ph": "f", "bp": "e", "tid": beneficiary}


# ---- requests


def _drawn(track: Track, drawn: list[Slice]) -> Iterator[Event]:
    for part in drawn:
        span = (part.begin_ns, part.end_ns)
        yield from _slice(track, part.request, part.name, span, part.facts, requests=True)


def _end(track: Track, end: RequestEnd) -> Iterator[Event]:
    drawn, until_ns = track.lanes.end(end)
    yield from _drawn(track, drawn)
    for name, instant in (
        ("cancel requested", end.cancel_requested_at_ns),
        ("first token", end.first_token_at_ns),
        (end.finish, end.decided_at_ns),
    ):
        if instant is not None and instant >= track.span.from_ns:
            yield _mark(track, end.request, name, instant, {}, requests=True)
    _keep(track.ended, end.request, (end.arrived_at_ns, until_ns))
    yield from _around(track, end.request)


def _delivery(track: Track, delivery: Delivery) -> Iterator[Event]:
    _keep(track.delivered, delivery.request, delivery)
    yield from _around(track, delivery.request)


def _around(track: Track, request: int) -> Iterator[Event]:
    """Draw what the server did before the queue and after the engine, once both are known."""
    if request not in track.ended or request not in track.delivered:
        return
    delivery = track.delivered.pop(request)
    arrived, until = track.ended.pop(request)
    last = delivery.last_write_at_ns or 0
    facts = {"bytes": delivery.bytes, "stall_ns": delivery.stall_ns}
    for name, begin, end, said in (
        ("tokenize", delivery.received_at_ns, delivery.submitted_at_ns, {}),
        ("step_boundary", delivery.submitted_at_ns, arrived, {}),
        ("output", until, last, facts),
    ):
        yield from _slice(track, request, name, (begin, end), said, requests=True)


def _keep(table: dict[int, Kept], request: int, value: Kept) -> None:
    """Remember one half of a request until the other comes; the oldest goes when too many wait."""
    table[request] = value
    if len(table) > HALVES_KEPT:
        table.pop(next(iter(table)))


# ---- the format


def _opening(track: Track) -> Iterator[Event]:
    run_id = track.span.run_id
    yield _meta(track.engine, "process_name", {"name": f"engine, {run_id}"})
    yield _meta(track.engine, "process_sort_index", {"sort_index": track.engine})
    yield _meta(track.requests, "process_name", {"name": f"requests, {run_id}"})
    yield _meta(track.requests, "process_sort_index", {"sort_index": track.requests})
    yield from _named(track.engine, STEPS, "steps")
    yield from _named(track.engine, DEVICE, "device")


def _named(process: int, thread: int, name: str) -> Iterator[Event]:
    yield _meta(process, "thread_name", {"name": name}, thread)
    yield _meta(process, "thread_sort_index", {"sort_index": thread}, thread)


def _meta(process: int, name: str, args: dict[str, Any], thread: int = 0) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": args}


def _slice(
    track: Track,
    lane: int,
    name: str,
    ns: tuple[int, int],
    facts: dict[str, Any],
    *,
    requests: bool = False,
) -> Iterator[Event]:
    """Yield a complete event clipped to the range; nothing when nothing of it is left."""
    begin, end = max(ns[0], track.span.from_ns), ns[1]
    if end <= begin:
        return
    known = {key: value for key, value in facts.items() if value is not None}
    yield {
        "ph": "X",
        "name": name,
        "cat": "request" if requests else "engine",
        "pid": track.requests if requests else track.engine,
        "tid": lane,
        "ts": track.us(begin),
        "dur": (end - begin) / 1000,
        "args": known,
    }


def _mark(
    track: Track,
    lane: int,
    name: str,
    at_ns: int,
    facts: dict[str, Any],
    *,
    requests: bool = False,
) -> Event:
    return {
        "ph": "i",
        "s": "t",
        "name": name,
        "pid": track.requests if requests else track.engine,
        "tid": lane,
        "ts": track.us(max(at_ns, track.span.from_ns)),
        "args": facts,
    }
