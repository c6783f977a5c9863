"""An engine that hangs or crashes: noticed, on record with its stacks, replaced; never too soon.

GIVEN streams under way, WHEN the engine is stopped for less than the limit, THEN nothing is lost;
WHEN for longer, or it crashes, THEN each client gets its error, /health says 503 meanwhile, the
history holds what it was doing, and the next engine serves. Real servers, real signals.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from engine.config import EngineConfig, resolve
from engine.device import device_facts
from engine.runner import ModelRunner
from engine.spec import read_spec
from engine.vitals import Pulse, read_stacks
from server.watchdog import PERIOD_S, Watchdog
from tests import tiny
from tests.api import ids, still_answers
from tests.servers import Server, answers, engine_pid, serving, wait

BODY = {"prompt": ids(10), "max_tokens": 500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("watchdog") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("watched")
    flags = ("--engine-stall-s", "1", "--engine-hang-s", "4", "--history", str(folder / "history"))
    with serving(folder, model, *flags) as running:
        yield running


def last_fault(server: Server) -> tuple[str, str]:
    """Return what the last fault says and what it was doing."""
    where = "\"where\" = 'engine process'"
    body = {"sql": f"SELECT error, traceback FROM fault WHERE {where} ORDER BY fault_at_ns"}
    error, state = server.post("/telemetry/sql", body).json()["rows"][-1]
    return error, state


def health(server: Server) -> tuple[int, str]:
    answer = server.get("/health")
    return answer.status_code, answer.json()["status"]


def stream(server: Server) -> str:
    """Return what a client of a stream sees last: its finish, or the code of its error."""
    text = httpx.post(f"{server.url}/v1/completions", json=BODY | {"stream": True}, timeout=60).text
    last = json.loads(text.removesuffix("data: [DONE]\n\n").rpartition("data: ")[2])
    return str(last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"])


def under_way(server: Server) -> bool:
    return server.metric("vllm:num_requests_running") == 3


def test_a_pause_below_the_limit_loses_nothing(server: Server) -> None:
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(stream, server) for _ in range(3)]
        server.wait(lambda: under_way(server))
        os.kill(engine_pid(server), signal.SIGSTOP)
        server.wait(lambda: health(server) == (503, "stalled"))
        assert server.get("/ready").status_code == 503
        os.kill(engine_pid(server), signal.SIGCONT)
        assert [one.result() for one in streams] == ["length"] * 3
        server.wait(lambda: health(server) == (200, "ok"))
        # The flight recorder may have noted the stall; nothing went wrong with the engine.
        body = {"sql": "SELECT error FROM fault WHERE \"where\" <> 'flight recorder'"}
        assert server.post("/telemetry/sql", body).json()["rows"] == []
        still_answers(server)


def test_a_hang_ends_the_engine_and_nothing_else(server: Server) -> None:
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(stream, server) for _ in range(3)]
        server.wait(lambda: under_way(server))
        os.kill(engine_pid(server), signal.SIGSTOP)
        server.wait(lambda: health(server)[0] == 503)
        assert [one.result() for one in streams] == ["engine_unavailable"] * 3
        server.wait(lambda: answers(server, "/ready"), 60)
        still_answers(server)
        error, state = last_fault(server)
        assert error.startswith("the engine hung: no progress for")
        assert error.endswith("it is stopped")
        assert "3 running" in state
        assert state.count("live: request") == 3
        server.wait_idle()


def test_a_crash_leaves_its_stacks_on_record(server: Server) -> None:
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(stream, server) for _ in range(3)]
        server.wait(lambda: under_way(server))
        os.kill(engine_pid(server), signal.SIGSEGV)
        assert [one.result() for one in streams] == ["engine_unavailable"] * 3
        server.wait(lambda: answers(server, "/ready"), 60)
        still_answers(server)
        error, state = last_fault(server)
        assert error == "the engine died (killed by signal 11)"
        assert "Fatal Python error: Segmentation fault" in state
        assert "engine/loop.py" in state


def test_a_server_that_was_stopped_itself_blames_nobody(model: Path, tmp_path: Path) -> None:
    with (
        serving(tmp_path, model, "--engine-hang-s", "0.6") as server,
        ThreadPoolExecutor(3) as pool,
    ):
        streams = [pool.submit(stream, server) for _ in range(3)]
        server.wait(lambda: under_way(server))
        both = server.process.pid, engine_pid(server)
        for pid in both:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)  # longer than the limit, which is what this is about
        for pid in both:
            os.kill(pid, signal.SIGCONT)
        assert [one.result() for one in streams] == ["length"] * 3
        assert server.metric("iterscope_faults_total") == 0
        # An engine that cannot hear the end is not waited for longer than it may take.
        os.kill(engine_pid(server), signal.SIGSTOP)
        assert server.stop() == 0
        assert "Traceback" not in server.log


def test_engines_that_die_before_they_are_ready_end_the_start(model: Path, tmp_path: Path) -> None:
    """A model that the system kills for its memory: a supervisor must not wait for ever."""
    with serving(tmp_path, model, ready=False) as server:
        deadline = time.monotonic() + 60
        while server.process.poll() is None:
            assert time.monotonic() < deadline, server.log
            with suppress(AssertionError, ProcessLookupError, FileNotFoundError):
                os.kill(engine_pid(server), signal.SIGKILL)
            time.sleep(0.05)
        assert server.process.returncode == 2
        last = server.log.splitlines()[-1]
        assert last == "iterscope: 3 engines in a row died (killed by signal 9), none was ready"


# ---- the parts


class FakeEngine:
    """An engine whose pulse is set by hand."""

    def __init__(self) -> None:
        self.state = "ready"
        self.pulse: tuple[int, int] | None = (1, 0)

    async def end_hung(self, pulse: tuple[int, int], stalled_s: float) -> None:
        raise AssertionError("nobody asked")


def test_only_time_that_was_watched_counts() -> None:
    engine = FakeEngine()
    dog = Watchdog(engine, hang_s=10)
    now = time.monotonic()
    dog.look(now)
    dog.look(now + PERIOD_S)
    assert dog.stalled_s == pytest.approx(PERIOD_S)
    dog.look(now + 3600)
    assert dog.stalled_s == pytest.approx(3 * PERIOD_S), "an hour's freeze is no hour's hang"
    engine.pulse = (1, 1)
    dog.look(now + 3600 + PERIOD_S)
    assert dog.stalled_s == 0
    dog.look(now + 3600 + 2 * PERIOD_S)
    assert dog.stalled_s == pytest.approx(PERIOD_S)
    engine.pulse = None
    dog.look(now + 3600 + 3 * PERIOD_S)
    assert dog.stalled_s == 0, "idle is not stalled"


HANGS = """
import sys, threading
from pathlib import Path
from engine.vitals import Pulse, stacks_on_demand
folder = Path(sys.argv[1])
with stacks_on_demand(folder):
    Pulse(folder).beat()
    threading.Lock().acquire() and threading.Event().wait()
"""


def test_stacks_come_from_a_process_that_answers_nothing(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path)
    assert read_stacks(tmp_path) == ""
    stuck = subprocess.Popen([sys.executable, "-c", HANGS, str(tmp_path)])
    try:
        wait(lambda: pulse.read() == 1, 20)
        stuck.send_signal(signal.SIGUSR1)
        wait(lambda: 'File "<string>", line 8' in read_stacks(tmp_path), 20)
    finally:
        stuck.kill()
        stuck.wait()


def test_each_layer_of_a_step_and_of_a_load_beats(model: Path) -> None:
    """A step or a load that takes longer than the limit and goes on is no hang."""
    beats: list[int] = []
    spec = read_spec(str(model))
    config = EngineConfig(model=str(model), kv_blocks=10, engine_threads=1)
    resolved = resolve(config, spec, device_facts(config, spec))
    runner = ModelRunner.build(resolved, spec, lambda *_: None, lambda: beats.append(1))
    before = len(beats)
    runner.warm_up(lambda *_: None)
    steps = 1 + len(resolved.buckets) + 1
    assert len(beats) - before == steps * spec.layers
