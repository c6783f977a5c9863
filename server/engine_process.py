"""One engine process: spawned, looked at and, if need be, killed; with its private folder.

Owns the process handle and the three server-side sockets of one generation. engine_client.py makes
one for each generation and throws it away. Never restarts anything and never looks into a message.
"""

import asyncio
import multiprocessing
import os
import shutil
import tempfile
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq

from engine.config import EngineConfig
from engine.process import EngineStart, engine_process
from engine.vitals import STACKS_SIGNAL, Pulse, read_stacks

Channel = zmq.Socket[bytes]
Take = Callable[[bytes], None]
READABLE = int(zmq.POLLIN)
DRAIN_MESSAGES = 256
JOIN_S = 2.0
STACKS_LOOKS = 20
STACKS_PERIOD_S = 0.05
ACTIVITIES: Mapping[str, str] = types.MappingProxyType(
    {
        "R": "it computes",
        "S": "it waits",
        "D": "it waits for the kernel",
        "T": "it is stopped",
        "t": "it is traced",
    }
)
"""What a process does, by Linux's letter for it (proc(5))."""


def read_some(socket: Channel, take: Take) -> bool:
    """Read a bounded number of messages; True when more may wait.

    Asks before it reads: a failed read is an exception, which costs more than a message.
    """
    for _ in range(DRAIN_MESSAGES):
        if not int(socket.getsockopt(zmq.EVENTS)) & READABLE:
            return False
        take(socket.recv(zmq.DONTWAIT))
    return True


@dataclass(frozen=True, slots=True)
class Channels:
    """The server's ends: commands go out, control and records come in."""

    commands: Channel
    control: Channel
    records: Channel

    def close(self) -> None:
        """Close all three; what was not sent is dropped."""
        for socket in (self.commands, self.control, self.records):
            socket.close(linger=0)


class EngineProcess:
    """A spawned engine; `sentinel` becomes readable when it is gone."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", config: EngineConfig) -> None:
        # Only this user may enter the folder, so nobody else can reach the engine's sockets.
        self.folder = Path(tempfile.mkdtemp(prefix="iterscope-"))
        self._config = config
        self.channels = Channels(
            commands=context.socket(zmq.PUSH),
            control=context.socket(zmq.PULL),
            records=context.socket(zmq.PULL),
        )
        # Commands are bounded by the live requests; an engine that is still loading must not
        # make the event loop wait.
        self.channels.commands.setsockopt(zmq.SNDHWM, 0)
        self.channels.commands.bind(self._address("commands"))
        self.channels.control.bind(self._address("control"))
        self.channels.records.bind(self._address("records"))
        self._process: multiprocessing.process.BaseProcess | None = None
        try:
            self.pulse = Pulse(self.folder)
        except OSError:
            self.close()
            raise

    def _address(self, name: str) -> str:
        return f"ipc://{self.folder / name}"

    def start(self, zero_ns: int) -> None:
        """Spawn the engine; it counts time from zero_ns on CLOCK_MONOTONIC."""
        start = EngineStart(
            config=self._config,
            commands_address=self._address("commands"),
            control_address=self._address("control"),
            records_address=self._address("records"),
            zero_ns=zero_ns,
            folder=str(self.folder),
        )
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=engine_process, args=(start,), name="iterscope-engine", daemon=True
        )
        process.start()
        self._process = process

    @property
    def sentinel(self) -> int:
        """A file descriptor that is readable once the process has ended."""
        assert self._process is not None
        return self._process.sentinel

    @property
    def pid(self) -> int | None:
        """The process id."""
        return self._process.pid if self._process else None

    def activity(self) -> str:
        """Say what the process does, as the system sees it."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "it is gone"
        return ACTIVITIES.get(stat.rpartition(")")[2].split()[0], "it is gone")

    async def ask_stacks(self) -> str:
        """Return the stacks of its threads, asked for now; a stopped process gives none."""
        if self.pid is None:
            return ""
        try:
            os.kill(self.pid, STACKS_SIGNAL)
        except OSError:
            return self.stacks()
        before = ""
        for _ in range(STACKS_LOOKS):
            await asyncio.sleep(STACKS_PERIOD_S)
            written = self.stacks()
            if written and written == before:
                break
            before = written
        return before

    def stacks(self) -> str:
        """Return the stacks that it has written, when it was asked or crashed."""
        return read_stacks(self.folder)

    def end(self, grace_s: float) -> str:
        """Wait grace_s for the process to leave, kill it otherwise; say how it ended."""
        process = self._process
        if process is None:
            return "never started"
        process.join(grace_s)
        if process.is_alive():
            process.kill()
            process.join(JOIN_S)
        code = process.exitcode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Let go of sockets and folder."""
        self.channels.close()
        shutil.rmtree(self.folder, ignore_errors=True)
