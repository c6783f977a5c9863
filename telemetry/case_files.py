"""SQL on recorded files: one sealed process of the server, for the file that was asked last.

Owns the thread that keeps that process, who waits for it, and which files may be opened: those of
the incident folder, and the few that people sent. server/incidents_api.py and comparisons.py ask.
A file is read in the child alone, whoever wrote it. Must never take a path from a client.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from telemetry.answer import Answer, Format, QueryError, without_paths
from telemetry.incidents import FOLDER_NAME, incident_files
from telemetry.queries import Asked
from telemetry.query_lane import QueriesBusy, QueryUnavailable
from telemetry.sandbox import Sandbox, SandboxFailed
from telemetry.segments import SUFFIX
from telemetry.wire import Answered, Ask, OpenFile, Parameters, question

PLACES_MAX = 12
"""Queries that may wait for the child; the next one is told to come again."""
IDLE_S = 60.0
"""How long a file nobody asks stays open."""
OPEN_S = 20.0
CLOSE_S = 5.0
SENT = "sent"
SENT_MAX = 3
"""Files that people sent and that are kept; the oldest go."""
SENDING_MAX = 2
"""Files that may be on their way here at once."""
ABANDONED_S = 3600.0
"""A file that began to come so long ago, and was never whole, is what a crash left."""


class NoSuchFile(QueryError):
    """There is no recorded file of this name here."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    path: Path
    ask: Ask
    future: "Future[Answered]"


class CaseFiles:
    """Answers SELECTs from recorded files, one query at a time. `folder` returns the history's."""

    def __init__(
        self, folder: Callable[[], str | None], *, rows_max: int, deadline_s: float
    ) -> None:
        self._folder = folder
        self._rows_max = rows_max
        self._deadline_s = deadline_s
        self._log = logging.getLogger("iterscope.case_files")
        self._jobs: queue.Queue[_Job | None] = queue.Queue(PLACES_MAX)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._sandbox: Sandbox | None = None
        self._opened: Path | None = None
        self._asked: _Job | None = None
        self._stopping = False
        self._coming = threading.BoundedSemaphore(SENDING_MAX)

    @property
    def patience_s(self) -> float:
        """How long an answer may take from `submit` on: a child may have to be made first."""
        return OPEN_S + 2 * self._deadline_s

    # ---- which files

    def files(self) -> list[Path]:
        """Return the files that can be asked, the newest first, those that were sent last."""
        folder = self._folder()
        if folder is None:
            return []
        return incident_files(Path(folder))[::-1] + sent_files(Path(folder))[::-1]

    def find(self, name: str) -> Path:
        """Return the file of a name; raises NoSuchFile."""
        for path in self.files():
            if path.name == name:
                return path
        raise NoSuchFile(f"there is no recorded file {name[:100]!r} on this server")

    @contextmanager
    def place(self) -> Iterator[Path]:
        """Give the folder that a file is sent to, for the time it comes; raises QueryError."""
        folder = self._folder()
        if folder is None:
            raise QueryUnavailable("this server keeps no history: it has no place for a file")
        if not self._coming.acquire(blocking=False):
            raise QueriesBusy("other files are on their way here")
        try:
            yield Path(folder)
        finally:
            self._coming.release()

    # ---- asking

    def submit(
        self, name: str, sql: str, parameters: Parameters = (), *, format: Format = "json"
    ) -> Asked:
        """Let one SELECT be answered from a file; raises QueryError when it cannot be asked."""
        job = _Job(
            path=self.find(name),
            ask=question(
                sql,
                parameters,
                format=format,
                rows_max=self._rows_max,
                deadline_s=self._deadline_s,
            ),
            future=Future(),
        )
        with self._lock:
            if self._stopping:
                raise QueryUnavailable("the server is shutting down")
            if self._thread is None:
                self._thread = threading.Thread(target=self._live, name="case files", daemon=True)
                self._thread.start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise QueriesBusy("too many queries at once on recorded files") from None
        job.future.add_done_callback(
            lambda future: self._gave_up(job) if future.cancelled() else None
        )
        return Asked(job.future, lambda: None)

    def run(self, name: str, sql: str, parameters: Parameters = ()) -> Answer:
        """Answer one SELECT on the calling thread; raises QueryError."""
        with self.submit(name, sql, parameters) as asked:
            answered = asked.future.result(self.patience_s)
        return msgspec.json.decode(answered.content, type=Answer)

    def close(self) -> None:
        """End the child and refuse what waits."""
        with self._lock:
            self._stopping = True
            thread, sandbox = self._thread, self._sandbox
        if sandbox is not None:
            sandbox.kill()
        if thread is not None:
            with suppress(queue.Full):
                self._jobs.put_nowait(None)
            thread.join(CLOSE_S)

    def _gave_up(self, job: _Job) -> None:
        """End a query for which nobody waits, if it is the one at work."""
        with self._lock:
            if job is self._asked and self._sandbox is not None:
                self._sandbox.kill()

    # ---- the thread

    def _live(self) -> None:
        """Answer one after the other; the kernel ends a child with this thread, its maker."""
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                self._let_go()
                continue
            if job is None or self._stopping:
                break
            self._answer(job)
        self._let_go()
        with suppress(queue.Empty):
            while True:
                waiting = job or self._jobs.get_nowait()
                job = None
                self._fail(waiting, QueryUnavailable("the server is shutting down"))

    def _answer(self, job: _Job) -> None:
        if job.future.cancelled():
            return
        try:
            result = self._child(job).ask(job.ask)
        except SandboxFailed as error:
            self._let_go()
            self._fail(job, QueryError(without_paths(str(error))))
        except QueryError as error:
            self._fail(job, error)
        except Exception:  # noqa: BLE001 - the top of a thread: it goes on with the next
            self._log.exception("a query on a recorded file met a fault of the server's own")
            self._let_go()
            self._fail(job, QueryUnavailable("the query met a fault of the server's own"))
        else:
            with suppress(InvalidStateError):
                job.future.set_result(result)
        finally:
            with self._lock:
                self._asked = None

    def _child(self, job: _Job) -> Sandbox:
        """Return the child over a job's file; raises SandboxFailed."""
        usable = self._sandbox is not None and self._sandbox.alive and not self._sandbox.spent
        if not usable or self._opened != job.path:
            self._let_go()
            sandbox = Sandbox()
            with self._lock:
                self._sandbox, self._asked = sandbox, job
            sandbox.open(OpenFile(path=str(job.path.resolve())))
            self._opened = job.path
        with self._lock:
            self._asked = job
            assert self._sandbox is not None
            return self._sandbox

    def _let_go(self) -> None:
        with self._lock:
            sandbox, self._sandbox, self._opened = self._sandbox, None, None
        if sandbox is not None:
            sandbox.close()

    def _fail(self, job: _Job | None, error: QueryError) -> None:
        if job is not None:
            with suppress(InvalidStateError):
                job.future.set_exception(error)


def sent_files(folder: Path) -> list[Path]:
    """Return the files that people sent to a history's folder, oldest first."""
    found = (folder / FOLDER_NAME / SENT).glob(f"*{SUFFIX}")
    return sorted(path for path in found if not path.name.startswith("."))


def keep_newest_sent(folder: Path) -> None:
    """Delete the oldest files that people sent above the bound, and what a crash left."""
    for path in sent_files(folder)[:-SENT_MAX]:
        path.unlink(missing_ok=True)
    for path in (folder / FOLDER_NAME / SENT).glob(f".*{SUFFIX}"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()
