"""The history keeps what was published, closes what a dead server left, and survives kill -9.

Owns the proofs of telemetry/history.py and store.py with a real DuckDB file. Damage to files and
folders is test_history_damage.py's.
"""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from telemetry import notes
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig, TelemetryConfigError, check
from telemetry.history import COMMIT_S, History
from telemetry.query_lane import QueryUnavailable
from tests import samples
from tests.histories import WAIT_S, aside, ask, kept, killed_writer, read, wait_for

# ---- in health


def test_what_was_published_can_be_queried_and_stays(tmp_path: Path) -> None:
    with kept(tmp_path, "one") as (bus, history):
        for record in (samples.run(), samples.start(1), samples.iteration(1, [1]), samples.end(1)):
            bus.publish(record)
        assert history.flush(WAIT_S)
        assert ask(history, "SELECT request, finish FROM request_end") == [[1, "stop"]]
        assert history.status().records == 4
    assert not (tmp_path / "history.duckdb.wal").exists(), "a clean end leaves no log"
    assert read(tmp_path, "SELECT run_id, generation, seq FROM iteration") == [["one", 1, 3]]


def test_a_second_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for run_id in ("one", "two"):
        with kept(tmp_path, run_id) as (bus, history):
            bus.publish(samples.run())
            assert history.flush(WAIT_S)
    assert read(tmp_path, "SELECT run_id FROM run ORDER BY run_id") == [["one"], ["two"]]
    assert read(tmp_path, "SELECT * FROM telemetry_lost") == []
    assert aside(tmp_path) == []


def test_without_a_folder_nothing_is_kept_and_a_query_says_so() -> None:
    history = History(bus=Bus(run_id="r", capacity=10), config=TelemetryConfig(history=None))
    history.start()
    status = history.status()
    assert (status.kept, status.degraded, status.reason) == (False, False, "history is off")
    assert not history.flush(0.01) or history.status().records == 0
    with pytest.raises(QueryUnavailable, match="off"):
        history.queries.run("SELECT 1")
    assert history.close()


def test_the_folder_names_its_server_while_it_runs(tmp_path: Path) -> None:
    with kept(tmp_path, "one") as (_, history):
        history.announce("http://127.0.0.1:8123")
        wait_for(lambda: notes.read_server_file(tmp_path) is not None)
        server = notes.read_server_file(tmp_path)
        assert server == notes.ServerFile("http://127.0.0.1:8123", os.getpid(), "one")
    assert notes.read_server_file(tmp_path) is None


def test_records_that_the_ring_lost_are_on_record_as_lost(tmp_path: Path) -> None:
    bus = Bus(run_id="slow", capacity=10)
    for step in range(1, 31):
        bus.publish(samples.iteration(step))
    history = History(bus=bus, config=TelemetryConfig(history=str(tmp_path)))
    history.start()
    assert history.flush(WAIT_S)
    assert ask(history, "FROM telemetry_lost") == [["slow", 0, 1, 20, 20]]
    assert ask(history, "SELECT count(*), min(step), max(step) FROM iteration") == [[10, 21, 30]]
    assert history.status().lost == 20
    assert history.close(WAIT_S)


def test_a_record_that_no_table_takes_is_on_record_as_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kept(tmp_path, "odd") as (bus, history):
        bus.publish(samples.run())
        assert history.flush(WAIT_S)
        bus.publish(samples.start(2**70))
        assert history.flush(WAIT_S)
        bus.publish(samples.start(1))
        assert history.flush(WAIT_S)
        assert ask(history, "SELECT request FROM request_start") == [[1]]
        assert ask(history, "FROM telemetry_lost") == [["odd", 1, 2, 2, 1]]
        assert history.status().kept
    assert "could not store" in caplog.text


def test_what_came_beside_a_record_at_fault_is_not_stored_later(tmp_path: Path) -> None:
    with kept(tmp_path, "odd") as (bus, history):
        assert history.flush(WAIT_S)
        for record in (samples.run(), samples.start(1), samples.start(2**70)):
            bus.publish(record)
        assert history.flush(WAIT_S)
        for record in (samples.run(), samples.start(2)):
            bus.publish(record)
        assert history.flush(WAIT_S)
        lost = sum(row[-1] for row in ask(history, "FROM telemetry_lost"))
        stored = ask(history, "SELECT seq FROM run UNION ALL SELECT seq FROM request_start")
        assert len(stored) == history.status().records == bus.head - lost
        assert [3] not in stored
        assert [4] in stored
        assert [5] in stored


# ---- when


def test_commits_are_few_while_records_come_one_by_one(tmp_path: Path) -> None:
    with kept(tmp_path, "steady") as (bus, history):
        bus.publish(samples.run())
        assert history.flush(WAIT_S)
        began_s, seen = time.monotonic(), {history.status().records}
        for step in range(1, 61):
            bus.publish(samples.iteration(step, [1]))
            time.sleep(0.02)
            seen.add(history.status().records)
        commits, seconds = len(seen) - 1, time.monotonic() - began_s
        assert 1 <= commits <= 1 + seconds / (COMMIT_S / 2)
        wait_for(lambda: history.behind == 0)  # nobody asked, and all is stored


def test_much_at_once_is_not_left_waiting_in_the_ring(tmp_path: Path) -> None:
    bus, took_s = Bus(run_id="bursts", capacity=64), []
    history = History(bus=bus, config=TelemetryConfig(history=str(tmp_path)))
    history.start()
    for _ in range(4):
        bus.publish(samples.run())
        assert history.flush(WAIT_S)
        began_s = time.monotonic()
        for step in range(1, 18):
            bus.publish(samples.iteration(step, [1]))
        wait_for(lambda: history.behind == 0)
        took_s.append(time.monotonic() - began_s)
    assert min(took_s) < 0.75 * COMMIT_S, "it was stored before it was old"
    assert history.status().lost == 0
    assert history.close(WAIT_S)


def test_the_note_of_a_longer_run_leaves_nothing_behind(tmp_path: Path) -> None:
    for run_id in ("a run with quite a long name", "b"):
        with kept(tmp_path, run_id) as (bus, history):
            bus.publish(samples.run())
            assert history.flush(WAIT_S)
        assert notes.read_progress(tmp_path) == notes.Progress(run_id, 1)


# ---- requests that a dead server left open


def test_starts_without_an_end_end_as_server_lost_at_the_next_start(tmp_path: Path) -> None:
    with kept(tmp_path, "dead") as (bus, history):
        bus.publish(samples.run())
        for request in (1, 2, 3):
            bus.publish(samples.start(request, prompt_tokens=8))
        bus.publish(samples.iteration(7, [1, 2], start_positions=[0, 0], token_counts=[8, 5]))
        bus.publish(samples.iteration(8, [1, 2], start_positions=[8, 5], token_counts=[1, 3]))
        bus.publish(samples.delivery(2, received_at_ns=55))
        bus.publish(samples.end(3))
        assert history.flush(WAIT_S)
    with kept(tmp_path, "next") as (bus, history):
        bus.publish(samples.run())
        bus.publish(samples.start(1))  # the same integer in another run
        assert history.flush(WAIT_S)
        ends = ask(
            history,
            "SELECT request, seq, finish, error, received_at_ns, iterations, output_tokens,"
            " released_at_ns FROM request_end WHERE run_id = 'dead' AND error IS NOT NULL"
            " ORDER BY request",
        )
        last_at_ns = 2000 + 900_000_000
        assert ends == [
            [1, 9, "error", "server lost", 1000, 2, 2, last_at_ns],
            [2, 10, "error", "server lost", 55, 2, 1, last_at_ns],
        ]
    counts = "SELECT (SELECT count(*) FROM request_{}), (SELECT count(*) FROM request_{})"
    with kept(tmp_path, "last"):
        pass
    assert read(tmp_path, counts.format("start", "end")) == [[4, 4]], "each start has one end"


# ---- kill -9


def test_kill_9_loses_nothing_that_was_flushed_and_tears_nothing(tmp_path: Path) -> None:
    flushed = {run: killed_writer(tmp_path, run, batches=n) for n, run in enumerate("abc", 2)}
    with kept(tmp_path, "after") as (bus, history):
        bus.publish(samples.run())
        assert history.flush(WAIT_S)
        for run_id, seq in flushed.items():
            records = (
                "(SELECT seq FROM run WHERE run_id = $1 UNION ALL SELECT seq FROM iteration"
                " WHERE run_id = $1 UNION ALL SELECT seq FROM request_start WHERE run_id = $1)"
            )
            result = history.queries.run(
                f"SELECT count(*), count(DISTINCT seq), max(seq) FROM {records}", [run_id]
            )
            ((count, distinct, last),) = result.rows
            assert count == distinct == last >= seq, "no gap, nothing doubled, nothing missing"
        assert ask(history, "SELECT count(*) FROM iteration WHERE len(requests) <> 3") == [[0]]
        assert ask(history, "FROM telemetry_lost") == []
    starts, ends = read(
        tmp_path, "SELECT (SELECT count(*) FROM request_start), count(*) FROM request_end"
    )[0]
    assert starts == ends
    assert aside(tmp_path) == []


def test_a_history_at_its_limit_stops_and_can_still_be_queried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.history.RETRY_S", 3600.0)
    with kept(tmp_path, "big", history_bytes_max=2**20) as (bus, history):
        bus.publish(samples.run(config="x" * 2**21))
        wait_for(lambda: history.status().degraded)
        bus.publish(samples.start(1))
        assert not history.flush(0.1)
        assert ask(history, "SELECT count(*) FROM run") == [[1]]
        assert history.status().lost == 1
        assert "limit" in (history.status().reason or "")
    assert "no history is kept" in caplog.text


def test_settings_out_of_range_are_refused() -> None:
    check(TelemetryConfig())
    wrong: tuple[dict[str, Any], ...] = (
        {"ring_records": 0},
        {"sql_deadline_s": float("nan")},
        {"history_days": float("inf")},
        {"history_segment_s": 0},
    )
    for setting in wrong:
        with pytest.raises(TelemetryConfigError, match=r"^--"):
            check(TelemetryConfig(**setting))
