"""The terminal as a screen that is drawn over: its size, its keys, and its way back to sanity.

Owns the escape sequences and the terminal's mode; server/top_command.py uses it in a `with`, and
whatever ends that block, the terminal is as it was. Plain sequences rather than curses: every
terminal since the eighties knows these six, nothing has to be looked up in a terminfo database that
a small container lacks, and rich already cuts and colours lines. Must never read more than keys.
"""

import os
import sys
import termios
import tty
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleDimensions
from rich.text import Text

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""The other screen, no cursor, and lines that are too long are cut and not folded."""
LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
HOME, TO_LINE_END, TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
KEYS_MAX = 64
COLUMNS, LINES = 80, 24
"""The size of a terminal that does not know it."""


class Screen:
    """Standard output as a screen. Keys come from standard input where that is a terminal too."""

    def __init__(self) -> None:
        self.keys_from = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._console = Console(highlight=False)
        self._mode: list[Any] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Return columns and lines as they are now.

        LINES and COLUMNS of the environment are what they were when somebody set them: they are not
        asked where the terminal itself knows.
        """
        try:
            columns, lines = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            columns, lines = 0, 0
        return (columns, lines) if columns and lines else (COLUMNS, LINES)

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.leave()

    def enter(self) -> None:
        """Take the terminal: another screen, and keys one by one."""
        if self.keys_from is not None:
            self._mode = termios.tcgetattr(self.keys_from)
            tty.setcbreak(self.keys_from)
        self._write(ENTER)

    def leave(self) -> None:
        """Give the terminal back as it was."""
        try:
            self._write(LEAVE)
        finally:
            if self.keys_from is not None and self._mode is not None:
                termios.tcsetattr(self.keys_from, termios.TCSADRAIN, self._mode)

    def show(self, lines: Sequence[Text]) -> None:
        """Draw these lines over what stands there."""
        columns, _ = self._console.size = ConsoleDimensions(*self.size)
        *above, last = as_text(self._console, lines, columns).split("\n")
        # Each line is cleared before it is written: behind a full one the cursor still stands on
        # its last cell, and clearing from there would take that.
        drawn = [TO_LINE_END + line for line in above] + [TO_SCREEN_END + last]
        self._write(HOME + "\r\n".join(drawn))

    def keys(self) -> str:
        """Return the keys pressed since; to be called when there are some. Empty: hung up."""
        assert self.keys_from is not None
        return os.read(self.keys_from, KEYS_MAX).decode(errors="replace")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def as_text(console: Console, lines: Sequence[Text], width: int) -> str:
    """Return lines as the console would print them, colours and all, without the last newline."""
    with console.capture() as captured:
        for line in lines:
            console.print(line, no_wrap=True, crop=True, width=width, soft_wrap=False)
    return captured.get().removesuffix("\n")
