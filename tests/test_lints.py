"""Lints and laws on recorded runs: each finds the run that has its fault and nothing else.

Owns the proof that the healthy run is found healthy, that each fault is found once and by its own
lint alone, that thresholds are parameters, and that a hole which the record admits is no breach.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from telemetry import database
from telemetry.named import WINDOW, catalogue, of_kind
from telemetry.records import Iteration, Record, RequestEnd, RequestStart, Run
from tests import samples, sick_runs
from tests.recordings import placed, write_file
from tests.sick_runs import (
    DAY_US,
    FIRST_STARTED_UNIX_US,
    SICK,
    healthy,
    plain_run,
    write_runs,
)
from tests.simulation import Simulation

CHECKS = [query.name for query in of_kind("lint", "law")]
Found = list[dict[str, Any]]
EVERYTHING: dict[str, object] = {"from_unix_us": 0}


STORED = ("slow_host", "engine_deaths", "preemption_thrash", "no_step_missing")
"""Runs that go through the real bus, history and store; all others into the same tables."""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    """Every run in one file, a day apart: healthy, then each with its fault."""
    runs = {"healthy": healthy()} | {name: make() for name, make in SICK.items()}
    path = write_runs(tmp_path_factory.mktemp("record") / "runs.duckdb", runs)
    with duckdb.connect(path, read_only=True) as connection:
        yield connection


def found(connection: duckdb.DuckDBPyConnection, name: str, **given: object) -> Found:
    bound = catalogue()[name].bind(EVERYTHING | given)
    answer = connection.execute(bound.sql, bound.parameters)
    names = [column[0] for column in answer.description]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


def on_file(path: Path, records: list[Record], name: str, **given: object) -> Found:
    write_file(path / "one.duckdb", placed(records))
    with duckdb.connect(path / "one.duckdb", read_only=True) as connection:
        return found(connection, name, **given)


def test_every_lint_and_law_has_its_planted_fault() -> None:
    assert set(SICK) == set(CHECKS)
    assert len(of_kind("law")) == 13


@pytest.mark.parametrize("name", CHECKS)
def test_a_fault_is_found_by_its_own_lint_and_once(
    record: duckdb.DuckDBPyConnection, name: str
) -> None:
    rows = found(record, name)
    assert [row["run_id"] for row in rows] == [name]


def test_the_real_history_tells_the_same(tmp_path: Path) -> None:
    sick_runs.write(tmp_path, {"healthy": healthy()} | {name: SICK[name]() for name in STORED})
    connection = database.open_read_only(tmp_path)
    try:
        wrong = {name: rows for name in CHECKS if (rows := found(connection, name))}
    finally:
        connection.close()
    assert {name: [row["run_id"] for row in rows] for name, rows in wrong.items()} == {
        name: [name] for name in STORED
    }


@pytest.mark.parametrize("name", [query.name for query in of_kind("post_mortem")])
def test_every_post_mortem_answers_over_all_that_is_sick(
    record: duckdb.DuckDBPyConnection, name: str
) -> None:
    query = catalogue()[name]
    given = {"request": "req-A"} if query.name in {"request_timeline", "row_moves"} else {}
    bound = query.bind((EVERYTHING if query.windowed else {}) | given)
    assert record.execute(bound.sql, bound.parameters).fetchall()


def test_a_window_leaves_out_what_lies_outside(record: duckdb.DuckDBPyConnection) -> None:
    """Runs lie a day apart: a window of one run finds that run's fault and no other."""
    place = {name: day for day, name in enumerate(SICK, 1)}
    for name in ("slow_host", "survived_faults", "engine_deaths", "parts_sum_to_tile"):
        begin = FIRST_STARTED_UNIX_US + place[name] * DAY_US
        window = {"from_unix_us": begin, "to_unix_us": begin + DAY_US}
        assert found(record, name, **window)
        elsewhere = {"from_unix_us": begin - DAY_US, "to_unix_us": begin}
        assert found(record, name, **elsewhere) == []
        assert found(record, name, run_id=name)
        assert found(record, name, run_id="healthy") == []


@pytest.mark.parametrize(
    ("name", "threshold"),
    [
        ("preemption_thrash", {"lost_share_max": 0.4}),
        ("preemption_thrash", {"preemptions_min": 4}),
        ("starvation", {"waited_s_max": 62}),
        ("starvation", {"overtaken_min": 5}),
        ("idle_kv_with_queue", {"free_share_min": 0.99}),
        ("idle_kv_with_queue", {"time_share_max": 0.9}),
        ("idle_kv_with_queue", {"queue_s_min": 3}),
        ("padding_waste", {"waste_share_max": 0.7}),
        ("padding_waste", {"steps_min": 41}),
        ("graph_misses", {"miss_share_max": 0.5}),
        ("graph_misses", {"steps_min": 40}),
        ("slow_host", {"host_share_max": 0.4}),
        ("slow_host", {"steps_min": 41}),
        ("telemetry_gaps", {"lost_max": 3}),
        ("engine_deaths", {"deaths_max": 1}),
        ("survived_faults", {"faults_max": 1}),
        ("step_model_error", {"error_max": 0.7}),
        ("step_model_error", {"steps_min": 401}),
        ("unexplained_time", {"share_max": 0.3}),
        ("unexplained_time", {"ms_min": 61}),
    ],
)
def test_thresholds_are_parameters(
    record: duckdb.DuckDBPyConnection, name: str, threshold: dict[str, float]
) -> None:
    assert found(record, name)
    assert found(record, name, **threshold) == []


def test_every_threshold_of_a_lint_is_tried() -> None:
    mark = test_thresholds_are_parameters.pytestmark[0]
    tried = {(name, key) for name, given in mark.args[1] for key in given}
    own = {
        (query.name, parameter.name)
        for query in of_kind("lint")
        for parameter in query.parameters
        if parameter not in WINDOW
    }
    assert tried == own


def test_a_death_is_told_before_there_is_another_engine(tmp_path: Path) -> None:
    died = samples.fault(fault_at_ns=300_000_000)
    (row,) = on_file(tmp_path, [*plain_run(), died], "engine_deaths")
    assert (row["generation"], row["restarted"], row["without_steps_s"]) == (1, False, None)
    assert row["error"] == died.error


def test_a_second_engine_tells_of_a_death_that_is_not_on_record(tmp_path: Path) -> None:
    (row,) = on_file(tmp_path, [*plain_run(), samples.run()], "engine_deaths")
    assert (row["generation"], row["error"], row["restarted"]) == (1, "not on record", True)


# ---- what a live server or an honest hole must not be blamed for


def test_a_request_lost_with_its_server_did_not_wait_while_it_ran(tmp_path: Path) -> None:
    """The next server writes such an end: it knows the first step, not the admission."""
    far_ns = 100 * 10**9
    lost = {"admitted_at_ns": None, "prefill_finished_at_ns": None, "first_token_at_ns": None}
    ends = {"decided_at_ns": far_ns, "freed_at_ns": None, "released_at_ns": far_ns}
    records = [
        samples.run(),
        *(samples.start(request) for request in (1, 2)),
        samples.end(2),
        samples.end(1, finish="error", **lost, **ends),
    ]
    assert on_file(tmp_path, records, "starvation") == []
    with duckdb.connect(tmp_path / "one.duckdb", read_only=True) as connection:
        waited = {row["request_id"]: row["waited_ms"] for row in found(connection, "longest_waits")}
    assert waited == {"req-1": 0.0, "req-2": 0.0}


def test_the_recorders_word_of_a_crash_is_no_second_fault(tmp_path: Path) -> None:
    told = [
        samples.fault(fault_at_ns=6, where="flight recorder", error=error)
        for error in ("crash: engine process: the engine died", "stall: no progress for 20 s")
    ]
    records = [*plain_run(), samples.fault(fault_at_ns=5), *told]
    (row,) = on_file(tmp_path, records, "survived_faults")
    assert row["error"] == told[1].error


def test_a_request_that_still_runs_is_no_breach_until_it_is_far_too_old(tmp_path: Path) -> None:
    records = [*plain_run(), samples.start(9, arrived_at_ns=5_000_000)]
    assert on_file(tmp_path, records, "one_end") == []
    (tmp_path / "one.duckdb").unlink()
    (row,) = on_file(tmp_path, records, "one_end", open_s_max=0.1)
    assert (row["request"], row["ends"]) == (9, 0)


def test_a_request_whose_engine_is_gone_needs_its_end(tmp_path: Path) -> None:
    records = [*plain_run(), samples.start(9, arrived_at_ns=5_000_000), samples.run()]
    (row,) = on_file(tmp_path, records, "one_end")
    assert (row["request"], row["ends"]) == (9, 0)


def test_a_request_of_an_earlier_server_needs_its_end(tmp_path: Path) -> None:
    earlier = [samples.run(started_unix_us=5), samples.start(9, arrived_at_ns=5_000_000)]
    write_file(tmp_path / "two.duckdb", placed(earlier, "old"), placed(plain_run(), "new"))
    with duckdb.connect(tmp_path / "two.duckdb", read_only=True) as connection:
        (row,) = found(connection, "one_end")
    assert (row["run_id"], row["request"]) == ("old", 9)


def test_a_live_request_that_others_overtake_starves_before_it_ends(tmp_path: Path) -> None:
    whole = sick_runs.starvation()
    z = next(r.request for r in whole if isinstance(r, RequestStart) and r.request_id == "req-Z")
    at = next(
        i
        for i, record in enumerate(whole)
        if isinstance(record, Iteration) and z in record.admitted
    )
    (row,) = on_file(tmp_path, whole[:at], "starvation")
    assert (row["request_id"], row["never_admitted"], row["overtaken_by"]) == ("req-Z", True, 4)


def test_a_request_that_failed_needs_no_explanation_to_its_end(tmp_path: Path) -> None:
    whole = sick_runs.unexplained_time()
    failed = [replace(r, finish="error") if isinstance(r, RequestEnd) else r for r in whole]
    assert on_file(tmp_path, failed, "unexplained_time") == []


def test_who_ends_while_preempted_has_nothing_computed(tmp_path: Path) -> None:
    """At depth 2 the token in flight may be a sequence's last when its blocks are gone already."""
    simulated = Simulation(depth=2, kv_blocks=8)
    for name, tokens in (("A", 60), ("B", 45), ("C", 3), ("D", 60)):
        simulated.add(name, 20, tokens)
    simulated.drain()
    whole = sick_runs.recorded(simulated)
    steps = [record for record in whole if isinstance(record, Iteration)]
    came = sum(2 in step.admitted for step in steps)
    assert came == sum(2 in step.preempted for step in steps) > 0
    assert on_file(tmp_path, whole, "tokens_scheduled") == []


def test_what_the_engine_dropped_excuses_the_requests_of_that_time(tmp_path: Path) -> None:
    """The iterations are gone, and the record says so: the sum of tokens cannot hold."""
    whole = sick_runs.telemetry_gaps()
    assert on_file(tmp_path, whole, "tokens_scheduled") == []
    (tmp_path / "one.duckdb").unlink()
    hushed = [replace(r, lost_before=0) if isinstance(r, Iteration) else r for r in whole]
    assert len(on_file(tmp_path, hushed, "tokens_scheduled")) == 1


def test_what_the_history_lost_is_a_gap_and_excuses_too(tmp_path: Path) -> None:
    whole = plain_run()
    lost = [i for i, r in enumerate(whole, 1) if isinstance(r, Iteration) and r.step in {4, 5}]
    rows = [entry for entry in placed(whole) if entry.seq not in lost]
    path = write_file(tmp_path / "holes.duckdb", rows)
    with duckdb.connect(path) as connection:
        assert {row["step"] for row in found(connection, "no_step_missing")} == {6}
        assert found(connection, "tokens_scheduled")
        assert found(connection, "telemetry_gaps") == []
        for seq in lost:
            connection.execute(
                "INSERT INTO telemetry_lost VALUES ('run-1', 1, ?, ?, 1)", [seq, seq]
            )
        for law in ("no_step_missing", "tokens_scheduled", "one_end", "end_has_start"):
            assert found(connection, law) == []
        (gap,) = found(connection, "telemetry_gaps")
    assert (gap["what"], gap["lost"]) == ("not in this history", 2)


def test_what_retention_took_is_no_breach(tmp_path: Path) -> None:
    """Only the later half is left: starts, steps and their seqs before it are gone."""
    whole = placed(healthy())
    half = [entry for entry in whole if isinstance(entry.record, Run)] + whole[len(whole) // 2 :]
    ends = {e.record.request for e in half if isinstance(e.record, RequestEnd)}
    starts = {e.record.request for e in half if isinstance(e.record, RequestStart)}
    assert ends - starts, "some ends lost their start"
    path = write_file(tmp_path / "half.duckdb", half)
    with duckdb.connect(path, read_only=True) as connection:
        wrong = {name: rows for name in CHECKS if (rows := found(connection, name))}
    assert wrong == {}


def test_an_empty_record_has_nothing_wrong(tmp_path: Path) -> None:
    path = write_file(tmp_path / "empty.duckdb")
    with duckdb.connect(path, read_only=True) as connection:
        assert {name: rows for name in CHECKS if (rows := found(connection, name))} == {}
