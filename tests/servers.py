"""A real `iterscope serve` for tests: its own process, a free port, its log, and its end.

Owns the start (waits for /ready), the look at its figures, and the stop. End-to-end tests of any
subject use it, once a module where they can. Every wait has a deadline, and a server that dies or
misses one fails the test with its log.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

START_S = 90.0
STOP_S = 30.0
WAIT_S = 20.0
PARROT = ("-m", "tests.paced_server", "--step-ms")

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server."""

    process: "subprocess.Popen[bytes]"
    log_file: Path
    url: str

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str) -> httpx.Response:
        # No certificates are read for a plain connection: that costs a hundred times the request.
        return httpx.get(self.url + path, timeout=WAIT_S, verify=False)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT_S)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that carry these labels; fails without any."""
        values = []
        for line in self.get("/metrics").text.splitlines():
            found = re.fullmatch(r"(\w[\w:]*)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name:
                has = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                if all(has.get(key) == value for key, value in labels.items()):
                    values.append(float(found[3]))
        assert values, f"/metrics has no {name} {labels}"
        return sum(values)

    def wait(self, until: Callable[[], Found], deadline_s: float = WAIT_S) -> Found:
        """Return the first true answer of `until`; fails with the log after the deadline."""
        return wait(until, deadline_s, self)

    def wait_idle(self, deadline_s: float = WAIT_S) -> None:
        """Wait until nothing runs, waits or holds KV blocks, as /metrics has it."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        self.wait(lambda: not any(self.metric(f"vllm:{name}") for name in names), deadline_s)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_S)


def wait(until: Callable[[], Found], deadline_s: float, server: Server | None = None) -> Found:
    """Return the first true answer of `until`, asked again and again."""
    deadline = time.monotonic() + deadline_s
    while not (found := until()):
        log = server.log if server else ""
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s\n{log}"
        if server is not None:
            assert server.process.poll() is None, f"the server ended\n{log}"
        time.sleep(0.01)
    return found


def command(model: Path, *flags: str) -> list[str]:
    """Return the command line of a server on a free port; it keeps no history unless asked to."""
    program = str(Path(sys.executable).parent / "iterscope")
    history = () if any(flag.startswith("--history") for flag in flags) else ("--no-history",)
    return [program, "serve", "--model", str(model), "--port", "0", *history, *flags]


@contextmanager
def serving(
    folder: Path,
    model: Path,
    *flags: str,
    ready: bool = True,
    parrot: bool = False,
    beat_ms: int = 0,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server whose log goes to `folder`, wait until it is ready, and stop it at the end.

    With `parrot` its engine computes nothing: an answer is its prompt's tokens, again and again.
    A parrot's step ends on a multiple of `beat_ms`. `env` is what its environment has beside ours.
    """
    log_file = folder / f"server-{time.monotonic_ns()}.log"
    with log_file.open("wb") as log:
        program = command(model, *flags)
        if parrot:
            program = [sys.executable, *PARROT, str(beat_ms), *program[1:]]
        process = subprocess.Popen(program, stdout=log, stderr=log, env=os.environ | (env or {}))
    server = Server(process=process, log_file=log_file, url="")
    try:
        line = re.compile(r"listening on (http://[\w.:\[\]]+)")
        url = server.wait(lambda: line.search(server.log), START_S)[1]
        server = Server(process=process, log_file=log_file, url=url)
        if ready:
            server.wait(lambda: answers(server, "/ready"), START_S)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def engine_pid(server: Server) -> int:
    """Return the process id of the server's engine: its child that runs the loop."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        line = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"spawn_main" in line:
            return int(child)
    raise AssertionError(f"no engine among {children}")


def answers(server: Server, path: str) -> bool:
    """Tell whether the path answers 200 now; a server that does not listen yet does not."""
    try:
        return server.get(path).status_code == 200
    except httpx.TransportError:
        return False
