"""A command at a real terminal for tests: a pty of its own, what it shows, its keys and its mode.

Owns the pty and the child. `screen` interprets the few sequences that server/screen.py writes and
refuses any other, so that a frame with a stranger's sequence in it fails the test that reads it.
"""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

WAIT_S = 20.0
HOME = "\x1b[H"
CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Becomes the command, with its own controlling terminal: else Ctrl-C would be a mere byte."""

KNOWN = re.compile(r"\x1b\[(?:[\d;]*m|K|J|\?(?:1049|25|7)[hl])")


@dataclass
class Terminal:
    """A child at its own terminal."""

    process: "subprocess.Popen[bytes]"
    ours: int
    theirs: int
    found_mode: list[Any]
    written: bytearray = field(default_factory=bytearray)

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        set_size(self.ours, columns, lines)
        self.process.send_signal(signal.SIGWINCH)

    def mode(self) -> list[Any]:
        return termios.tcgetattr(self.theirs)

    def screen(self) -> list[str]:
        """Return the lines of the newest whole frame; the one being written may be a part."""
        frames = self.written.decode(errors="replace").split(HOME)
        if len(frames) < 3:
            return []
        text = KNOWN.sub("", frames[-2])
        assert "\x1b" not in text, repr(text)
        return [line.rstrip() for line in text.split("\r\n")]

    def wait(self, until: Callable[[list[str]], Any], deadline_s: float = WAIT_S) -> list[str]:
        """Read on until a frame shows what `until` looks for; return it."""
        deadline = time.monotonic() + deadline_s
        while not (until(lines := self.screen())):
            assert time.monotonic() < deadline, "not shown:\n" + "\n".join(lines)
            assert self.read() or self.process.poll() is None, self.written.decode()
        return lines

    def end(self) -> int:
        """Return the exit code, once what it wrote has been read."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.written[-2000:]
            self.read()
        while self.read():
            pass
        return self.process.returncode

    def read(self) -> bool:
        if not select.select([self.ours], [], [], 0.05)[0]:
            return False
        self.written += os.read(self.ours, 65536)
        return True


@contextmanager
def terminal(*command: str, columns: int = 100, lines: int = 30) -> Iterator[Terminal]:
    """Run a command at a terminal of this size; it is killed at the end if it still runs."""
    ours, theirs = os.openpty()
    set_size(ours, columns, lines)
    mode = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLED, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # A stale LINES, as a shell may have left it, must not count.
        env={**os.environ, "TERM": "xterm-256color", "LINES": "7", "COLUMNS": "33"},
    )
    try:
        yield Terminal(process, ours, theirs, mode)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def set_size(fd: int, columns: int, lines: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
