"""The request bodies that are held now: each bounded by itself, and all of them together.

Owns the count of bytes; server/gate.py puts a Body between the socket and whoever reads it. What
counts is what has arrived and not what was announced, or an empty promise would take the room of
a real request. Must never hold a body itself.
"""

from starlette.types import Message, Receive

from server.errors import ApiError
from server.queue import Queue, QueueFull


class Bodies:
    """Bytes of bodies from their arrival to the end of their request."""

    def __init__(self, *, each_max: int, all_max: int, queue: Queue) -> None:
        self.held_bytes = 0
        self._each_max = each_max
        self._all_max = all_max
        self._queue = queue

    def check_length(self, length: bytes) -> None:
        """Raise ApiError 413 for a Content-Length beyond the bound, before a byte of it is read."""
        if not length.isdigit() or len(length) > 18 or int(length) > self._each_max:
            raise self._too_large()

    def take(self, part_bytes: int, so_far_bytes: int) -> None:
        """Count a part of a body; raises ApiError 413, or QueueFull when all are too much."""
        self.held_bytes += part_bytes
        if so_far_bytes > self._each_max:
            raise self._too_large()
        if self.held_bytes > self._all_max:
            raise QueueFull("queue_bytes", self._queue.retry_after_s())

    def give_back(self, body_bytes: int) -> None:
        """Count a body whose request is over."""
        self.held_bytes -= body_bytes

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._each_max} bytes"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


class Body:
    """One request's body on its way in; a body without a stated length may be endless."""

    def __init__(self, bodies: Bodies, receive: Receive) -> None:
        self._bodies = bodies
        self._receive = receive
        self._bytes = 0

    async def receive(self) -> Message:
        """Receive a message and count what it brings; raises what Bodies.take raises."""
        message = await self._receive()
        if part := message.get("body"):
            self._bytes += len(part)
            self._bodies.take(len(part), self._bytes)
        return message

    def close(self) -> None:
        """Give back what this body took."""
        self._bodies.give_back(self._bytes)
        self._bytes = 0
