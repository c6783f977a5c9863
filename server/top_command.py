"""`iterscope top`: a running server watched in the terminal, or one frame of it for a script.

Owns the command's flags, the loop between stream, keys and screen, and the exit codes; server/
cli.py calls `run_top_command`. What is seen is folded by server/watch.py and drawn by server/
top_frame.py. Must never leave the terminal in another mode than it found it in.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from server.config import default_api_key, default_history
from server.event_stream import Away, Event, Followed, Here, follow
from server.screen import Screen, as_text
from server.source import NoAnswer
from server.terminal import ANSWERED, MISUSE, WRONG, open_console, refuse
from server.top_frame import Link, frame
from server.top_picture import picture_of
from server.watch import WATCHED_KINDS, Watch
from telemetry.notes import read_server_file

PAST_RECORDS = 4096
"""So many records before now fill the windows at the start, as far as the server's ring goes."""

INTERVAL_S, INTERVAL_MIN_S, INTERVAL_MAX_S = 0.5, 0.1, 60.0
FIRST_LOOK_S = 15.0
QUITS = frozenset("qQ\x03\x04")
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_top_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope top`."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--url", help="watch the server at this address")
    place.add_argument(
        "--history",
        metavar="DIR",
        help=f"watch the server that holds this history (default: {default_history()})",
    )
    parser.add_argument("--api-key", help="key of the server (or ITERSCOPE_API_KEY)")
    parser.add_argument(
        "--interval",
        type=float,
        default=INTERVAL_S,
        metavar="S",
        help=f"seconds between frames, and that --once watches (default: {INTERVAL_S:g})",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one frame and end; so without a terminal"
    )
    parser.add_argument("--json", action="store_true", help="print one frame as JSON and end")


def run_top_command(args: argparse.Namespace) -> int:
    """Watch until `q`; 0 then, 1 when nobody answers or refuses, 2 for misuse, 128 + signal."""
    if not INTERVAL_MIN_S <= args.interval <= INTERVAL_MAX_S:
        return refuse(f"--interval must be {INTERVAL_MIN_S:g} to {INTERVAL_MAX_S:g} s", MISUSE)
    try:
        top = _Top(_address(args), args.api_key or default_api_key(), args.interval)
        if args.json or args.once or not _is_screen():
            asyncio.run(top.once(as_json=args.json))
            return ANSWERED
        return asyncio.run(top.live())
    except NoAnswer as error:
        return refuse(str(error), WRONG)


def _is_screen() -> bool:
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def _address(args: argparse.Namespace) -> str:
    if args.url:
        return str(args.url)
    folder = Path(args.history).expanduser() if args.history else default_history()
    server = read_server_file(folder)
    if server is None:
        raise NoAnswer(f"no server says that it holds {folder}; --url names one")
    return server.url


class _Top:
    """One run of the command: the watch, how its stream stands, and what is drawn of it."""

    def __init__(self, url: str, api_key: str | None, interval_s: float) -> None:
        self._what = Followed(url=url, api_key=api_key, kinds=WATCHED_KINDS, past=PAST_RECORDS)
        self._interval_s = interval_s
        self._watch = Watch()
        self._away: str | None = None
        self._ended_by = 0
        self._quit = asyncio.Event()
        self._woken = asyncio.Event()

    async def once(self, *, as_json: bool) -> None:
        """Watch for one interval and print what is seen."""
        feeding = asyncio.create_task(self._feed())
        try:
            await self._first_look(feeding)
            await asyncio.wait([feeding], timeout=self._interval_s)
            if feeding.done():
                feeding.result()
        finally:
            feeding.cancel()
        picture = picture_of(self._watch, self._what.url, time.monotonic_ns())
        if self._away is not None:
            raise NoAnswer(f"{self._what.url}: {self._away}")
        if as_json:
            sys.stdout.write(msgspec.json.encode(picture).decode() + "\n")
            return
        console = open_console()
        width = console.width if sys.stdout.isatty() else None
        lines = frame(picture, self._link(keys=False), width)
        sys.stdout.write(as_text(console, lines, console.width) + "\n")

    async def live(self) -> int:
        """Draw frame after frame until a key or a signal ends it; returns the exit code."""
        feeding = asyncio.create_task(self._feed())
        try:
            await self._first_look(feeding)
            with Screen() as screen, self._listening(screen):
                while not self._quit.is_set() and not feeding.done():
                    self._draw(screen)
                    await self._pause(feeding)
            if feeding.done():
                feeding.result()
        except OSError:
            return WRONG  # the terminal is gone: there is nobody to tell
        finally:
            feeding.cancel()
        return 128 + self._ended_by if self._ended_by else ANSWERED

    async def _feed(self) -> None:
        async with aclosing(follow(self._what)) as stream:
            async for found in stream:
                if isinstance(found, Away):
                    self._away = f"{found.why}; trying again"
                    self._woken.set()
                elif isinstance(found, Here):
                    self._watch.opened(found.server_unix_s)
                    self._away = None
                else:
                    self._take(found)

    def _take(self, event: Event) -> None:
        try:
            self._watch.take(event, time.monotonic_ns())
        except msgspec.DecodeError as error:
            self._watch.note(f"the event {event.name} could not be read: {error}")

    async def _first_look(self, feeding: "asyncio.Task[None]") -> None:
        """Wait for the server's first word; raises NoAnswer without one."""
        deadline = time.monotonic() + FIRST_LOOK_S
        while self._watch.run_id is None:
            await asyncio.wait([feeding], timeout=0.02)
            if feeding.done():
                feeding.result()
            if time.monotonic() > deadline:
                raise NoAnswer(f"{self._what.url} says nothing: {self._away or 'no hello'}")

    async def _pause(self, feeding: "asyncio.Task[None]") -> None:
        """Wait for the next frame's time, or for what should be seen at once."""
        self._woken.clear()
        waking = asyncio.create_task(self._woken.wait())
        try:
            await asyncio.wait(
                [waking, feeding],
                timeout=self._interval_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            waking.cancel()

    def _draw(self, screen: Screen) -> None:
        width, height = screen.size
        picture = picture_of(self._watch, self._what.url, time.monotonic_ns())
        keys = screen.keys_from is not None
        screen.show(frame(picture, self._link(keys=keys), width, height))

    def _link(self, *, keys: bool) -> Link:
        notes = [
            (time.strftime("%H:%M:%S", time.localtime(at)), text) for at, text in self._watch.notes
        ]
        return Link(away=self._away, notes=notes, keys=keys)

    # ---- keys and signals

    @contextmanager
    def _listening(self, screen: Screen) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in ENDS:
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGWINCH, self._woken.set)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend, screen)
        if screen.keys_from is not None:
            loop.add_reader(screen.keys_from, self._keys, screen)
        try:
            yield
        finally:
            if screen.keys_from is not None:
                loop.remove_reader(screen.keys_from)

    def _end(self, number: int) -> None:
        self._ended_by = number
        self._quit.set()
        self._woken.set()

    def _suspend(self, screen: Screen) -> None:
        """Stop as Ctrl-Z asks, on the shell's own screen; what follows happens after `fg`."""
        screen.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        screen.enter()
        self._woken.set()

    def _keys(self, screen: Screen) -> None:
        try:
            keys = screen.keys()
        except OSError:
            keys = ""
        if not keys or QUITS & set(keys):
            self._quit.set()
        self._woken.set()
