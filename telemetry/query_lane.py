"""One lane of queries: a thread, the child it keeps warm, and the rows that wait to be fed to it.

Owns the life of one child after another: filled from the live file, fed with what is committed,
replaced when it died, grew, or holds what segments hold by now. queries.py makes two and shares a
`Board` with them. A lane never waits for the history: what it cannot take in time costs it its
child, never the writer its time.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import duckdb

from telemetry.answer import QueryError
from telemetry.database import HistoryUnavailable
from telemetry.sandbox import DeadlinePassed, QueryBroken, Sandbox, SandboxFailed
from telemetry.tail import LiveRows, Rows
from telemetry.wire import Answered, Ask, OpenTail, encode_feed

INBOX_BYTES_MAX = 32 * 2**20
"""What may wait for a child that is busy; more costs it its life."""

FEED_BYTES = 64 * 2**10
"""What waits until somebody asks: children then wake a few times a minute, not with each batch."""

RENEW_BYTES = 4 * 2**20
"""Of rows fed: a child with more is replaced once segments hold them."""

RENEW_ROTATIONS = 10
LOOK_S = 5.0
"""How often an idle lane looks whether its child lives."""

RETRY_S, RETRY_MAX_S = 0.1, 3.2
TRIES = 3


class QueryUnavailable(QueryError):
    """No query can be answered now: there is no history."""


class QueriesBusy(QueryUnavailable):
    """Too much is asked at once; later it would be answered."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A query on its way; cancelling its future ends it, also when it runs."""

    ask: Ask
    before: Callable[[], object]
    expires_at: float
    future: "Future[Answered]" = field(default_factory=Future)
    sandbox: Sandbox | None = None
    tries: int = 0


@dataclass(slots=True, kw_only=True)
class Board:
    """What lanes share, under `news`: queries that wait, and which segments there are."""

    log: logging.Logger
    news: threading.Condition = field(default_factory=threading.Condition)
    jobs: deque[Job] = field(default_factory=deque)
    segments: tuple[Path, ...] = ()
    reach: Mapping[str, int] = field(default_factory=dict)
    rotations: int = 0
    stopping: bool = False


class Lane:
    """Answers one query at a time. `serving` says that its child is warm."""

    def __init__(self, board: Board, live_rows: LiveRows, name: str) -> None:
        self._board = board
        self._live_rows = live_rows
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._fed_bytes = 0
        self._overrun = False
        self._opened: tuple[Path, ...] = ()
        self._rotations = 0
        self._retry_s = RETRY_S
        self._told = ""
        self.others: Sequence[Lane] = ()
        self.serving = False
        self.sandbox: Sandbox | None = None
        self.thread = threading.Thread(target=self._live, name=name, daemon=True)

    def offer(self, frames: bytes) -> None:
        """Take rows for the child; the board is held."""
        if self._inbox_bytes + len(frames) > INBOX_BYTES_MAX:
            self._empty_inbox()
            self._overrun = True
        if not self._overrun:
            self._inbox.append(frames)
            self._inbox_bytes += len(frames)

    # ---- the lane's thread

    def _live(self) -> None:
        board = self._board
        while not board.stopping:
            try:
                sandbox = self._new()
            except (SandboxFailed, HistoryUnavailable, duckdb.Error, OSError) as error:
                self._rest(str(error))
                continue
            self._retry_s, self._told = RETRY_S, ""
            try:
                self._serve(sandbox)
            except SandboxFailed as error:
                board.log.warning("%s; another one takes over", error)
            except Exception:
                board.log.exception("a lane of queries met what it did not expect")
            finally:
                with board.news:
                    self.serving, self.sandbox = False, None
                sandbox.close()

    def _rest(self, reason: str) -> None:
        """Wait before the next try; when no lane gets anywhere, tell those who wait for one."""
        board = self._board
        hopeless: list[Job] = []
        with board.news:
            if board.stopping:
                return
            if reason != self._told:
                board.log.warning("no process for queries: %s", reason)
                self._told = reason
            if self._retry_s >= RETRY_MAX_S and not any(lane.serving for lane in self.others):
                hopeless += board.jobs
                board.jobs.clear()
        for job in hopeless:
            with suppress(InvalidStateError):
                job.future.set_exception(QueryUnavailable(f"no process for queries: {reason}"))
        with board.news:
            board.news.wait_for(lambda: board.stopping, self._retry_s)
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _new(self) -> Sandbox:
        """Return a child that holds all rows; raises SandboxFailed, HistoryUnavailable.

        It follows the history before it reads the live file, and reads that before it looks which
        segments there are: so no row is missed, and of those that come twice the child knows.
        """
        with self._board.news:
            self._empty_inbox()
            self._fed_bytes = 0
            self._overrun = False
        with closing(self._live_rows()) as pieces:
            first = next(pieces, {})
            sandbox = Sandbox()
            try:
                self._fill(sandbox, first, pieces)
            except BaseException:
                with self._board.news:
                    self.sandbox = None
                sandbox.close()
                raise
        return sandbox

    def _fill(self, sandbox: Sandbox, first: Rows, pieces: Iterator[Rows]) -> None:
        board = self._board
        with board.news:
            self.sandbox = sandbox
            self._opened, self._rotations = board.segments, board.rotations
            names = [str(path.resolve()) for path in board.segments]
            opening = OpenTail(segments=names, covered=dict(board.reach))
        ready = sandbox.open(opening)
        for rows in chain((first,), pieces):
            sandbox.feed(encode_feed(rows))
        sandbox.filled()
        if ready.left_out and self._rotations != board.rotations:
            raise SandboxFailed("segments changed while it opened them")
        for name, reason in ready.left_out.items():
            board.log.error("queries do without %s: %s", Path(name).name, reason)
        if not ready.landlock:
            board.log.debug("this kernel has no Landlock: DuckDB alone keeps queries from files")

    def _serve(self, sandbox: Sandbox) -> None:
        board = self._board
        with board.news:
            self.serving = True
        while True:
            with board.news:
                board.news.wait_for(self._something, LOOK_S)
                if board.stopping or self._overrun or self._may_renew():
                    self.serving = False  # at once: the other must not go at the same moment
                    return
                job = board.jobs.popleft() if board.jobs else None
                if job is not None:
                    job.sandbox = sandbox
            if job is None:
                self._feed(sandbox)
            else:
                self._answer(sandbox, job)
            if sandbox.spent or not sandbox.alive:
                return

    def _something(self) -> bool:
        board = self._board
        return bool(
            board.stopping
            or board.jobs
            or self._inbox_bytes > FEED_BYTES
            or self._overrun
            or self._may_renew()
        )

    def _may_renew(self) -> bool:
        """Tell whether the child should go now: segments hold what it was fed, others serve."""
        board = self._board
        behind = board.rotations - self._rotations
        stale = (
            (behind > 0 and self._fed_bytes > RENEW_BYTES)
            or behind >= RENEW_ROTATIONS
            or (behind > 0 and not set(self._opened) <= set(board.segments))
        )
        return stale and all(lane.serving for lane in self.others)

    def _feed(self, sandbox: Sandbox) -> None:
        with self._board.news:
            frames = list(self._inbox)
            self._empty_inbox()
        for one in frames:
            sandbox.feed(one)
            self._fed_bytes += len(one)

    def _answer(self, sandbox: Sandbox, job: Job) -> None:
        try:
            if time.monotonic() > job.expires_at:
                raise QueriesBusy("too many queries at once: this one waited too long")
            if job.future.cancelled():
                self._end(job)
                return
            job.before()
            self._feed(sandbox)
            result = sandbox.ask(job.ask)
        except SandboxFailed as error:
            self._again(job, error)
        except QueryError as error:
            if isinstance(error, DeadlinePassed | QueryBroken) and not job.future.cancelled():
                self._board.log.warning("a query failed: %s", error)
            self._fail(job, error)
        except Exception as error:
            self._fail(job, QueryBroken("the query met a fault of the server's own"))
            raise error
        else:
            self._end(job)
            with suppress(InvalidStateError):
                job.future.set_result(result)

    def _again(self, job: Job, error: SandboxFailed) -> None:
        """Put a query back to the front that its child did not even take."""
        job.tries += 1
        self._end(job)
        if job.tries >= TRIES:
            self._fail(job, QueryBroken(str(error)))
            return
        with self._board.news:
            if not job.future.cancelled():
                self._board.jobs.appendleft(job)
                self._board.news.notify_all()

    def _fail(self, job: Job, error: QueryError) -> None:
        self._end(job)
        with suppress(InvalidStateError):
            job.future.set_exception(error)

    def _end(self, job: Job) -> None:
        """Take the child off a query: whoever cancels it now must not kill the next one's."""
        with self._board.news:
            job.sandbox = None

    def _empty_inbox(self) -> None:
        self._inbox.clear()
        self._inbox_bytes = 0
