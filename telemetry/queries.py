"""SQL for people, on the server's side: who waits, who is answered, who is told to come again.

Owns the line of waiting queries and the two lanes that answer it, and follows the history so that
their children hold every committed row. history.py makes it and feeds it, `POST /telemetry/sql`
asks it. No SQL runs in this process: a query can cost its child, never the server. Must never block
whoever feeds it.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from telemetry.answer import Answer, Format
from telemetry.query_lane import Board, Job, Lane, QueriesBusy, QueryUnavailable
from telemetry.tail import LiveRows, Rows
from telemetry.wire import Answered, Parameters, encode_feed, question

LANES = 2
PLACES_MAX = 34
"""Queries at once: running, waiting, and answered ones that are still being written."""

WAIT_S = 20.0
MARGIN_S = 5.0
CLOSE_S = 5.0


class Asked:
    """A query and its place; use it in a `with`, whose end gives up both.

    `future` brings the answer, or raises QueryError.
    """

    def __init__(self, future: "Future[Answered]", leave: Callable[[], None]) -> None:
        self.future = future
        self._leave = leave

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.future.cancel()
        self._leave()


class Queries:
    """Answers SQL from a copy of the history: a `Tail` of it.

    `why_not` returns why there is no history to ask, or None.
    """

    def __init__(
        self,
        live_rows: LiveRows,
        *,
        why_not: Callable[[], str | None],
        rows_max: int,
        deadline_s: float,
        log: logging.Logger,
    ) -> None:
        self._why_not = why_not
        self._rows_max = rows_max
        self._deadline_s = deadline_s
        self._board = Board(log=log)
        self._places = threading.BoundedSemaphore(PLACES_MAX)
        self._lanes = [Lane(self._board, live_rows, f"queries {n}") for n in range(LANES)]
        for lane in self._lanes:
            lane.others = [other for other in self._lanes if other is not lane]
        self._started = False

    @property
    def patience_s(self) -> float:
        """How long an answer may take from `submit` on, waiting included."""
        return WAIT_S + self._deadline_s + MARGIN_S

    # ---- following the history

    def start(self) -> None:
        """Make the children, so that the first query finds them warm; it would make them, too."""
        with self._board.news:
            if self._started or self._board.stopping:
                return
            self._started = True
            for lane in self._lanes:
                lane.thread.start()

    def feed(self, rows: Rows) -> None:
        """Take a batch that was committed; never blocks."""
        if not rows or not self._started:
            return
        frames = encode_feed(rows)
        with self._board.news:
            for lane in self._lanes:
                lane.offer(frames)
            self._board.news.notify_all()

    def rotate(self, segments: Sequence[Path], covered: Mapping[str, int]) -> None:
        """Learn which segments there are, before what they cover leaves the live file."""
        board = self._board
        with board.news:
            board.segments, board.reach = tuple(segments), dict(covered)
            board.rotations += 1
            board.news.notify_all()

    # ---- answering

    def submit(
        self,
        sql: str,
        parameters: Parameters = (),
        *,
        before: Callable[[], object] = lambda: None,
        format: Format = "json",
    ) -> Asked:
        """Let one SELECT be answered in its turn, after `before` was called on its lane's thread.

        Raises QueryUnavailable when there is no history or no place, QueryError for what cannot
        even be asked.
        """
        if reason := self._why_not():
            raise QueryUnavailable(reason)
        job = Job(
            ask=question(
                sql,
                parameters,
                format=format,
                rows_max=self._rows_max,
                deadline_s=self._deadline_s,
            ),
            before=before,
            expires_at=time.monotonic() + WAIT_S,
        )
        if not self._places.acquire(blocking=False):
            raise QueriesBusy("too many queries at once")
        self.start()
        board = self._board
        with board.news:
            stopping = board.stopping
            if not stopping:
                board.jobs.append(job)
                board.news.notify_all()
        if stopping:
            self._places.release()
            raise QueryUnavailable("the server is shutting down")
        job.future.add_done_callback(
            lambda future: self._after(job) if future.cancelled() else None
        )
        return Asked(job.future, self._places.release)

    def run(self, sql: str, parameters: Parameters = ()) -> Answer:
        """Answer one SELECT on the calling thread; raises QueryError."""
        with self.submit(sql, parameters) as asked:
            answered = asked.future.result(self.patience_s)
        return msgspec.json.decode(answered.content, type=Answer)

    def close(self) -> None:
        """End all queries and their processes."""
        board = self._board
        with board.news:
            board.stopping = True
            waiting = list(board.jobs)
            board.jobs.clear()
            board.news.notify_all()
            for lane in self._lanes:
                if lane.sandbox is not None:
                    lane.sandbox.kill()
        for job in waiting:
            with suppress(InvalidStateError):
                job.future.set_exception(QueryUnavailable("the server is shutting down"))
        for lane in self._lanes:
            if lane.thread.ident is not None:
                lane.thread.join(CLOSE_S)

    def children(self) -> list[int]:
        """Return the process ids of the children that serve now."""
        with self._board.news:
            return [lane.sandbox.pid for lane in self._lanes if lane.serving and lane.sandbox]

    # ---- ends

    def _after(self, job: Job) -> None:
        """End a cancelled query: nobody waits for it, so its lane must not work for it."""
        board = self._board
        with board.news:
            if job.sandbox is not None:
                job.sandbox.kill()
            if job in board.jobs:
                board.jobs.remove(job)
