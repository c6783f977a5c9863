"""The server under measurement: a child of the lab, over a history of its own, gone with the lab.

Owns its start, its figures of CPU, the wait until it is idle, and its end; the experiment and tune
start one an arm. Ctrl-C is for the lab alone, so the child stands in a session of its own; and the
kernel ends it should the lab be killed. Knows only HTTP.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_S, IDLE_S, CAUSES_S, STOP_S = 300.0, 120.0, 3.0, 60.0
PROGRAM = ("-m", "server.cli")
WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit('the lab is gone')\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
"""PR_SET_PDEATHSIG outlives exec: the server is told to end when the lab's own thread is gone."""


OWN_FLAGS = ("--port", "--history", "--no-history", "--api-key", "--config", "--print-config")
"""What a measured server is started with, or must do without; nobody else's to set."""


class ServerFailed(Exception):
    """A server that did not start, or was not idle in time: the end of its log."""


def check_flags(flags: Sequence[str], where: str, *, also: Sequence[str] = ()) -> None:
    """Raise ValueError for flags that would take a server out of its measurer's hands."""
    for flag in (text.partition("=")[0] for text in flags):
        if flag in OWN_FLAGS:
            raise ValueError(f"{where}: {flag} is set by the measurement itself")
        if flag in also:
            raise ValueError(f"{where}: {flag} is a flag of this command")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that answers."""

    url: str
    pid: int
    history: Path
    log: Path

    def sql(self, query: str, parameters: Sequence[object] = ()) -> list[list[Any]]:
        """Return the rows of one SELECT on its record."""
        body = {"sql": query, "parameters": list(parameters)}
        answer = self.post("/telemetry/sql", body)
        if answer.is_error:
            raise ServerFailed(f"{answer.status_code}: {answer.text[:500]}\n{query}")
        found = answer.json()
        if found["truncated"]:
            raise ServerFailed(f"more rows than SQL answers with: {found['row_count']}")
        return list(found["rows"])

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Return the answer to one question; raises ServerFailed when there is none."""
        try:
            return httpx.post(self.url + path, json=body, timeout=60.0, trust_env=False)
        except httpx.HTTPError as error:
            raise ServerFailed(f"the server does not answer: {error}\n{tail(self.log)}") from error

    def wait_idle(self) -> None:
        """Wait until every request it took has its end on record, and its causes if it has any.

        Causes are told last, up to a second after the delivery: who reads at once misses those of
        the requests that ended last. Raises ServerFailed when one is open for too long.
        """
        self._settled("request_end", IDLE_S)
        with suppress(ServerFailed):
            self._settled("request_cause", CAUSES_S)

    def _settled(self, kind: str, seconds: float) -> None:
        # Of its own life alone: one that was killed left requests that were never delivered.
        query = f"SELECT {_count('request_start')} - {_count(kind)}"
        deadline = time.monotonic() + seconds
        while self.sql(query)[0][0] != 0:
            if time.monotonic() > deadline:
                raise ServerFailed(f"requests are open after {seconds:g} s\n{tail(self.log)}")
            time.sleep(0.1)

    def cpu_s(self) -> float:
        """Return the CPU time of the server and its children so far."""
        return sum(_cpu_s(pid) for pid in [self.pid, *_children(self.pid)])


@contextmanager
def serving(
    folder: Path, flags: Sequence[str], program: Sequence[str] = PROGRAM
) -> Iterator[Served]:
    """Start a server on a free port, its history and log in `folder`; raises ServerFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    history, log = folder / "history", folder / "server.log"
    settings = ("serve", "--port", "0", "--history", str(history), *flags)
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-c", WITH_PARENT, str(os.getpid()), *program, *settings],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            url = _wait_ready(log, begin, process)
            yield Served(url=url, pid=process.pid, history=history, log=log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _count(kind: str) -> str:
    life = "(SELECT run_id FROM run ORDER BY started_unix_us DESC LIMIT 1)"
    return f"(SELECT count(DISTINCT request) FROM {kind} WHERE run_id = {life})"


def _wait_ready(log: Path, begin: int, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_bytes()[begin:].decode(errors="replace").splitlines():
            if "listening on " in line:
                url = line.split("listening on ")[1].split()[0]
                with suppress(httpx.TransportError):
                    if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                        return url
        time.sleep(0.05)
    raise ServerFailed(f"the server did not start:\n{tail(log)}")


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError, ValueError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *_children(int(child))]
    return found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
