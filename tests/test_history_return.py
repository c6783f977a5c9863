"""A history that stopped comes back by itself, and says honestly what it does not know.

Owns the proofs of history.py's second tries (a full disk, a folder in use, a folder in the way) and
of lost_ends.py's rule. What the ring held meanwhile is not lost.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from telemetry import notes
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History
from tests import samples
from tests.histories import ROOT, WAIT_S, ask, kept, wait_for

FILLING = """
import resource, signal, sys, time
from telemetry import history as module
from telemetry.bus import Bus
from telemetry.config import TelemetryConfig
from telemetry.history import History
from tests import samples
from tests.histories import wait_for

module.RETRY_S = 0.2
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, hard))
bus = Bus(run_id="full", capacity=4096)
history = History(bus=bus, config=TelemetryConfig(history=sys.argv[1]))
history.start()
step = 0
while not history.status().degraded:
    for _ in range(20):
        step += 1
        text = "".join(chr(33 + (step * j) % 90) for j in range(20000))
        bus.publish(samples.fault(error=f"{step}", traceback=text))
    history.flush(5)
bus.publish(samples.run())
assert not history.flush(0.3), "there is no room yet"
print("degraded", history.status().lost, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
wait_for(lambda: history.status().kept)
assert history.flush(10)
print(bus.head, history.status().lost, history.status().records, flush=True)
assert history.close(10)
"""


def test_a_disk_that_has_room_again_is_written_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FILLING, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=True)
    degraded, last = done.stdout.splitlines()
    assert int(degraded.split()[1]) > 0, "while it is degraded it says what is at stake"
    head, lost, records = map(int, last.split())
    assert (lost, records) == (0, head), "the ring held all of it"
    assert "no history is kept" in done.stderr
    with kept(tmp_path, "after") as (_, history):
        ((count, distinct),) = ask(history, "SELECT count(*), count(DISTINCT seq) FROM fault")
        assert count == distinct == head - 1
        assert ask(history, "FROM telemetry_lost") == []


def test_a_second_server_takes_over_when_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("telemetry.history.LOCK_PATIENCE_S", 0.1)
    monkeypatch.setattr("telemetry.history.RETRY_S", 0.1)
    code = (
        "import sys; from pathlib import Path; import logging; from telemetry import database\n"
        "c = database.open_live(Path(sys.argv[1]), logging.getLogger())\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with kept(tmp_path, "second") as (bus, history):
            history.announce("http://127.0.0.1:1")
            bus.publish(samples.run())
            assert history.status().degraded
            first.communicate()
            wait_for(lambda: history.status().kept)
            assert history.flush(WAIT_S)
            assert ask(history, "SELECT run_id FROM run") == [["second"]]
            assert history.status().lost == 0
            server = notes.read_server_file(tmp_path)
            assert server is not None
            assert server.url == "http://127.0.0.1:1"
    assert caplog.text.count("no history is kept") == 1, "it is said once, not at each try"
    assert "kept again" in caplog.text


def test_what_the_ring_could_not_hold_is_on_record_after_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.history.RETRY_S", 0.1)
    in_the_way = tmp_path / "history"
    in_the_way.write_text("a file")
    bus = Bus(run_id="r", capacity=10)
    history = History(bus=bus, config=TelemetryConfig(history=str(in_the_way)))
    history.start()
    wait_for(lambda: history.status().degraded)
    for step in range(1, 31):
        bus.publish(samples.iteration(step))
    assert history.status().lost == 30
    in_the_way.unlink()
    wait_for(lambda: history.status().kept)
    assert history.flush(WAIT_S)
    assert ask(history, "FROM telemetry_lost") == [["r", 0, 1, 20, 20]]
    assert ask(history, "SELECT count(*), min(step) FROM iteration") == [[10, 21]]
    assert history.status().lost == 20
    assert history.close(WAIT_S)


def test_an_end_that_may_be_among_the_lost_records_is_not_invented(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1 ended or not in the gap: nobody knows. 2 was seen alive after it, 3 began after it."""
    bus = Bus(run_id="dead", capacity=6)
    for record in (samples.run(), samples.start(1), samples.start(2)):
        bus.publish(record)
    history = History(bus=bus, config=TelemetryConfig(history=str(tmp_path)))
    history.start()
    assert history.flush(WAIT_S)
    # The writer looks a few times a second: these overtake it and its ring.
    for step in range(1, 21):
        bus.publish(samples.iteration(step, [1, 2] if step < 5 else [2]))
    bus.publish(samples.start(3))
    assert history.flush(WAIT_S)
    ((lost_to,),) = ask(history, "SELECT max(to_seq) FROM telemetry_lost")
    assert ask(history, f"SELECT count(*) > 0 FROM iteration WHERE seq > {lost_to}") == [[True]]
    assert history.close(WAIT_S)
    for run_id in ("next", "later"):
        with kept(tmp_path, run_id) as (_, history):
            ends = "SELECT request, error FROM request_end ORDER BY request"
            assert ask(history, ends) == [[2, "server lost"], [3, "server lost"]]
    assert "1 ends were lost with other records" in caplog.text
