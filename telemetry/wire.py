"""What the server and the process of a query say to each other, and how it is framed.

Owns the messages and the reading and writing of frames on a socket: four bytes of length, then
MessagePack. sandbox.py speaks it on the server's side, query_child.py on the other. What comes from
the child is checked as if a stranger had written it: its length before its bytes, then its types.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from telemetry.answer import SQL_CHARACTERS_MAX, Format, QueryError

Scalar = str | int | float | bool | None
Parameters = Sequence[object]
"""Of a query: scalars, or the query is refused."""

HEAD_BYTES = 4
ANSWER_BYTES_MAX = 16 * 2**20
"""Most bytes of one answer's rows."""
FRAME_BYTES_MAX = 2 * ANSWER_BYTES_MAX
"""Most bytes that a child may send at once: rows and their columns' names."""


class OpenFile(msgspec.Struct, frozen=True, tag=True):
    """First message: answer from one recorded file."""

    path: str


class OpenFolder(msgspec.Struct, frozen=True, tag=True):
    """First message: answer from a history that no server holds."""

    path: str


class OpenTail(msgspec.Struct, frozen=True, tag=True):
    """First message: answer from segments and from rows that will be fed.

    Of each run in `covered` the segments hold all up to that seq: such rows of the tail are hidden.
    """

    segments: list[str]
    covered: dict[str, int]


class Feed(msgspec.Struct, frozen=True, tag=True):
    """Rows for the tail by table. After `Filled` those that filled it already are left out."""

    rows: dict[str, list[list[Any]]]


class Filled(msgspec.Struct, frozen=True, tag=True):
    """The tail's first rows are sent; asks for a Ready once they are taken in."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """One SELECT; `deadline_s` is the child's own, should nobody be left to end it."""

    sql: str
    parameters: list[Scalar]
    format: Format
    rows_max: int
    deadline_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child can go on. `left_out` are files that it could not read, each with why."""

    landlock: int
    left_out: dict[str, str] = {}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child cannot open what it must, and ends; `locked` when another process holds a file."""

    message: str
    locked: bool = False


class Answered(msgspec.Struct, frozen=True, tag=True):
    """The answer's bytes; `spent` when the child has grown too large to be asked again."""

    content: bytes
    row_count: int
    truncated: bool
    spent: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """There is no answer: why, and where in the query."""

    message: str
    position: int | None
    spent: bool


Opening = OpenFile | OpenFolder | OpenTail
Request = Opening | Feed | Filled | Ask
Reply = Ready | Failed | Answered | Refused


def question(
    sql: str, parameters: Parameters, *, format: Format, rows_max: int, deadline_s: float
) -> Ask:
    """Return a query that can cross; raises QueryError for one that cannot."""
    if len(sql) > SQL_CHARACTERS_MAX:
        raise QueryError(f"a query has at most {SQL_CHARACTERS_MAX} characters")
    scalars = [one for one in parameters if one is None or isinstance(one, str | int | float)]
    if len(scalars) != len(parameters):
        raise QueryError("a parameter is a text, a number, true, false or null")
    ask = Ask(
        sql=sql,
        parameters=scalars,
        format=format,
        rows_max=rows_max,
        deadline_s=deadline_s,
    )
    try:
        frame(ask)
    except OverflowError:
        raise QueryError("a parameter is an integer of more than 64 bits") from None
    except UnicodeEncodeError:
        raise QueryError("the query is not valid Unicode") from None
    return ask


def encode_feed(rows: Mapping[str, Sequence[Sequence[object]]]) -> bytes:
    """Return the frame of a Feed; made once, sent to each child."""
    return frame({"type": Feed.__name__, "rows": rows})


def frame(message: object) -> bytes:
    """Return a message as bytes on the socket; raises OverflowError beyond 64 bits."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def read_request(channel: socket.socket) -> Request | None:
    """Return the next message of the server, waiting for it; None when it is gone."""
    head = _read(channel, HEAD_BYTES, None)
    body = head and _read(channel, int.from_bytes(head, "big"), None)
    return msgspec.msgpack.decode(body, type=Request) if body else None


def read_reply(channel: socket.socket, deadline_at: float) -> Reply | None:
    """Return the child's next message; None when it is gone or says what nobody should.

    Raises TimeoutError at `deadline_at` on time.monotonic.
    """
    head = _read(channel, HEAD_BYTES, deadline_at)
    if head is None or (length := int.from_bytes(head, "big")) > FRAME_BYTES_MAX:
        return None
    body = _read(channel, length, deadline_at)
    try:
        return msgspec.msgpack.decode(body, type=Reply) if body else None
    except msgspec.DecodeError:
        return None


def _read(channel: socket.socket, length: int, deadline_at: float | None) -> bytearray | None:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        if deadline_at is not None:
            left_s = deadline_at - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            channel.settimeout(left_s)
        try:
            count = channel.recv_into(view)
        except ConnectionError:
            return None
        if count == 0:
            return None
        view = view[count:]
    return content
