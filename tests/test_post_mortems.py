"""Post-mortems against figures computed from the records in plain Python, query by query.

Owns the proof of those that answer with a table; test_over_time.py has those that answer over time.
Every named query is known to be checked in one of the two.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from tests.sick_runs import recorded, write_runs
from tests.simulation import Simulation
from tests.truth import ask, opened, quantile, truth

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    with opened(tmp_path_factory.mktemp("record")) as connection:
        yield connection


def test_why_waiting(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    waited: Counter[str] = Counter()
    head: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for step in known.steps:
        if step.record.waiting:
            reason = step.record.admission_stop
            waited[reason] += step.record.waiting * step.ns
            if step.record.admission_blocker:
                head[reason][step.record.admission_blocker] += step.ns
    rows = ask(record, "why_waiting")
    assert [row["reason"] for row in rows] == [reason for reason, _ in waited.most_common()]
    for row in rows:
        reason = row["reason"]
        assert row["waited_s"] == pytest.approx(waited[reason] / 1e9, abs=1e-6)
        assert row["share"] == pytest.approx(waited[reason] / waited.total(), abs=1e-4)
        if head[reason]:
            request, ns = head[reason].most_common(1)[0]
            assert row["heads"] == len(head[reason])
            assert row["longest_head_s"] == pytest.approx(ns / 1e9, abs=1e-6)
            assert head[reason][request] == ns
    assert {"kv"} <= set(waited)


def test_longest_waits(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = ask(record, "longest_waits", requests=5)
    longest = sorted(known.ends, key=known.waited_ms, reverse=True)[:5]
    assert {row["request_id"] for row in rows} == {end.request_id for end in longest}
    for end in longest:
        ns: Counter[str] = Counter()
        behind: defaultdict[str, Counter[int]] = defaultdict(Counter)
        begin, until = end.arrived_at_ns, end.admitted_at_ns
        assert until is not None
        for step in known.steps:
            done = step.record
            overlap = min(done.end_at_ns, until) - max(done.begin_at_ns, begin)
            if overlap > 0:
                ns[done.admission_stop] += overlap
                if done.admission_blocker not in {None, end.request}:
                    assert done.admission_blocker is not None
                    behind[done.admission_stop][done.admission_blocker] += overlap
        own = [row for row in rows if row["request_id"] == end.request_id]
        assert {row["reason"]: row["reason_ms"] for row in own} == pytest.approx(
            {reason: value / 1e6 for reason, value in ns.items()}, abs=1e-3
        )
        for row in own:
            assert row["waited_ms"] == pytest.approx(known.waited_ms(end), abs=1e-3)
            heads = behind[row["reason"]]
            worst = heads.most_common(1)[0][1] if heads else 0
            assert (row["behind_ms"] or 0) == pytest.approx(worst / 1e6, abs=1e-3)
    assert any(row["behind"] for row in rows)


def test_slowest_requests(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = ask(record, "slowest_requests", requests=7)
    slowest = sorted(known.ends, key=known.e2e_ms, reverse=True)[:7]
    assert [row["e2e_ms"] for row in rows] == pytest.approx(
        [known.e2e_ms(end) for end in slowest], abs=1e-3
    )
    by_id = {end.request_id: end for end in known.ends}
    for row in rows:
        end = by_id[row["request_id"]]
        causes = sorted(known.causes[end.request].values(), reverse=True)[:3]
        found = [row["first_ms"], row["second_ms"], row["third_ms"]]
        assert found == pytest.approx([ns / 1e6 for ns in causes], abs=1e-3)
        first = known.causes[end.request][row["first_cause"]]
        assert first / 1e6 == pytest.approx(row["first_ms"], abs=1e-3)
        assert row["ttft_ms"] == pytest.approx(known.ttft_ms(end), abs=1e-3)
        assert (row["finish"], row["preemptions"]) == (end.finish, end.preemptions)


def test_causes(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    sums: Counter[str] = Counter()
    for causes in known.causes.values():
        sums.update(causes)
    rows = ask(record, "causes")
    assert {row["cause"]: row["seconds"] for row in rows} == pytest.approx(
        {cause: ns / 1e9 for cause, ns in sums.items()}, abs=1e-6
    )
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-3)
    for end in known.ends:
        if known.deliveries[end.request].last_write_at_ns is not None:
            causes = known.causes[end.request]
            assert sum(causes.values()) / 1e6 == pytest.approx(known.e2e_ms(end), abs=1e-3)


def test_who_held_the_kv(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    held: Counter[int] = Counter()
    for step in known.steps:
        for request, blocks in zip(step.record.requests, step.record.kv_block_counts, strict=True):
            held[request] += blocks * step.ns
    rows = ask(record, "who_held_the_kv", requests=6)
    most = held.most_common(6)
    assert [row["block_s"] for row in rows] == pytest.approx([ns / 1e9 for _, ns in most], abs=1e-6)
    pool = known.run.kv_blocks_total * sum(step.ns for step in known.steps)
    assert rows[0]["share"] == pytest.approx(most[0][1] / pool, abs=1e-4)
    assert rows[0]["request_id"] == known.name(most[0][0])


def test_recompute_tax(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("thrash")
    (row,) = ask(record, "recompute_tax", run="thrash")
    lost = sum(sum(step.record.preempted_lost_tokens) for step in known.steps)
    computed = sum(sum(step.record.token_counts) for step in known.steps)
    assert (row["preemptions"], row["kv_preemptions"], row["policy_preemptions"]) == (3, 3, 0)
    assert (row["lost_tokens"], row["computed_tokens"]) == (lost, computed)
    assert row["lost_share"] == pytest.approx(lost / computed, abs=1e-4)
    assert row["recomputed_tokens"] == sum(end.recomputed_tokens for end in known.ends) == lost
    assert row["preempted_requests"] == sum(end.preemptions > 0 for end in known.ends)


def test_neighbour_stalls(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = ask(record, "neighbour_stalls", requests=20)
    stall = {
        end.request_id: known.causes[end.request].get("neighbour_prefill", 0)
        + known.causes[end.request].get("neighbour_decode", 0)
        for end in known.ends
    }
    assert [row["stall_ms"] for row in rows] == pytest.approx(
        [ns / 1e6 for ns in sorted(stall.values(), reverse=True)[:20]], abs=1e-3
    )
    by_id = {end.request_id: end for end in known.ends}
    for row in rows:
        request = by_id[row["request_id"]].request
        prompt: Counter[str] = Counter()
        for step in known.steps:
            done = step.record
            if request in done.requests:
                for other, start, count in zip(
                    done.requests, done.start_positions, done.token_counts, strict=True
                ):
                    tokens = min(count, known.starts[other].prompt_tokens - start)
                    if other != request and tokens > 0:
                        prompt[known.name(other)] += tokens
        assert row["neighbour_prefill_tokens"] == (max(prompt.values()) if prompt else None)
        assert prompt[row["largest_neighbour"]] == (row["neighbour_prefill_tokens"] or 0)
    assert any(row["largest_neighbour"] for row in rows)


def test_request_timeline(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("thrash")
    victim = max((e for e in known.ends if e.preemptions), key=lambda e: e.request_id)
    rows = ask(record, "request_timeline", request=victim.request_id)
    instants = [row["at_ms"] for row in rows]
    assert instants == sorted(instants)
    assert instants[0] == 0
    events = Counter(row["event"] for row in rows)
    assert events["preempted"] == victim.preemptions
    assert events["admitted"] == 1 + victim.preemptions
    for event in ("received", "arrived", "first token", "decided", "freed", "released"):
        assert events[event] == 1
    at = {row["event"]: row["at_ms"] for row in rows}
    assert at["released"] == pytest.approx(
        (victim.released_at_ns - victim.received_at_ns) / 1e6, abs=1e-3
    )
    (lost,) = {row["detail"] for row in rows if row["event"] == "preempted"}
    step = next(s.record for s in known.steps if victim.request in s.record.preempted)
    place = step.preempted.index(victim.request)
    beneficiary = known.name(step.preempted_beneficiaries[place])
    tokens = step.preempted_lost_tokens[place]
    assert lost == f"step {step.step}, cause kv, {tokens} tokens lost, for {beneficiary}"


def test_a_request_is_found_by_the_clients_own_id_and_the_latest_of_it(
    record: duckdb.DuckDBPyConnection,
) -> None:
    rows = ask(record, "request_timeline", request="client-20")
    assert {row["request_id"] for row in rows} == {"req-20"}
    assert ask(record, "request_timeline", request="client-unknown") == []
    latest = ask(record, "request_timeline", request="req-A")
    whole = truth("graphs").ends[-1]
    assert latest[-1]["event"] == "last write"
    assert whole.request_id == "req-A"


def test_a_request_in_flight_has_its_timeline_so_far(tmp_path: Path) -> None:
    """Two sequences of one HTTP request are under way; its id finds the later one."""
    simulated = Simulation(kv_blocks=32, max_num_batched_tokens=24)
    simulated.add("0", 40, 9, parent_id="http-1")
    simulated.step(2)
    simulated.add("1", 8, 9, parent_id="http-1")
    simulated.step(4)
    path = write_runs(tmp_path / "live.duckdb", {"live": recorded(simulated)})
    with duckdb.connect(path, read_only=True) as connection:
        rows = ask(connection, "request_timeline", request="http-1")
        moves = ask(connection, "row_moves", request="http-1")
    assert [row["event"] for row in rows] == ["arrived", "admitted"]
    assert {row["request_id"] for row in rows} == {"req-1"}
    assert len(moves) == 1


def test_row_moves(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    request = next(end for end in known.ends if end.request_id == "req-30").request
    places = [
        (s.record.step, s.record.requests.index(request))
        for s in known.steps
        if request in s.record.requests
    ]
    moves, before = [], (0, -1)
    for step, row in places:
        if row != before[1] or step != before[0] + 1:
            moves.append((step, row))
        before = (step, row)
    rows = ask(record, "row_moves", request="req-30")
    assert [(row["step"], row["batch_row"]) for row in rows] == moves
    assert len(moves) > 1
    assert rows[0]["row_before"] is None


def test_operating_point(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    times: defaultdict[int, list[int]] = defaultdict(list)
    for step in known.steps:
        if step.record.requests and not step.record.prefill_tokens:
            times[len(step.record.requests)].append(step.ns)
    kept = {size: float(np.median(ns)) for size, ns in times.items() if len(ns) >= 5}
    rate = {size: size * 1e9 / ns for size, ns in kept.items()}
    rows = ask(record, "operating_point")
    assert {row["batch_rows"]: row["tokens_per_s"] for row in rows} == pytest.approx(rate, abs=1e-2)
    knee = min(size for size, value in rate.items() if value >= 0.9 * max(rate.values()))
    assert [row["batch_rows"] for row in rows if row["is_knee"]] == [knee]
    half = min(size for size, value in rate.items() if value >= 0.5 * max(rate.values()))
    eager = ask(record, "operating_point", knee_share=0.5)
    assert [row["batch_rows"] for row in eager if row["is_knee"]] == [half]
    assert half < knee


def test_what_changed(record: duckdb.DuckDBPyConnection) -> None:
    """The later half of the run against the earlier one."""
    known = truth("healthy")
    middle = (known.started_us + known.newest_us) // 2
    length = middle - known.started_us
    later = ask(record, "what_changed", from_unix_us=middle, to_unix_us=middle + length)
    rows = {row["measure"]: row for row in later}
    for side, begin in (("before", known.started_us), ("after", middle)):
        seconds = length / 1e6
        steps = [s for s in known.steps if begin <= s.at_us < begin + length]
        ends = [e for e in known.ends if begin <= known.at_us(e.released_at_ns) < begin + length]
        firsts = [ms for e in ends if (ms := known.ttft_ms(e)) is not None]
        expected = {
            "requests ended": len(ends) / seconds,
            "time to first byte, median": float(np.median(firsts)),
            "prefill": sum(s.record.prefill_tokens for s in steps) / seconds,
            "decode": sum(s.record.decode_tokens for s in steps) / seconds,
            "step time, p99": quantile([s.ns for s in steps], 0.99) / 1e6,
            "queue": sum(s.record.waiting * s.ns for s in steps) / sum(s.ns for s in steps),
            "preemptions": sum(len(s.record.preempted) for s in steps) / seconds,
            "cancelled": sum(e.finish == "cancelled" for e in ends) / seconds,
        }
        found = {measure: rows[measure][side] for measure in expected}
        assert found == pytest.approx(expected, abs=1e-5)
    row = rows["decode"]
    assert row["change"] == pytest.approx(row["after"] / row["before"] - 1, abs=1e-4)


def test_longest_gaps(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("thrash")
    gaps = sorted(known.token_gaps(), key=lambda gap: gap[1].at_us - gap[2].at_us)[:5]
    rows = ask(record, "longest_gaps", run="thrash", gaps=5)
    assert [row["gap_ms"] for row in rows] == pytest.approx(
        [(b.record.end_at_ns - a.record.end_at_ns) / 1e6 for _, a, b in gaps], abs=1e-3
    )
    _, before, after = gaps[0]
    assert rows[0]["step"] == after.record.step
    assert rows[0]["steps_between"] == after.record.step - before.record.step - 1 > 0


def test_slowest_steps(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = ask(record, "slowest_steps", steps=3)
    slowest = sorted(known.steps, key=lambda step: step.ns, reverse=True)[:3]
    assert [row["step_ms"] for row in rows] == pytest.approx(
        [step.ns / 1e6 for step in slowest], abs=1e-3
    )
    fitted = ask(record, "slowest_steps", steps=1000)[-1]
    assert fitted["step_ms"] == pytest.approx(min(s.ns for s in known.steps) / 1e6, abs=1e-3)
    later = [row for row in ask(record, "slowest_steps", steps=1000) if row["expected_device_ms"]]
    assert len(later) == len(known.steps) - known.models[0].step
    for row in later:
        assert row["expected_device_ms"] == pytest.approx(row["device_ms"], rel=0.02)


def test_batch_shapes(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("graphs")
    rows = ask(record, "batch_shapes", run="graphs")
    kinds: Counter[str] = Counter()
    for step in known.steps:
        mixed = "mixed" if step.record.decode_tokens else "prefill"
        kinds["decode" if not step.record.prefill_tokens else mixed] += 1
    assert {row["shape"]: row["steps"] for row in rows} == kinds
    graphs = sum(step.record.graph for step in known.steps)
    assert sum(row["graph_steps"] for row in rows) == graphs > 0


def test_preemptions(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("thrash")
    events = []
    for step in known.steps:
        for place, request in enumerate(step.record.preempted):
            back = next(
                s.record.begin_at_ns
                for s in known.steps
                if s.record.step > step.record.step and request in s.record.admitted
            )
            away = (back - step.record.begin_at_ns) / 1e6
            lost = step.record.preempted_lost_tokens[place]
            events.append((step.record.step, known.name(request), lost, pytest.approx(away)))
    rows = ask(record, "preemptions", run="thrash")
    found = [(r["step"], r["request_id"], r["lost_tokens"], r["away_ms"]) for r in rows]
    assert found == events[::-1]


def test_tenants(record: duckdb.DuckDBPyConnection) -> None:
    known = truth("healthy")
    rows = {row["tenant"]: row for row in ask(record, "tenants")}
    assert set(rows) == {"loud", "quiet", "default"}
    assert rows["default"]["rejected"] == 1
    whole = sum(share.device_ns for share in known.shares.values())
    for tenant in ("loud", "quiet"):
        ends = [end for end in known.ends if end.tenant == tenant]
        assert rows[tenant]["requests"] == len(ends)
        assert rows[tenant]["output_tokens"] == sum(end.output_tokens for end in ends)
        assert rows[tenant]["cancelled"] == sum(end.finish == "cancelled" for end in ends)
        device = sum(known.shares[end.request].device_ns for end in ends)
        assert rows[tenant]["device_share"] == pytest.approx(device / whole, abs=1e-4)
        waits = [known.waited_ms(end) for end in ends]
        assert rows[tenant]["waited_mean_ms"] == pytest.approx(np.mean(waits), abs=1e-3)
