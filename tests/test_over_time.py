"""Named queries that answer over time, and the short tables, against figures in plain Python.

Owns the proof that buckets lie where they should, that idle ones are zero and not holes, and that
every named query is checked in this file, in test_post_mortems.py or in test_lints.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from telemetry.named import of_kind
from telemetry.records import ADMISSION_STOPS, RequestEnd
from tests.truth import Step, Truth, ask, opened, quantile, truth

POINTS = 12


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    with opened(tmp_path_factory.mktemp("record")) as connection:
        yield connection


def steps_in(known: Truth, points: int) -> list[list[Step]]:
    begins, _, bucket_of = known.buckets(points)
    found: list[list[Step]] = [[] for _ in begins]
    for step in known.steps:
        found[bucket_of(step.at_us)].append(step)
    return found


def ends_in(known: Truth, points: int) -> list[list[RequestEnd]]:
    begins, _, bucket_of = known.buckets(points)
    found: list[list[RequestEnd]] = [[] for _ in begins]
    for end in known.ends:
        found[bucket_of(known.at_us(end.released_at_ns))].append(end)
    return found


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def expect(found: list[Any], wanted: list[float | None], tolerance: float = 1e-3) -> None:
    assert [value is None for value in found] == [value is None for value in wanted]
    given = [value for value in wanted if value is not None]
    assert [v for v in found if v is not None] == pytest.approx(given, abs=tolerance)


def mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def or_none(values: list[float], figure: Callable[[list[float]], float]) -> float | None:
    return figure(values) if values else None


def test_buckets_cover_the_window_without_holes(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    begins, lengths, _ = known.buckets(POINTS)
    for query in of_kind("post_mortem"):
        if "points" in {parameter.name for parameter in query.parameters}:
            rows = ask(record, query.name, points=POINTS)
            assert column(rows, "at_unix_us") == begins, query.name
    assert sum(lengths) == pytest.approx((known.newest_us + 1 - known.started_us) / 1e6)


def test_an_idle_time_is_zero_and_not_a_hole(record: duckdb.DuckDBPyConnection) -> None:
    """Between the two engines of a server nothing runs for seconds."""
    rows = ask(record, "throughput", run="restart", points=40)
    quiet = [row for row in rows if row["steps_per_s"] == 0]
    assert len(rows) == 40
    assert len(quiet) > 20
    assert {row["decode_tokens_per_s"] for row in quiet} == {0}


def test_throughput(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = ask(record, "throughput", points=POINTS)
    _, lengths, _ = known.buckets(POINTS)
    steps, ends = steps_in(known, POINTS), ends_in(known, POINTS)
    each = list(zip(steps, ends, lengths, strict=True))
    expect(
        column(rows, "prefill_tokens_per_s"),
        [sum(s.record.prefill_tokens for s in part) / length for part, _, length in each],
    )
    expect(
        column(rows, "decode_tokens_per_s"),
        [sum(s.record.decode_tokens for s in part) / length for part, _, length in each],
    )
    expect(column(rows, "steps_per_s"), [len(part) / length for part, _, length in each])
    expect(column(rows, "requests_per_s"), [len(gone) / length for _, gone, length in each])


def test_latency(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = ask(record, "latency", points=POINTS)
    for name, figure, share in (
        ("ttft_p50_ms", known.ttft_ms, 0.5),
        ("ttft_p90_ms", known.ttft_ms, 0.9),
        ("ttft_p99_ms", known.ttft_ms, 0.99),
        ("tpot_p50_ms", known.tpot_ms, 0.5),
        ("tpot_p99_ms", known.tpot_ms, 0.99),
        ("e2e_p50_ms", lambda end: served_e2e(known, end), 0.5),
        ("e2e_p99_ms", lambda end: served_e2e(known, end), 0.99),
    ):
        wanted: list[float | None] = []
        for ends in ends_in(known, POINTS):
            values = [value for end in ends if (value := figure(end)) is not None]
            wanted.append(or_none(values, lambda v, share=share: quantile(v, share)))
        expect(column(rows, name), wanted)
    assert sum(column(rows, "ended")) == len(known.ends)


def served_e2e(known: Truth, end: RequestEnd) -> float | None:
    return known.e2e_ms(end) if end.finish in {"stop", "length"} else None


@pytest.mark.parametrize("run", ["healthy", "thrash"])
def test_token_gaps(record: duckdb.DuckDBPyConnection, run: str) -> None:
    known = truth(run)
    begins, _, bucket_of = known.buckets(POINTS)
    gaps: list[list[float]] = [[] for _ in begins]
    for _, before, after in known.token_gaps():
        ms = (after.record.end_at_ns - before.record.end_at_ns) / 1e6
        gaps[bucket_of(after.at_us)].append(ms)
    rows = ask(record, "token_gaps", run=run, points=POINTS)
    expect(column(rows, "gaps"), [len(part) for part in gaps])
    expect(column(rows, "p50_ms"), [or_none(g, lambda v: quantile(v, 0.5)) for g in gaps])
    expect(column(rows, "p99_ms"), [or_none(g, lambda v: quantile(v, 0.99)) for g in gaps])
    expect(column(rows, "max_ms"), [or_none(g, max) for g in gaps])
    sampled = sum(end.output_tokens for end in known.ends)
    firsts = sum(end.first_token_at_ns is not None for end in known.ends)
    assert sum(column(rows, "gaps")) == sampled - firsts


def test_queue(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = ask(record, "queue", points=POINTS)
    assert set(rows[0]) == {"at_unix_us", *ADMISSION_STOPS}
    _, lengths, _ = known.buckets(POINTS)
    for reason in ADMISSION_STOPS:
        wanted: list[float | None] = [
            sum(s.record.waiting * s.ns for s in part if s.record.admission_stop == reason)
            / 1e9
            / length
            for part, length in zip(steps_in(known, POINTS), lengths, strict=True)
        ]
        expect(column(rows, reason), wanted)
    assert max(column(rows, "kv")) > 0


def test_batch(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = ask(record, "batch", points=POINTS)
    parts = steps_in(known, POINTS)
    expect(column(rows, "batch_rows"), [mean([len(s.record.requests) for s in p]) for p in parts])
    expect(column(rows, "running"), [mean([s.record.running for s in p]) for p in parts])
    expect(column(rows, "waiting"), [mean([s.record.waiting for s in p]) for p in parts])
    used = [sum(sum(s.record.token_counts) for s in p) for p in parts]
    most = [sum(s.record.token_budget for s in p) for p in parts]
    expect(column(rows, "budget_share"), [u / m for u, m in zip(used, most, strict=True)])


def test_step_time_and_intervals(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    split = ask(record, "step_time", points=POINTS)
    parts = steps_in(known, POINTS)
    for name in ("plan", "launch", "wait", "commit", "gap"):
        wanted = [mean([getattr(s.record, f"{name}_ns") for s in p]) / 1e6 for p in parts]
        expect(column(split, f"{name}_ms"), list(wanted), 1e-5)
    rows = ask(record, "step_intervals", points=POINTS)
    expect(column(rows, "p50_ms"), [quantile([s.ns for s in p], 0.5) / 1e6 for p in parts])
    expect(column(rows, "p99_ms"), [quantile([s.ns for s in p], 0.99) / 1e6 for p in parts])
    expect(column(rows, "max_ms"), [max(s.ns for s in p) / 1e6 for p in parts])
    _, lengths, _ = known.buckets(POINTS)
    busy = [sum(s.ns for s in p) / 1e9 / n for p, n in zip(parts, lengths, strict=True)]
    expect(column(rows, "busy_share"), list(busy))


def test_kv(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = ask(record, "kv", points=POINTS)
    parts = steps_in(known, POINTS)
    used = [mean([s.record.kv_blocks_used for s in p]) for p in parts]
    expect(column(rows, "used_blocks"), list(used))
    expect(column(rows, "peak_blocks"), [max(s.record.kv_blocks_peak for s in p) for p in parts])
    assert set(column(rows, "total_blocks")) == {known.run.kv_blocks_total}
    tokens = [sum(s.record.kv_tokens for s in p) for p in parts]
    slots = [sum(s.record.kv_blocks_used for s in p) * known.run.block_tokens for p in parts]
    expect(column(rows, "fill_share"), [t / n for t, n in zip(tokens, slots, strict=True)])


def test_goodput(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    _, lengths, _ = known.buckets(POINTS)
    rows = ask(record, "goodput", points=POINTS, ttft_ms=150, tpot_ms=21)
    good: list[list[RequestEnd]] = []
    for ends in ends_in(known, POINTS):
        kept = []
        for end in ends:
            ttft, tpot = known.ttft_ms(end), known.tpot_ms(end)
            fast = ttft is not None and ttft <= 150 and (tpot is None or tpot <= 21)
            if end.finish in {"stop", "length"} and fast:
                kept.append(end)
        good.append(kept)
    each = list(zip(good, lengths, strict=True))
    expect(column(rows, "good_per_s"), [len(kept) / length for kept, length in each])
    tokens = [sum(end.output_tokens for end in kept) / length for kept, length in each]
    expect(column(rows, "good_tokens_per_s"), list(tokens))
    assert 0 < sum(len(kept) for kept in good) < len(known.ends)
    unserved = sum(end.finish not in {"stop", "length"} for end in known.ends)
    assert sum(column(rows, "unserved")) == unserved


def test_prefix_cache(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = ask(record, "prefix_cache", points=POINTS)
    parts = [[e for e in p if e.admitted_at_ns is not None] for p in ends_in(known, POINTS)]
    expect(column(rows, "prompt_tokens"), [sum(e.prompt_tokens for e in p) for p in parts])
    expect(column(rows, "cached_tokens"), [sum(e.cached_tokens for e in p) for p in parts])
    assert sum(column(rows, "cached_tokens")) > 0


# ---- short tables


def test_departures(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = {row["ended_by"]: row for row in ask(record, "departures")}
    names = Counter(
        end.finish + (f", {end.cancel_cause}" if end.cancel_cause else "") for end in known.ends
    )
    assert {name: row["requests"] for name, row in rows.items()} == names
    assert {"length", "stop", "cancelled, client"} == set(names)
    stops = [end for end in known.ends if end.finish == "stop"]
    freed = [(end.freed_at_ns or 0) - end.decided_at_ns for end in stops]
    assert rows["stop"]["decided_to_freed_max_ms"] == pytest.approx(max(freed) / 1e6, abs=1e-3)


def test_rejections(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    (refused,) = known.rejections
    at = known.at_us(refused.rejected_at_ns)
    assert ask(record, "rejections") == [
        {
            "reason": "queue_full",
            "requests": 1,
            "tenant": "default",
            "first_at_unix_us": at,
            "last_at_unix_us": at,
            "retry_after_mean_s": 1.5,
        }
    ]


def test_faults(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("faulty")
    (row,) = ask(record, "faults", run="faulty")
    (fault,) = known.faults
    assert (row["at_unix_us"], row["step"]) == (known.at_us(fault.fault_at_ns), 5)
    assert (row["where"], row["error"]) == (fault.where, fault.error)
    assert row["requests_in_error"] == sum(end.finish == "error" for end in known.ends) == 1
    assert ask(record, "faults") == []


def test_telemetry_loss(record: duckdb.DuckDBPyConnection) -> None:
    (row,) = ask(record, "telemetry_loss")
    assert (row["run_id"], row["lost_iterations"], row["lost_records"]) == ("gaps", 3, 0)


def test_runs(record: duckdb.DuckDBPyConnection) -> None:
    rows = ask(record, "runs")
    engines = {(row["run_id"], row["generation"]) for row in rows}
    assert engines >= {("restart", 1), ("restart", 2), ("healthy", 1)}
    assert column(rows, "started_unix_us") == sorted(column(rows, "started_unix_us"), reverse=True)


def test_every_named_query_is_checked_against_figures() -> None:
    here = Path(__file__)
    text = here.read_text() + here.with_name("test_post_mortems.py").read_text()
    unchecked = [q.name for q in of_kind("post_mortem") if f'ask(record, "{q.name}"' not in text]
    assert unchecked == []
