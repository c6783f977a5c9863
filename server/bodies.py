"""The request bodies that are held now: each bounded by itself, and all of them together.

Owns the count of bytes; server/gate.py puts a Body between the socket and whoever reads it. What
counts is what has arrived and not what was announced, or an empty promise would take the room of
a real request. A file goes to the disk as it comes: it has a bound of its own, and counts for
nobody else. Must never hold a body itself.
"""

from starlette.types import Message, Receive

from server.errors import ApiError
from server.queue import Queue, QueueFull


class Bodies:
    """Bytes of bodies from their arrival to the end of their request."""

    def __init__(self, *, each_max: int, file_max: int, all_max: int, queue: Queue) -> None:
        self.held_bytes = 0
        self._each_max = each_max
        self._file_max = file_max
        self._all_max = all_max
        self._queue = queue

    def check_length(self, length: bytes, *, file: bool = False) -> None:
        """Raise ApiError 413 for a Content-Length beyond the bound, before a byte of it is read."""
        if not length.isdigit() or len(length) > 18:
            raise self._too_large(file)
        self.check_size(int(length), file=file)

    def check_size(self, body_bytes: int, *, file: bool) -> None:
        """Raise ApiError 413 for a body, or a file, that is larger than one may be."""
        if body_bytes > (self._file_max if file else self._each_max):
            raise self._too_large(file)

    def take(self, part_bytes: int) -> None:
        """Count a part of a body; raises QueueFull when all of them are too much."""
        self.held_bytes += part_bytes
        if self.held_bytes > self._all_max:
            raise QueueFull("queue_bytes", self._queue.retry_after_s())

    def give_back(self, body_bytes: int) -> None:
        """Count a body whose request is over."""
        self.held_bytes -= body_bytes

    def _too_large(self, file: bool) -> ApiError:
        message = f"the body is larger than {self._each_max} bytes (--body-bytes-max)"
        if file:
            message = f"the file is larger than {self._file_max} bytes (--file-bytes-max)"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


class Body:
    """One request's body on its way in; a body without a stated length may be endless."""

    def __init__(self, bodies: Bodies, receive: Receive, *, file: bool = False) -> None:
        self._bodies = bodies
        self._receive = receive
        self._file = file
        self._bytes = 0
        self._held = 0

    async def receive(self) -> Message:
        """Receive a message and count what it brings; raises what Bodies.take raises."""
        message = await self._receive()
        if part := message.get("body"):
            self._bytes += len(part)
            self._bodies.check_size(self._bytes, file=self._file)
            if not self._file:
                self._held += len(part)
                self._bodies.take(len(part))
        return message

    def close(self) -> None:
        """Give back what this body took."""
        self._bodies.give_back(self._held)
        self._held = 0
