"""The process that runs people's SQL: views over read-only files and the newest rows in memory.

Owns that process from its first line to its last; sandbox.py starts it with a socket and tells it
what to open. It confines itself before it looks at any file or query, answers one query at a time,
and ends when the server does. Must never write anywhere, and imports neither server nor engine.
"""

import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb

from telemetry.answer import Caps, QueryError, QuerySpoiled, answer
from telemetry.catalog import Part, attach, columns_of, fit, open_catalog, seal, show, without_empty
from telemetry.confinement import confine, step_back
from telemetry.database import HistoryLocked, HistoryUnavailable, one_line, show_folder
from telemetry.schema import LOST_TABLE, table_ddl
from telemetry.wire import (
    ANSWER_BYTES_MAX,
    Answered,
    Ask,
    Failed,
    Feed,
    Filled,
    OpenFile,
    OpenFolder,
    Opening,
    OpenTail,
    Ready,
    Refused,
    Reply,
    frame,
    read_request,
)

TAIL = "tail"
GROWTH_BYTES_MAX = 256 * 2**20
"""A child that has grown by more is replaced: what a large query took rarely comes back."""
DEADLINE_MARGIN_S = 1.0
WAITING_ROWS_MAX = 256
SEQ, TO_SEQ = 2, 3
"""Place of the column that orders rows of a run; telemetry_lost has it one later."""

WARM_UP = """SELECT TIMESTAMPTZ '2026-11-30 00:00:00+00', DATE '2026-11-30', TIME '00:00',
  INTERVAL 1 SECOND, 1.5::DECIMAL(4, 1), gen_random_uuid(), [1], {'a': 1}, MAP {1: 2}, 'x'::BLOB"""
"""One value of each kind, so that whatever turns them into objects is loaded while it can be."""


class QueryChild:
    """The database of one child, and how far its tail has come."""

    def __init__(self, channel: socket.socket, parent: int) -> None:
        self._channel = channel
        self._parent = parent
        self._connection = open_catalog()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._resident_at_first = 0
        self._waiting: defaultdict[str, list[list[Any]]] = defaultdict(list)
        self._through: dict[str, int] = {}
        self._filled = False

    def run(self) -> None:
        """Answer until the server closes the channel."""
        while (request := read_request(self._channel)) is not None:
            match request:
                case OpenFile() | OpenFolder() | OpenTail():
                    self._reply(self._open(request))
                case Feed():
                    self._feed(request.rows)
                case Filled():
                    self._take_in()
                    self._filled = True
                    self._resident_at_first = self._resident_bytes()
                    step_back()
                    self._reply(Ready(landlock=0))
                case Ask():
                    self._reply(self._answer(request))

    # ---- opening

    def _open(self, opening: Opening) -> Reply:
        """Confine this process, then open what it is for; from here on no file and no setting."""
        connection = self._connection
        with connection.cursor() as cursor:
            answer(cursor, WARM_UP, (), Caps(rows_max=1, bytes_max=ANSWER_BYTES_MAX))
        assert len(os.listdir("/proc/self/task")) == 1, "a thread would stay unconfined"
        landlock = confine(_readable(opening), self._parent)
        left_out: dict[str, str] = {}
        try:
            match opening:
                case OpenFile():
                    self._open_file(Path(opening.path))
                case OpenFolder():
                    show_folder(connection, Path(opening.path))
                case OpenTail():
                    left_out = self._open_tail(opening)
        except HistoryUnavailable as error:
            return Failed(message=str(error), locked=isinstance(error, HistoryLocked))
        seal(connection)
        if not isinstance(opening, OpenTail):
            step_back()
        self._resident_at_first = self._resident_bytes()
        return Ready(landlock=landlock, left_out=left_out)

    def _open_file(self, path: Path) -> None:
        try:
            attach(self._connection, path, "file")
        except duckdb.Error as error:
            raise HistoryUnavailable(f"{path} cannot be read: {one_line(str(error))}") from error
        columns = columns_of(self._connection, ["file"])["file"]
        if not columns or fit(columns)[0] in ("newer", "other"):
            raise HistoryUnavailable(f"{path} is not a record that this version can read")
        show(self._connection, [Part(alias="file", columns=columns)], first=True)

    def _open_tail(self, opening: OpenTail) -> dict[str, str]:
        """Attach the segments and begin the tail; return what could not be attached, and why."""
        connection = self._connection
        left_out: dict[str, str] = {}
        aliases = []
        for number, name in enumerate(opening.segments):
            alias = f"segment{number}"
            try:
                attach(connection, Path(name), alias)
            except duckdb.Error as error:
                left_out[name] = one_line(str(error))
            else:
                aliases.append(alias)
        connection.execute(f"ATTACH ':memory:' AS {TAIL}")
        with connection.cursor() as cursor:
            cursor.execute(f"USE {TAIL}")
            for statement in table_ddl():
                cursor.execute(statement)
        found = columns_of(connection, [*aliases, TAIL])
        segments = [Part(alias=alias, columns=found[alias]) for alias in aliases]
        parts = without_empty(connection, segments)
        parts.append(Part(alias=TAIL, columns=found[TAIL], hidden=opening.covered))
        show(connection, parts, first=True)
        return left_out

    # ---- following

    def _feed(self, rows: Mapping[str, list[list[Any]]]) -> None:
        """Keep rows until there are many or somebody asks: a transaction costs more than a row.

        After the filling, those that it had already are known by their seq.
        """
        for table, given in rows.items():
            place = TO_SEQ if table == LOST_TABLE else SEQ
            self._waiting[table] += self._new_ones(given, place)
        if sum(map(len, self._waiting.values())) >= WAITING_ROWS_MAX:
            self._take_in()

    def _take_in(self) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(f"USE {TAIL}")
            cursor.execute("BEGIN")
            for table, rows in self._waiting.items():
                appender = cursor.appender(table)
                appender.append_rows(rows)
                appender.flush()
            cursor.execute("COMMIT")
        self._waiting.clear()

    def _new_ones(self, rows: list[list[Any]], place: int) -> list[list[Any]]:
        if self._filled:
            return [row for row in rows if row[place] > self._through.get(row[0], 0)]
        for row in rows:
            self._through[row[0]] = max(self._through.get(row[0], 0), row[place])
        return rows

    # ---- answering

    def _answer(self, request: Ask) -> Reply:
        if self._waiting:
            self._take_in()
        caps = Caps(rows_max=request.rows_max, bytes_max=ANSWER_BYTES_MAX, format=request.format)
        # The server kills this process at the deadline; this is for when the server is gone.
        signal.setitimer(signal.ITIMER_REAL, request.deadline_s + DEADLINE_MARGIN_S)
        try:
            with self._connection.cursor() as cursor:
                body = answer(cursor, request.sql, request.parameters, caps)
        except QueryError as error:
            spent = isinstance(error, QuerySpoiled) or self._spent()
            return Refused(message=error.message, position=error.position, spent=spent)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return Answered(
            content=body.content,
            row_count=body.row_count,
            truncated=body.truncated,
            spent=self._spent(),
        )

    def _spent(self) -> bool:
        return self._resident_bytes() - self._resident_at_first > GROWTH_BYTES_MAX

    def _resident_bytes(self) -> int:
        pages = int(os.pread(self._statm, 100, 0).split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _reply(self, reply: Reply) -> None:
        self._channel.sendall(frame(reply))
        if isinstance(reply, Failed):
            raise SystemExit(1)


def _readable(opening: Opening) -> list[Path]:
    """Return the files and folders that it may open, a write-ahead log beside a file included."""
    if isinstance(opening, OpenTail):
        return [Path(name) for name in opening.segments]
    path = Path(opening.path)
    return [path, path.with_name(path.name + ".wal")]


def main(arguments: list[str]) -> None:
    """Run the child on the socket and for the parent that the arguments name."""
    descriptor, parent = map(int, arguments)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with socket.socket(fileno=descriptor) as channel:
        QueryChild(channel, parent).run()


if __name__ == "__main__":
    main(sys.argv[1:])
