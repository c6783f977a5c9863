"""A range of the record becomes one file that stands alone, when asked and when something is wrong.

Owns the proofs of telemetry/spans.py, incidents.py, alarms.py and recorder.py, of POST
/telemetry/record and of `iterscope record`, on real histories and a real server.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest

from server.cli import main
from server.source import file_source
from telemetry import incidents, recorder
from telemetry.alarms import MARK, Alarms, Rules
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig, TelemetryConfigError, check
from telemetry.database import HistoryUnavailable
from telemetry.history import History
from telemetry.incidents import Note, incident_files, keep_within
from telemetry.recorder import Recorder, RecorderBusy, Watched
from telemetry.records import KINDS, Fault
from telemetry.spans import BadRange, TimeRange, instant_us, length_us, shown, spans_of, window_of
from tests import samples
from tests.histories import WAIT_S, kept, wait_for
from tests.recordings import asking, placed, published, write_file
from tests.simulation import Simulation

RULES = Rules(
    ttft_ms=100.0,
    tpot_ms=10.0,
    judge_all=True,
    burn_share=0.5,
    burn_requests=4,
    stall_s=15.0,
    pause_s=60.0,
)
NOTE = Note(reason="asked", detail="why not", made_unix_us=0)
SECOND = 10**9


def rows(path: Path, sql: str) -> list[list[Any]]:
    with file_source(path) as source:
        return source.ask(sql).rows


# ---- ranges


def test_lengths_and_instants_are_read_as_people_write_them() -> None:
    assert [length_us(text) for text in ("5m", "1.5h", "250ms", "2d")] == [
        300 * 10**6,
        5400 * 10**6,
        250_000,
        172_800 * 10**6,
    ]
    begin = instant_us("2026-11-30T14:03:00")
    assert begin == instant_us("2026-11-30T15:03:00+01:00") == instant_us("2026-11-30 14:03Z")
    assert shown(begin) == "2026-11-30 14:03:00.000Z"
    assert window_of("15m/now", now_unix_us=begin) == TimeRange(
        from_unix_us=begin - 900 * 10**6, to_unix_us=begin
    )


@pytest.mark.parametrize(
    "text", ["", "5", "m", "-5m", "0s", "5 minutes", "1e9d", "\uff19m", "99999999d"]
)
def test_what_is_no_length_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(BadRange, match="length of time"):
        length_us(text)


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "0001-01-01T00:00+14:00"])
def test_what_is_no_instant_is_refused_by_its_text(text: str) -> None:
    if text.startswith("0001"):
        assert instant_us(text) < 0, "before 1970, and before anything on record"
        return
    with pytest.raises(BadRange, match="instant"):
        instant_us(text)


def test_a_range_is_split_by_runs_and_clipped_to_what_there_is(tmp_path: Path) -> None:
    zero = 1_796_000_000_000_000
    runs = [
        placed([samples.run(started_unix_us=zero), samples.iteration(4000)], "one"),
        placed([samples.run(started_unix_us=zero + 10**7), samples.iteration(5000)], "two"),
    ]
    ask = asking(write_file(tmp_path / "two.duckdb", *runs))
    both = spans_of(ask, TimeRange())
    assert [(span.run_id, span.from_ns, span.to_ns) for span in both] == [
        ("one", 0, 4_001_000),
        ("two", 0, 5_001_000),
    ]
    (late,) = spans_of(ask, TimeRange(last_us=1000))
    assert (late.run_id, late.from_ns, late.to_ns) == ("two", 4_001_000, 5_001_000)
    (early,) = spans_of(ask, TimeRange(from_unix_us=zero + 1000, to_unix_us=zero + 2000))
    assert (early.run_id, early.from_ns, early.to_ns) == ("one", 10**6, 2 * 10**6)
    for asked in (TimeRange(from_unix_us=zero + 5 * 10**6, to_unix_us=zero + 6 * 10**6),):
        with pytest.raises(BadRange, match="newest record"):
            spans_of(ask, asked)
    with pytest.raises(BadRange, match="no run three"):
        spans_of(ask, TimeRange(run_id="three"))


# ---- alarms


def ended(request: int, at_s: float, *, late: bool, **changed: Any) -> list[Any]:
    arrived = int(at_s * SECOND) - 200 * 10**6
    first = arrived + (150 if late else 50) * 10**6
    values = {"arrived_at_ns": arrived, "first_token_at_ns": first, "decided_at_ns": first}
    end = samples.end(request, released_at_ns=int(at_s * SECOND), **(values | changed))
    return [samples.start(request, arrived_at_ns=arrived), end]


def told(alarms: Alarms, at_s: float, stalled_s: float = 0.0) -> list[str]:
    return [a.reason for a in alarms.raised(now_ns=int(at_s * SECOND), stalled_s=stalled_s)]


def test_objectives_missed_in_a_minute_raise_an_alarm_once_a_pause() -> None:
    alarms = Alarms(RULES)
    for request in range(3):
        for record in ended(request, 1.0, late=True):
            alarms.see(record)
    assert told(alarms, 1.0) == [], "three are too few to judge"
    for record in ended(3, 2.0, late=False):
        alarms.see(record)
    assert told(alarms, 2.0) == ["slo"]
    assert told(alarms, 30.0) == [], "told already"
    assert told(alarms, 63.0) == [], "a minute later nobody has ended"
    for request in range(10, 20):
        for record in ended(request, 70.0, late=request < 14):
            alarms.see(record)
    assert told(alarms, 70.0) == [], "four of ten are fewer than half"


@pytest.mark.parametrize(
    ("missed", "changed"),
    [
        (False, {}),
        (True, {"finish": "error"}),
        (True, {"first_token_at_ns": None}),
        (False, {"finish": "cancelled", "first_token_at_ns": None}),
        (False, {"output_tokens": 6, "decided_at_ns": 949 * 10**6}),
        (True, {"output_tokens": 6, "decided_at_ns": 951 * 10**6}),
    ],
)
def test_a_request_is_late_by_its_first_or_last_token(
    missed: bool, changed: dict[str, Any]
) -> None:
    alarms = Alarms(RULES)
    for request in range(4):
        for record in ended(request, 1.0, late=False, **changed):
            alarms.see(record)
    assert told(alarms, 1.0) == (["slo"] if missed else [])


def test_only_objectives_that_were_asked_for_count_unless_the_policy_plans_by_them() -> None:
    fields = {name: getattr(RULES, name) for name in Rules.__dataclass_fields__}
    alarms = Alarms(Rules(**(fields | {"judge_all": False})))
    for request in range(8):
        start, end = ended(request, 1.0, late=True)
        asked = '{"ttft_ms": 500}' if request < 4 else None
        alarms.see(samples.start(request, arrived_at_ns=start.arrived_at_ns, slo=asked))
        alarms.see(end)
    assert told(alarms, 1.0) == [], "four without an objective, four within theirs"


def test_a_stall_and_a_crash_raise_one_each_and_our_own_mark_none() -> None:
    alarms = Alarms(RULES)
    assert told(alarms, 1.0, stalled_s=14.0) == []
    assert told(alarms, 2.0, stalled_s=16.0) == ["stall"]
    alarms.see(samples.fault(where=MARK))
    assert told(alarms, 3.0, stalled_s=17.0) == []
    alarms.see(samples.fault())
    alarms.see(samples.fault())
    assert told(alarms, 4.0) == ["crash"]
    assert told(alarms, 5.0) == []


def test_alarms_forget_who_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.alarms.LIVE_MAX", 10)
    alarms = Alarms(RULES)
    for request in range(1000):
        alarms.see(samples.start(request))
    assert len(alarms._due) == 10


# ---- the recorder's thread


@contextmanager
def recording(
    folder: Path, stalled_s: list[float] | None = None, **settings: Any
) -> Iterator[tuple[Bus, History, Recorder]]:
    """Keep a history with a recorder beside it; faults are published by the recorder's thread."""
    with kept(folder, "one", **settings) as (bus, history):
        config = TelemetryConfig(history=str(folder), **settings)
        stalls = stalled_s if stalled_s is not None else [0.0]

        def publish(fault: Fault) -> None:
            bus.publish(fault)

        watched = Watched(now_ns=lambda: SECOND, stalled_s=lambda: stalls[0], publish=publish)
        made = Recorder(bus=bus, history=history, config=config, rules=RULES, watched=watched)
        made.start()
        bus.publish(samples.run(started_unix_us=time.time_ns() // 1000 - 1_000_000))
        try:
            yield bus, history, made
        finally:
            assert made.stop(WAIT_S)


def test_what_is_asked_for_is_recorded_with_the_newest_record_and_the_reason(
    tmp_path: Path,
) -> None:
    with recording(tmp_path, history_segment_s=0.1) as (bus, history, made):
        for record in published(Simulation().emitted)[1:] or [samples.iteration(1, [1])]:
            bus.publish(record)
        bus.publish(samples.start(1))
        assert history.flush(WAIT_S)
        wait_for(lambda: history.status().segments > 0)
        bus.publish(samples.end(1))
        path = made.record(TimeRange(), NOTE).result(WAIT_S)
    assert path.parent == tmp_path / "incidents"
    assert rows(path, "SELECT reason, detail FROM file.incident") == [["asked", "why not"]]
    assert rows(path, "SELECT request FROM request_end") == [[1]]
    assert rows(path, "SELECT level, run_id FROM file.segment") == [["record", "one"]]
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name]


def test_a_file_holds_whole_requests_and_what_its_readers_need(tmp_path: Path) -> None:
    simulation = Simulation(max_num_seqs=2)
    for name in "abcdef":
        simulation.add(name, 30, 20)
    simulation.drain()
    records = placed(published(simulation.emitted))
    source = write_file(tmp_path / "all.duckdb", records)
    steps = simulation.emitted.iterations
    since, until = (shown(1_796_000_000_000_000 + n) for n in (30_000, 60_000))
    target = tmp_path / "part.duckdb"
    flags = ("--from", since, "--to", until, "--file", str(source), "--detail", "it's slow")
    assert main(["record", "-o", str(target), *flags]) == 0
    inside = [s for s in steps if s.end_at_ns > 30 * 10**6 and s.begin_at_ns < 60 * 10**6]
    assert rows(target, "SELECT step FROM iteration ORDER BY step") == [[s.step] for s in inside]
    lived = sorted({request for step in inside for request in step.requests})
    found = [row[0] for row in rows(target, "SELECT request FROM request_end ORDER BY request")]
    assert set(lived) <= set(found)
    assert rows(target, "SELECT count(*) FROM run") == [[1]]
    assert rows(target, "SELECT detail FROM file.incident") == [["it's slow"]]
    tables = {row[0] for row in rows(target, "SELECT table_name FROM duckdb_tables()")}
    assert KINDS.keys() <= tables
    trace = tmp_path / "trace.json"
    assert main(["export", "--perfetto", "-o", str(trace), "--file", str(target)]) == 0
    assert main(["diff", str(target), str(target)]) == 0
    again = tmp_path / "again.duckdb"
    assert main(["record", "-o", str(again), "--file", str(target)]) == 0, "a record of a record"


def test_any_duckdb_of_the_stated_version_opens_it(tmp_path: Path) -> None:
    source = write_file(tmp_path / "all.duckdb", placed([samples.run(), samples.iteration(1)]))
    target = tmp_path / "part.duckdb"
    assert main(["record", "-o", str(target), "--file", str(source)]) == 0
    with duckdb.connect(target, read_only=True) as connection:
        tags = connection.execute("SELECT tags FROM duckdb_databases() WHERE NOT internal")
        ((told_tags,),) = tags.fetchall()
        assert "v1.2.0" in str(told_tags)
        assert connection.execute("SELECT reason FROM incident").fetchall() == [("asked",)]


def test_objectives_missed_record_what_led_to_it(tmp_path: Path, caplog: Any) -> None:
    with recording(tmp_path) as (bus, _, made):
        for request in range(6):
            for record in ended(request, 0.5, late=True):
                bus.publish(record)
        made._wake.set()
        wait_for(lambda: bool(incident_files(tmp_path)))
    (path,) = incident_files(tmp_path)
    assert path.name.endswith("-slo.duckdb")
    assert rows(path, "SELECT count(*) FROM request_end") == [[6]]
    faults = rows(path, 'SELECT "where", error FROM fault')
    assert faults == [[MARK, "slo: 6 of 6 requests of a minute missed theirs"]]
    assert "recorded in" in caplog.text


def test_a_dead_engine_is_recorded_once_however_often_it_dies(tmp_path: Path) -> None:
    with recording(tmp_path, [16.0]) as (bus, _, made):
        for _ in range(5):
            bus.publish(samples.fault())
        wait_for(lambda: len(incident_files(tmp_path)) == 2)
        bus.publish(samples.fault())
        made._wake.set()
        made.record(TimeRange(), NOTE).result(WAIT_S)
    names = [path.name.rpartition("-")[2] for path in incident_files(tmp_path)]
    assert sorted(names) == ["asked.duckdb", "crash.duckdb", "stall.duckdb"]


def test_incidents_can_be_switched_off(tmp_path: Path) -> None:
    with recording(tmp_path, [16.0], incidents=False) as (bus, _, made):
        bus.publish(samples.fault())
        made.record(TimeRange(), NOTE).result(WAIT_S)
    assert len(incident_files(tmp_path)) == 1


def test_what_cannot_be_recorded_says_why(tmp_path: Path) -> None:
    with recording(tmp_path) as (_, history, made):
        with pytest.raises(BadRange, match="no run nobody"):
            made.record(TimeRange(run_id="nobody"), NOTE).result(WAIT_S)
        history.close(WAIT_S)
        with pytest.raises(HistoryUnavailable):
            made.record(TimeRange(), NOTE).result(WAIT_S)
    assert incident_files(tmp_path) == []


def test_more_than_a_few_at_once_are_refused(tmp_path: Path) -> None:
    with recording(tmp_path) as (_, _, made):
        held = threading.Event()
        blocked = made.record(TimeRange(), NOTE)
        blocked.add_done_callback(lambda _: held.wait(WAIT_S))
        wait_for(blocked.done)
        waiting = [made.record(TimeRange(), NOTE) for _ in range(recorder.WAITING_MAX)]
        with pytest.raises(RecorderBusy):
            made.record(TimeRange(), NOTE)
        held.set()
        assert all(one.result(WAIT_S).exists() for one in waiting)


def test_the_folder_keeps_a_few_files_and_a_few_bytes_but_always_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "incidents"
    folder.mkdir()
    for number in range(5):
        (folder / f"2026-{number}-slo.duckdb").write_bytes(b"x" * 100)
    keep_within(tmp_path, files_max=4, bytes_max=1000)
    assert [path.name[5] for path in incident_files(tmp_path)] == ["1", "2", "3", "4"]
    keep_within(tmp_path, files_max=4, bytes_max=250)
    assert [path.name[5] for path in incident_files(tmp_path)] == ["3", "4"]
    keep_within(tmp_path, files_max=1, bytes_max=1)
    assert [path.name[5] for path in incident_files(tmp_path)] == ["4"]
    for name in ("5-asked", "6-crash", "7-asked", "8-asked"):
        (folder / f"2026-{name}.duckdb").write_bytes(b"x")
    keep_within(tmp_path, files_max=3, bytes_max=1000)
    assert [path.name[5] for path in incident_files(tmp_path)] == ["4", "6", "8"]


def test_a_recording_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with recording(tmp_path) as (_, _, made):
        monkeypatch.setattr(incidents, "_put_note", full)
        with pytest.raises(OSError, match="No space"):
            made.record(TimeRange(), NOTE).result(WAIT_S)
        assert list((tmp_path / "incidents").iterdir()) == []
        monkeypatch.undo()
        assert made.record(TimeRange(), NOTE).result(WAIT_S).exists(), "and the next one works"


def test_settings_out_of_range_name_their_flag() -> None:
    for name, value in (("slo_burn_share", 0), ("incidents_max", 0), ("incident_pause_s", 0)):
        with pytest.raises(TelemetryConfigError, match="--" + name.replace("_", "-")):
            check(TelemetryConfig(**{name: value}))


# ---- the command


def test_the_command_records_a_folder_that_no_server_holds(tmp_path: Path) -> None:
    history = tmp_path / "history"
    with kept(history, "one", history_segment_s=0.1) as (bus, kept_history):
        bus.publish(samples.run())
        bus.publish(samples.iteration(1, [1]))
        assert kept_history.flush(WAIT_S)
        wait_for(lambda: kept_history.status().segments > 0)
        bus.publish(samples.iteration(2, [1]))
    target = tmp_path / "all.duckdb"
    assert main(["record", "-o", str(target), "--history", str(history)]) == 0
    assert rows(target, "SELECT step FROM iteration ORDER BY step") == [[1], [2]]


def test_the_command_refuses_what_cannot_be(tmp_path: Path, capsys: Any) -> None:
    source = write_file(tmp_path / "all.duckdb", placed([samples.run(), samples.iteration(1)]))
    (tmp_path / "text").write_text("no database", encoding="utf-8")
    target = str(tmp_path / "part.duckdb")
    for code, expected, flags in (
        (2, "exists already", ("-o", str(source), "--file", str(source))),
        (2, "no length", ("-o", target, "--last", "soon", "--file", str(source))),
        (1, "no file", ("-o", target, "--file", str(tmp_path / "none"))),
        (1, "cannot be read", ("-o", target, "--file", str(tmp_path / "text"))),
        (1, "no history", ("-o", target, "--history", str(tmp_path / "none"))),
        (1, "does not answer", ("-o", target, "--url", "http://127.0.0.1:9")),
        (1, "", ("-o", str(tmp_path / "no" / "x.duckdb"), "--file", str(source))),
    ):
        assert main(["record", *flags]) == code, flags
        assert expected in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.duckdb", "text"]
