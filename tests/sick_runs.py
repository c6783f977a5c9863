"""Recorded samples: one healthy run and, for each lint and each law, a run with just its fault.

Owns the runs (the real core on a fake runner and clock, their time stretched to that of a machine)
and the history that holds them all, written through the real bus and store. Tests of named queries
read it. What a simulation cannot do by itself is changed in the records, one field at a time.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from telemetry.bus import Bus
from telemetry.explain_fold import CauseFold
from telemetry.records import (
    Delivery,
    Iteration,
    Record,
    RequestCause,
    RequestEnd,
    RequestStart,
    Run,
    StepModel,
)
from tests import samples
from tests.histories import WAIT_S, kept
from tests.recordings import placed, published, write_file
from tests.simulation import Simulation

Kind = TypeVar("Kind", bound=Record)

STRETCH = 20
"""How many times slower than the fake runner the recorded machine is: steps of 20 ms and more."""

FIRST_STARTED_UNIX_US = 1_796_000_000_000_000
DAY_US = 86_400_000_000
FLUSHED_RECORDS = 400


def of(kind: type[Kind], records: list[Record]) -> list[Kind]:
    return [record for record in records if isinstance(record, kind)]


# ---- the server's part of a record


def delivered(end: RequestEnd) -> Delivery:
    """What the server tells of a sequence once it ended."""
    first = end.first_token_at_ns
    return samples.delivery(
        end.request,
        received_at_ns=end.received_at_ns,
        tokenized_at_ns=end.received_at_ns,
        submitted_at_ns=end.arrived_at_ns,
        first_write_at_ns=first and first + 1_000_000,
        last_write_at_ns=first and end.released_at_ns + 2_000_000,
    )


def stretched(record: Record, factor: int = STRETCH) -> Record:
    """Return the record of a machine that is so many times slower."""
    times: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, int) and field.name.endswith("_ns"):
            times[field.name] = value * factor
    if isinstance(record, StepModel):
        times = {name: getattr(record, name) * factor for name in ("fixed", "p", "d", "c")}
    return replace(record, **times)


def recorded(simulated: Simulation, factor: int = STRETCH) -> list[Record]:
    """Return a run's records as the history gets them, each end with its delivery and causes."""
    config = simulated.config
    bus = Bus(run_id="recorded", capacity=10_000)
    fold = CauseFold(bus)
    whole: list[Record] = []
    for record in published(
        simulated.emitted,
        policy=config.scheduling_policy,
        batching=config.batching,
        kv_blocks_total=config.kv_blocks,
        block_tokens=config.block_size,
        batch_tokens_max=config.max_num_batched_tokens,
        seqs_max=config.max_num_seqs,
    ):
        slow = stretched(record, factor)
        told: list[Record] = [slow, delivered(slow)] if isinstance(slow, RequestEnd) else [slow]
        for one in told:
            bus.publish(one)
        whole += [*told, *fold.advance()]
    return whole


# ---- the healthy run


def healthy() -> list[Record]:
    """A busy quarter of a minute: a queue, a few preemptions, hits, cancels, two tenants."""
    simulated = Simulation(kv_blocks=8, enable_prefix_caching=True)
    for number in range(60):
        simulated.add(
            f"{number}",
            8 + number * 7 % 50,
            4 + number * 5 % 14,
            stop_at=3 if number % 9 == 4 else 0,
            shared=32 if number % 3 == 0 else 0,
            tenant="loud" if number % 4 else "quiet",
            external_id=f"client-{number}" if number % 10 == 0 else None,
        )
        simulated.step(5 if number % 5 else 3)
        if number % 17 == 11:
            simulated.cancel(f"{number}")
    simulated.drain()
    whole = recorded(simulated)
    place = len(whole) // 2
    at_ns = of(Iteration, whole[:place])[-1].end_at_ns
    refused = samples.rejection(rejected_at_ns=at_ns, reason="queue_full", retry_after_s=1.5)
    whole.insert(place, refused)
    return whole


# ---- one fault each


def preemption_thrash() -> list[Record]:
    simulated = Simulation(kv_blocks=8)
    for name in "ABCD":
        simulated.add(name, 20, 60)
    simulated.drain()
    return recorded(simulated)


def starvation() -> list[Record]:
    """Z of the lowest priority waits a minute while others come and go."""
    simulated = Simulation(
        scheduling_policy="priority", max_num_seqs=1, kv_blocks=4, priority_age_ms=10_000
    )
    simulated.add("A", 40, 12, priority=0)
    simulated.step()
    simulated.add("Z", 40, 3, priority=5)
    for number in range(4):
        simulated.add(f"late-{number}", 40, 12, priority=0)
        simulated.step(12)
    simulated.drain()
    return recorded(simulated, 1000)


def idle_kv_with_queue() -> list[Record]:
    simulated = Simulation(max_num_seqs=1, kv_blocks=64)
    for name in "ABCDEF":
        simulated.add(name, 20, 20)
    simulated.drain()
    return recorded(simulated)


def padding_waste() -> list[Record]:
    simulated = Simulation(batching="static", kv_blocks=32)
    for name, tokens in (("A", 40), ("B", 2), ("C", 3), ("D", 2)):
        simulated.add(name, 8, tokens)
    simulated.drain()
    return recorded(simulated)


def graph_misses() -> list[Record]:
    """Graphs of up to two rows; three rows run eagerly."""
    simulated = Simulation(kv_blocks=32)
    for name, tokens in (("A", 40), ("B", 20), ("C", 30)):
        simulated.add(name, 8, tokens)
    simulated.drain()
    return [
        replace(record, graph=record.prefill_tokens == 0 and len(record.requests) in {1, 2})
        if isinstance(record, Iteration)
        else record
        for record in recorded(simulated)
    ]


def slow_host() -> list[Record]:
    simulated = Simulation(kv_blocks=32)
    simulated.add("A", 8, 40)
    while simulated.core.has_work:
        simulated.clock.ns += 600_000
        simulated.step()
    return recorded(simulated)


def telemetry_gaps() -> list[Record]:
    """Three iterations in the middle were dropped, as the loop's outbox does when it is full."""
    simulated = Simulation(kv_blocks=32)
    simulated.add("A", 8, 20)
    simulated.drain()
    whole, lost = recorded(simulated), {10, 11, 12}
    left = [r for r in whole if not (isinstance(r, Iteration) and r.step in lost)]
    return [changed(record, 13, lost_before=3) for record in left]


def engine_deaths() -> list[Record]:
    first = Simulation(kv_blocks=32)
    first.add("A", 8, 10)
    first.drain()
    second = Simulation(kv_blocks=32)
    second.names = {1: "A"}
    second.clock.ns = first.clock.ns + 100_000_000
    second.core.wake()
    second.add("B", 8, 10)
    second.drain()
    died = samples.fault(fault_at_ns=first.clock.ns * STRETCH + 1_000_000_000)
    return [*recorded(first), died, *recorded(second)]


def survived_faults() -> list[Record]:
    simulated = Simulation(kv_blocks=32)
    simulated.runner.fails = lambda plan: RuntimeError("no memory") if plan.step == 5 else None
    simulated.add("A", 8, 10)
    simulated.step(6)
    simulated.add("B", 8, 10)
    simulated.drain()
    return recorded(simulated)


def step_model_error() -> list[Record]:
    simulated = Simulation(kv_blocks=32)
    simulated.add("A", 8, 100)
    simulated.add("B", 8, 119)
    simulated.drain()
    simulated.add("C", 8, 119)
    simulated.drain()
    whole = recorded(simulated)
    assert of(StepModel, whole)
    return [replace(r, error=0.6) if isinstance(r, StepModel) else r for r in whole]


def unexplained_time() -> list[Record]:
    hole = RequestCause(request=1, cause="unexplained", ns=60_000_000, rule="counted")
    return [*plain_run(), hole]


def plain_run() -> list[Record]:
    """Two requests and nothing remarkable: what the laws' faults are planted in."""
    simulated = Simulation(kv_blocks=32)
    simulated.add("A", 20, 10)
    simulated.step(2)
    simulated.add("B", 20, 6)
    simulated.drain()
    return recorded(simulated)


def changed(record: Record, step: int, **values: object) -> Record:
    """Return the record, with other values if it is the iteration of this step."""
    if isinstance(record, Iteration) and record.step == step:
        return replace(record, **values)  # type: ignore[arg-type]
    return record


def with_step(step: int, **values: object) -> Callable[[], list[Record]]:
    return lambda: [changed(record, step, **values) for record in plain_run()]


def with_end(**values: object) -> Callable[[], list[Record]]:
    """The end of A with other values."""

    def one(record: Record) -> Record:
        if isinstance(record, RequestEnd) and record.request == 1:
            return replace(record, **values)  # type: ignore[arg-type]
        return record

    return lambda: [one(record) for record in plain_run()]


def ended_twice() -> list[Record]:
    whole = plain_run()
    return [*whole, of(RequestEnd, whole)[0]]


def without_start() -> list[Record]:
    return [r for r in plain_run() if not (isinstance(r, RequestStart) and r.request == 2)]


def parts_too_long() -> list[Record]:
    return [
        replace(r, wait_ns=r.wait_ns + 7) if isinstance(r, Iteration) and r.step == 3 else r
        for r in plain_run()
    ]


def overlapping() -> list[Record]:
    return [
        replace(r, wait_ns=r.wait_ns + 7, begin_at_ns=r.begin_at_ns - 7)
        if isinstance(r, Iteration) and r.step == 3
        else r
        for r in plain_run()
    ]


def skipped_step() -> list[Record]:
    return [
        replace(r, step=r.step + 1) if isinstance(r, Iteration) and r.step >= 5 else r
        for r in plain_run()
    ]


SICK: dict[str, Callable[[], list[Record]]] = {
    "preemption_thrash": preemption_thrash,
    "starvation": starvation,
    "idle_kv_with_queue": idle_kv_with_queue,
    "padding_waste": padding_waste,
    "graph_misses": graph_misses,
    "slow_host": slow_host,
    "telemetry_gaps": telemetry_gaps,
    "engine_deaths": engine_deaths,
    "survived_faults": survived_faults,
    "step_model_error": step_model_error,
    "unexplained_time": unexplained_time,
    "one_end": ended_twice,
    "end_has_start": without_start,
    "tokens_scheduled": with_end(dropped_tokens=1),
    "not_negative": with_end(recomputed_tokens=-1),
    "output_within_max": with_end(wasted_tokens=11),
    "tokens_by_kind": with_step(3, decode_tokens=9),
    "parts_sum_to_tile": parts_too_long,
    "tiles_apart": overlapping,
    "no_step_missing": skipped_step,
    "within_budget": with_step(3, token_budget=0),
    "within_pool": with_step(3, kv_tokens=10_000),
    "blocker_where_stopped": with_step(3, admission_blocker=1),
    "instants_in_order": with_end(first_token_at_ns=1),
}
"""Lint or law to the run that has its fault and no other."""


def a_day_apart(runs: dict[str, list[Record]]) -> dict[str, list[Record]]:
    """Return the runs with their servers started on days of their own."""
    return {
        run_id: [
            replace(r, started_unix_us=FIRST_STARTED_UNIX_US + day * DAY_US)
            if isinstance(r, Run)
            else r
            for r in records
        ]
        for day, (run_id, records) in enumerate(runs.items())
    }


def write_runs(path: Path, runs: dict[str, list[Record]]) -> Path:
    """Write the runs into one file, a day apart."""
    return write_file(path, *(placed(r, run_id) for run_id, r in a_day_apart(runs).items()))


def write(folder: Path, runs: dict[str, list[Record]]) -> None:
    """Write the runs into one history, a day apart, each by a server of its own."""
    for run_id, records in a_day_apart(runs).items():
        with kept(folder, run_id) as (bus, history):
            for index, record in enumerate(records):
                bus.publish(record)
                if index % FLUSHED_RECORDS == 0:
                    assert history.flush(WAIT_S)
            assert history.flush(WAIT_S)
