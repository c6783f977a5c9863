"""What a query may cost: its own process, and nothing else.

Owns the proofs of the children that run SQL and of those who wait for them: bombs, deadlines,
cancels, kills, the end of the server, and that a child always holds every committed row once. The
history, the children and the kernel's limits are real.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from telemetry.queries import PLACES_MAX, Queries
from telemetry.query_lane import INBOX_BYTES_MAX, QueriesBusy
from telemetry.sandbox import DeadlinePassed, QueryBroken
from telemetry.wire import Answered
from tests import samples
from tests.children import ENDLESS, answering, at_work, ended, gone, pids, warm
from tests.histories import ROOT, WAIT_S, kept, wait_for


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queries]:
    with answering(tmp_path_factory.mktemp("history"), deadline_s=2.0) as queries:
        yield queries


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queries]:
    """Queries with a deadline that no test waits for."""
    with answering(tmp_path_factory.mktemp("history"), deadline_s=60.0) as queries:
        yield queries


def test_a_deadline_is_said_and_kept(queries: Queries) -> None:
    warm(queries)
    started = time.monotonic()
    with pytest.raises(DeadlinePassed, match="deadline of 2 s"):
        queries.run(ENDLESS)
    assert time.monotonic() - started < 10


def test_small_queries_go_on_beside_a_bomb(queries: Queries) -> None:
    warm(queries)
    with queries.submit(ENDLESS) as bomb:
        while not bomb.future.done():
            assert queries.run("SELECT count(*) FROM slice").rows == [[100]]
        with pytest.raises(DeadlinePassed):
            bomb.future.result()


# ---- children that die, clients that leave


def test_a_child_killed_in_mid_query_is_an_error_and_another_answers(patient: Queries) -> None:
    children = warm(patient)
    with patient.submit(ENDLESS) as asked:
        os.kill(at_work(children, 1)[0], signal.SIGKILL)
        with pytest.raises(QueryBroken, match="SIGKILL"):
            asked.future.result(WAIT_S)
    assert patient.run("SELECT count(*) FROM run").rows == [[1]]


def test_an_idle_child_that_was_killed_costs_nobody_a_query(queries: Queries) -> None:
    children = warm(queries)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(ended(pid) for pid in children))
    assert queries.run("SELECT count(*) FROM slice").rows == [[100]]


def test_the_query_of_a_client_that_left_ends_at_once(patient: Queries) -> None:
    children = warm(patient)
    with patient.submit(ENDLESS), patient.submit(ENDLESS):
        at_work(children, 2)
        started = time.monotonic()
    wait_for(lambda: all(gone(pid) for pid in children))
    assert time.monotonic() - started < 10
    assert patient.run("SELECT count(*) FROM run").rows == [[1]]
    assert time.monotonic() - started < 20


def test_a_query_that_waits_and_is_left_never_runs(queries: Queries) -> None:
    warm(queries)
    called: list[Future[Answered]] = []
    with queries.submit(ENDLESS) as one, queries.submit(ENDLESS) as other:
        with queries.submit("SELECT 1", before=lambda: called.append(one.future)) as left:
            pass
        assert left.future.cancelled()
        for asked in (one, other):
            with pytest.raises(DeadlinePassed):
                asked.future.result(WAIT_S)
    assert queries.run("SELECT 1").rows == [[1]]
    assert not called


def test_places_are_bounded_and_come_back(queries: Queries) -> None:
    asked = [queries.submit(ENDLESS) for _ in range(2)]
    asked += [queries.submit("SELECT 1") for _ in range(PLACES_MAX - 2)]
    with pytest.raises(QueriesBusy, match="too many"):
        queries.submit("SELECT 1")
    for one in asked[:2]:
        with pytest.raises(DeadlinePassed):
            one.future.result(WAIT_S)
    for one in asked[2:]:
        one.future.result(WAIT_S)
    with pytest.raises(QueriesBusy):
        queries.submit("SELECT 1")  # answered ones have their place until they are written
    for one in asked:
        with one:
            pass
    assert queries.run("SELECT 2").rows == [[2]]


ORPHAN = f"""
import sys, threading, time
from pathlib import Path
from tests.histories import kept
from tests.children import at_work, warm
with kept(Path(sys.argv[1]), "r", sql_deadline_s=60) as (bus, history):
    children = warm(history.queries)
    with history.queries.submit({ENDLESS!r}):
        at_work(children, 1)
        print(*children, flush=True)
        sys.stdin.read()
"""


def test_children_end_with_a_server_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        children = [int(pid) for pid in server.stdout.readline().split()]
        assert len(children) == 2
        server.kill()
        wait_for(lambda: all(ended(pid) for pid in children))


# ---- what a child is


def test_a_child_knows_no_server_no_engine_and_no_environment(queries: Queries) -> None:
    code = "import sys, telemetry.query_child; print(*{n.split('.')[0] for n in sys.modules})"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert not set(printed.split()) & {"torch", "server", "engine", "starlette", "numpy", "zmq"}
    for pid in warm(queries):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert [entry.split(b"=")[0] for entry in environment if entry] == [b"PYTHONPATH"]
        assert len(os.listdir(f"/proc/{pid}/task")) == 1
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, ours + 15)


CONFINED = """
import errno, os, socket, sys
from pathlib import Path
from telemetry.confinement import confine
mine, other = Path(sys.argv[1]), Path(sys.argv[2])
landlock = confine([mine], os.getppid())
def refused(act):
    try:
        act()
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EPERM, errno.EFBIG)
    return False
assert mine.read_text() == "mine"
if landlock:
    assert refused(lambda: other.read_text())
    assert refused(lambda: os.listdir(mine.parent))
    assert refused(lambda: mine.write_text("x"))
    assert refused(lambda: (mine.parent / "new").write_text("x"))
    assert refused(lambda: mine.unlink())
    assert refused(lambda: os.mkdir(mine.parent / "new"))
if landlock >= 4:
    assert refused(lambda: socket.create_connection(("127.0.0.1", 9)))
if landlock >= 6:
    assert refused(lambda: os.kill(os.getppid(), 0))
try:
    bytearray(2**31)
except MemoryError:
    print("confined", landlock)
"""


def test_the_kernel_keeps_a_confined_process_from_everything_but_its_files(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.write_text("mine")
    other.write_text("other")
    printed = subprocess.check_output(
        [sys.executable, "-c", CONFINED, str(mine), str(other)], cwd=ROOT, text=True
    )
    assert printed.startswith("confined")
    assert (mine.read_text(), other.read_text()) == ("mine", "other")
    assert sorted(tmp_path.iterdir()) == [mine, other]


# ---- every row, once


def test_every_committed_row_is_found_once_while_segments_come_and_children_go(
    tmp_path: Path,
) -> None:
    with kept(tmp_path, "r", history_segment_s=0.1, sql_deadline_s=5.0) as (bus, history):
        queries = history.queries
        bus.publish(samples.run())
        sql = "SELECT count(*), count(DISTINCT seq), coalesce(max(seq), 0) FROM iteration"
        killed = 0
        for turn in range(60):
            for step in range(turn * 20, turn * 20 + 20):
                bus.publish(samples.iteration(step + 1, [1]))
            assert history.flush(WAIT_S)
            ((count, distinct, last),) = queries.run(sql).rows
            assert (count, distinct, last) == ((turn + 1) * 20, (turn + 1) * 20, bus.head)
            if turn % 20 == 10 and (children := pids(queries)):
                os.kill(children[0], signal.SIGKILL)
                wait_for(partial(ended, children[0]))
                killed += 1
        assert killed
        assert queries._board.rotations > 3


def test_a_child_that_cannot_keep_up_starts_anew_and_the_writer_never_waits() -> None:
    rows: list[tuple[object, ...]] = []

    def live() -> Iterator[dict[str, list[tuple[object, ...]]]]:
        yield {"fault": list(rows)}

    queries = made(live)
    try:
        children = warm(queries)
        with queries.submit(ENDLESS), queries.submit(ENDLESS):
            at_work(children, 2)
            size = INBOX_BYTES_MAX // 8
            slowest_s = 0.0
            for seq in range(1, 12):
                rows.append(("r", 1, seq, 0, None, "test", "x" * size, ""))
                started = time.monotonic()
                queries.feed({"fault": [rows[-1]]})
                slowest_s = max(slowest_s, time.monotonic() - started)
            assert slowest_s < 3
            assert all(lane._inbox_bytes <= INBOX_BYTES_MAX for lane in queries._lanes)
        wait_for(lambda: all(gone(pid) for pid in children))
        assert queries.run("SELECT count(*), max(seq) FROM fault").rows == [[11, 11]]
    finally:
        queries.close()


def test_rows_that_are_fed_and_in_the_live_file_count_once() -> None:
    committed = [("r", 1, seq, 0, None, "test", "", "") for seq in (1, 2)]
    begun, go_on = threading.Semaphore(0), threading.Event()

    def live() -> Iterator[dict[str, list[tuple[object, ...]]]]:
        of_one_instant = list(committed)
        yield {"fault": of_one_instant[:1]}
        begun.release()
        assert go_on.wait(WAIT_S)
        yield {"fault": of_one_instant[1:]}

    queries = made(live)
    try:
        queries.start()
        for _ in range(2):
            assert begun.acquire(timeout=WAIT_S)
        queries.feed({"fault": committed[1:]})  # told late: the filling has it
        for seq in (3, 4):
            committed.append(("r", 1, seq, 0, None, "test", "", ""))
            queries.feed({"fault": committed[-1:]})
        go_on.set()
        for pid in warm(queries):
            assert queries.run("SELECT seq FROM fault ORDER BY seq").rows == [[1], [2], [3], [4]]
            os.kill(pid, signal.SIGKILL)
            wait_for(partial(ended, pid))
    finally:
        queries.close()


def made(live: Callable[[], Iterator[dict[str, list[tuple[object, ...]]]]]) -> Queries:
    return Queries(
        live,
        why_not=lambda: None,
        rows_max=100,
        deadline_s=30.0,
        log=logging.getLogger("test"),
    )
