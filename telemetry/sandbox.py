"""A handle on one query child: started, opened, filled, asked, and killed without regret.

Owns the child's process and the socket to it. queries.py keeps two for the server; server/source.py
keeps one for a command that reads files. One thread talks to it; `kill` may come from any. A child
that misses a deadline or breaks off is dead: its owner makes another. Must never wait without end.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from telemetry.answer import QueryError
from telemetry.wire import (
    Answered,
    Ask,
    Failed,
    Filled,
    Opening,
    Ready,
    Refused,
    Reply,
    frame,
    read_reply,
)

ROOT = Path(__file__).resolve().parent.parent
MODULE = "telemetry.query_child"
OPEN_S = 120.0
FILL_S = 120.0
SEND_S = 30.0
REAP_S = 5.0


class SandboxFailed(Exception):
    """The child cannot do what it is for, and is dead; `locked` when another process has a file."""

    def __init__(self, message: str, *, locked: bool = False) -> None:
        super().__init__(message)
        self.locked = locked


class DeadlinePassed(QueryError):
    """The query ran to its deadline and was killed with its process."""


class QueryBroken(QueryError):
    """The process of the query ended before it answered."""


class Sandbox:
    """A child process that answers SQL. `spent` says that it should be replaced.

    The kernel ends it with the thread that made it.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: a folder named telemetry where the server was started is not ours.
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env={"PYTHONPATH": str(ROOT)},  # SQL can read the environment: it holds nothing
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Ctrl-C is for the command, which then kills this. A session of its own would be
                # scheduled as one against the whole server, whatever its priority.
                process_group=0,
            )
        self._channel = ours
        self._dead = threading.Event()
        self.spent = False

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Tell whether it can be asked."""
        return not self._dead.is_set() and self._process.poll() is None

    def open(self, opening: Opening) -> Ready:
        """Let it open what it will answer from; raises SandboxFailed."""
        self._send(frame(opening))
        return self._until_ready(OPEN_S, "did not start")

    def feed(self, frames: bytes) -> None:
        """Send rows that `encode_feed` made; raises SandboxFailed when it does not take them."""
        self._send(frames)

    def filled(self) -> None:
        """Wait until the rows sent so far can be queried; raises SandboxFailed."""
        self._send(frame(Filled()))
        self._until_ready(FILL_S, "could not be filled")

    def ask(self, query: Ask) -> Answered:
        """Answer one SELECT; raises QueryError, or SandboxFailed when it was not even taken."""
        if not self.alive:
            raise SandboxFailed(f"the process for queries is gone: {self._end()}")
        self._send(frame(query))
        try:
            reply = self._receive(query.deadline_s)
        except TimeoutError:
            self.kill()
            raise DeadlinePassed(f"stopped at its deadline of {query.deadline_s:g} s") from None
        if isinstance(reply, Answered):
            self.spent = reply.spent
            return reply
        if isinstance(reply, Refused):
            self.spent = reply.spent
            raise QueryError(reply.message, reply.position)
        self.kill()
        raise QueryBroken(f"the process that ran the query ended: {self._end()}")

    def kill(self) -> None:
        """End the child now, whatever it does; from any thread, more than once."""
        self._dead.set()
        with suppress(OSError):
            self._process.kill()

    def close(self) -> None:
        """End the child and wait for it; only its own thread may."""
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        self._channel.close()

    def _send(self, content: bytes) -> None:
        try:
            self._channel.settimeout(SEND_S)
            self._channel.sendall(content)
        except OSError as error:
            self.kill()
            raise SandboxFailed(f"the process for queries is gone: {self._end()}") from error

    def _until_ready(self, seconds: float, otherwise: str) -> Ready:
        try:
            reply = self._receive(seconds)
        except TimeoutError:
            reply = None
        if isinstance(reply, Ready):
            return reply
        self.kill()
        if isinstance(reply, Failed):
            raise SandboxFailed(reply.message, locked=reply.locked)
        raise SandboxFailed(f"the process for queries {otherwise}: {self._end()}")

    def _receive(self, seconds: float) -> Reply | None:
        return read_reply(self._channel, time.monotonic() + seconds)

    def _end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        code = self._process.returncode
        if code is None:
            return "it cannot be killed"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
