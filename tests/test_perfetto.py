"""A range of the record becomes a trace that viewers read, whatever happened in the range.

Owns the proofs of telemetry/lanes.py, perfetto.py, reading.py and of `iterscope export`, on records
of the real core. The format itself is checked by tests/trace_format.py.
"""

import io
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from telemetry.perfetto import trace_events, write_trace
from telemetry.reading import Placed, read_records
from telemetry.records import Record
from telemetry.spans import Span, TimeRange, spans_of
from tests import samples
from tests.recordings import asking, ends_of, placed, published, steps_of, write_file
from tests.simulation import Simulation
from tests.trace_format import Slices, check_trace

REQUESTS = 2
"""The process of request lanes in the trace of one run."""


def traced(records: list[Placed], *, from_ns: int = 0) -> tuple[Any, Slices]:
    span = Span(run_id="run-1", started_unix_us=10**15, from_ns=from_ns, to_ns=10**18)
    file = io.BytesIO()
    write_trace(trace_events([span], records), [span], file)
    document = json.loads(file.getvalue())
    return document, check_trace(document)


def names(slices: Slices, request: int) -> list[str]:
    """Return what a request did, in order, each once."""
    found = [name for _, _, name in slices[REQUESTS, request]]
    return [name for place, name in enumerate(found) if found[place - 1 : place] != [name]]


def assert_tiled(slices: Slices, records: list[Record]) -> None:
    """Each request's lane has no hole from its arrival until it was freed."""
    for request, end in ends_of(records).items():
        lane = slices[REQUESTS, request]
        if end.decided_at_ns == end.arrived_at_ns:
            continue  # cancelled before a nanosecond was over
        assert lane[0][0] == end.arrived_at_ns
        assert all(before[1] == after[0] for before, after in itertools.pairwise(lane)), (
            f"request {request} has a hole or an overlap: {lane}"
        )
        if end.finish != "cancelled":  # an abort comes between tiles
            assert lane[-1][1] >= (end.freed_at_ns or end.decided_at_ns)


def crowd(**settings: object) -> Simulation:
    simulation = Simulation(**settings)
    for name in "abcdef":
        simulation.add(name, 30, 20)
    simulation.drain()
    return simulation


def test_a_life_is_told_in_slices_without_a_hole() -> None:
    simulation = crowd(max_num_seqs=2, kv_blocks=20)
    records = published(simulation.emitted)
    document, slices = traced(placed(records))
    assert_tiled(slices, records)
    assert names(slices, 1) == ["prefill", "decode"]
    assert names(slices, 3) == ["queue_seqs", "prefill", "decode"]
    behind = [e["args"].get("behind") for e in document["traceEvents"] if e["name"] == "queue_seqs"]
    assert None in behind, "who stands at the head waits behind nobody"
    assert 3 in behind


def test_a_preempted_one_points_at_who_got_its_blocks_and_computes_again() -> None:
    simulation = crowd(kv_blocks=8)
    records = published(simulation.emitted)
    document, slices = traced(placed(records))
    assert_tiled(slices, records)
    preempted = [
        (victim, beneficiary)
        for step in steps_of(records)
        for victim, beneficiary in zip(step.preempted, step.preempted_beneficiaries, strict=True)
    ]
    assert preempted
    told = names(slices, preempted[0][0])
    assert "preempted_kv" in told
    assert any("recompute" in name for name in told)
    flows = [event for event in document["traceEvents"] if event["ph"] in "sf"]
    arrows = [(s["tid"], f["tid"]) for s, f in zip(flows[::2], flows[1::2], strict=True)]
    assert arrows == [pair for pair in preempted if pair[0] != pair[1]]


def test_a_fixed_batch_holds_who_is_done() -> None:
    simulation = Simulation(batching="static", max_num_seqs=2, kv_blocks=16)
    simulation.add("a", 10, 3)
    simulation.add("b", 10, 20)
    simulation.drain()
    records = published(simulation.emitted)
    _, slices = traced(placed(records))
    assert_tiled(slices, records)
    assert names(slices, 1) == ["prefill", "decode", "batch_held"]
    assert names(slices, 2) == ["prefill", "decode"]


def test_steps_are_tiled_by_their_parts_and_counters_say_what_the_record_says() -> None:
    records = published(crowd().emitted)
    document, slices = traced(placed(records))
    steps = steps_of(records)
    tiles = [(begin, end) for begin, end, name in slices[1, 1] if name.startswith("step ")]
    assert tiles == [(step.begin_at_ns, step.end_at_ns) for step in steps]
    parts: Counter[str] = Counter()
    for begin, end, name in slices[1, 1]:
        parts[name] += 0 if name.startswith("step ") else end - begin
    assert parts["wait"] == sum(step.wait_ns for step in steps)
    assert parts.total() == sum(step.end_at_ns - step.begin_at_ns for step in steps)
    device = sum(end - begin for begin, end, _ in slices[1, 2])
    assert device == sum(step.device_ns for step in steps)
    tokens = [e["args"] for e in document["traceEvents"] if e["name"] == "tokens"]
    assert [t["prefill"] + t["decode"] for t in tokens] == [sum(s.token_counts) for s in steps]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_the_trace_is_well_formed(seed: int) -> None:
    pick = random.Random(seed)
    simulation = Simulation(
        depth=pick.choice((1, 2)),
        kv_blocks=pick.choice((8, 12, 40)),
        max_num_seqs=pick.randrange(1, 6),
        batching=pick.choice(("continuous", "continuous", "static", "dynamic")),
        enable_prefix_caching=pick.random() < 0.5,
        scheduling_policy=pick.choice(("decode_first", "fcfs", "priority", "fair")),
    )
    for number in range(40):
        shared = pick.choice((0, 20))
        simulation.add(f"r{number}", pick.randrange(1, 60), pick.randrange(1, 30), shared=shared)
        if pick.random() < 0.5 and simulation.core.has_work:
            simulation.step()
        if pick.random() < 0.2:
            simulation.cancel(f"r{pick.randrange(number + 1)}")
    simulation.drain()
    records = published(simulation.emitted)
    _, slices = traced(placed(records))
    assert_tiled(slices, records)
    # A range that begins in the middle: nothing is drawn before it.
    middle = records[len(records) // 2 :]
    begin = next(step.begin_at_ns for step in steps_of(middle))
    starts = [r for r in records if r not in middle and r.__class__.__name__ == "RequestStart"]
    traced(placed([*starts, *middle]), from_ns=begin)


def test_what_was_lost_on_the_way_is_a_mark_and_nobody_guesses() -> None:
    records: list[Record] = [
        samples.run(),
        samples.start(1, arrived_at_ns=1000),
        samples.start(2, arrived_at_ns=1000),
        samples.iteration(1, [1], admission_stop="seqs", admission_blocker=2),
        samples.iteration(5, [1], admission_stop="seqs", admission_blocker=2, lost_before=3),
    ]
    document, slices = traced(placed(records))
    assert names(slices, 2) == ["queue_seqs", "unexplained", "queue_seqs"]
    assert names(slices, 1) == ["decode"]
    assert [e["args"] for e in document["traceEvents"] if e["name"] == "lost on the way"] == [
        {"iterations": 3}
    ]


def test_the_server_s_part_comes_before_the_queue_and_after_the_engine() -> None:
    records: list[Record] = [
        samples.run(),
        samples.start(1, arrived_at_ns=1200),
        samples.delivery(
            1,
            received_at_ns=900,
            submitted_at_ns=1100,
            first_write_at_ns=3100,
            last_write_at_ns=4000,
        ),
        samples.iteration(1, [1], begin_at_ns=1200, end_at_ns=3000),
        samples.end(1, arrived_at_ns=1200, decided_at_ns=2950, freed_at_ns=2950),
        samples.fault(fault_at_ns=4500),
        samples.rejection(),
    ]
    _, slices = traced(placed(records))
    assert slices[REQUESTS, 1] == [
        (900, 1100, "tokenize"),
        (1100, 1200, "step_boundary"),
        (1200, 3000, "decode"),
        (3000, 4000, "output"),
    ]


# ---- reading, and the command


def test_pages_give_back_every_record_in_order(tmp_path: Path) -> None:
    records = placed(published(crowd(kv_blocks=8).emitted))
    path = write_file(tmp_path / "r.duckdb", records)
    for rows_max in (7, 10_000):
        ask = asking(path, rows_max=rows_max)
        assert list(read_records(ask, spans_of(ask, TimeRange()))) == records


def test_a_range_takes_the_steps_in_it_and_whole_requests(tmp_path: Path) -> None:
    records = published(crowd(max_num_seqs=2).emitted)
    ask = asking(write_file(tmp_path / "r.duckdb", placed(records)))
    steps = steps_of(records)
    first, last = steps[10], steps[20]
    span = Span(run_id="run-1", started_unix_us=0, from_ns=first.begin_at_ns, to_ns=last.end_at_ns)
    found = [one.record for one in read_records(ask, [span])]
    assert steps_of(found) == steps[10:21]
    lived = {request for step in steps[10:21] for request in step.requests}
    assert lived <= ends_of(found).keys(), "an end after the range is there too"
    gone = {r for r, end in ends_of(records).items() if end.released_at_ns < first.begin_at_ns}
    assert not gone & ends_of(found).keys()


def export(*arguments: str) -> int:
    return main(["export", *arguments])


def test_the_command_writes_a_trace_of_a_file(tmp_path: Path) -> None:
    one, two = (placed(published(crowd().emitted), run_id) for run_id in ("run-1", "run-2"))
    path = write_file(tmp_path / "r.duckdb", one, two)
    target = tmp_path / "trace.json"
    assert export("--perfetto", "-o", str(target), "--file", str(path)) == 0
    slices = check_trace(json.loads(target.read_bytes()))
    assert {pid for pid, _ in slices} == {1, 2, 3, 4}, "each run has its own processes"
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_the_command_refuses_what_cannot_be(tmp_path: Path, capsys: Any) -> None:
    path = write_file(tmp_path / "r.duckdb", placed([samples.run()]))
    target = str(tmp_path / "trace.json")
    file = ("--file", str(path))
    for code, expected, arguments in (
        (2, "--perfetto", ("-o", target, *file)),
        (2, "5x", ("--perfetto", "-o", target, "--last", "5x", *file)),
        (2, "instant", ("--perfetto", "-o", target, "--from", "soon", *file)),
        (2, "exclude each other", ("--perfetto", "-o", target, "--last", "5m", "--from", "2026")),
        (1, "no run nobody", ("--perfetto", "-o", target, "--run", "nobody", *file)),
        (1, "newest record", ("--perfetto", "-o", target, "--from", "2036-01-01", *file)),
        (1, "cannot be written", ("--perfetto", "-o", str(tmp_path / "no" / "x"), *file)),
        (1, "no file", ("--perfetto", "-o", target, "--file", str(tmp_path / "none"))),
    ):
        assert export(*arguments) == code, arguments
        assert expected in capsys.readouterr().err
    assert not Path(target).exists()
