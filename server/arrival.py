"""One request on its way in: its ids, its tenant, and how to refuse it on record.

Owns what is read from a request's headers and the moment its body was read. The handlers of
server/openai_api.py make one each. Must never trust a header: names are bounded and printable, and
none of them is a key of anything.
"""

import uuid

from starlette.requests import Request

from server.answers import Endpoint
from server.context import context_of
from server.decoding import Decoded, decode
from server.errors import ApiError, engine_down, invalid
from server.gate import caller_in
from server.keys import TENANT_CHARS_MAX
from server.queue import QueueFull
from telemetry.records import Rejection, RejectionReason
from telemetry.records import Run as RunRecord

EXTERNAL_ID_CHARS_MAX = 128


class Arrival:
    """One request on its way in: its ids, and how to refuse it on record."""

    def __init__(self, request: Request, endpoint: Endpoint) -> None:
        self.context = context_of(request)
        self.endpoint = endpoint
        self.id = ("chatcmpl-" if endpoint == "chat" else "cmpl-") + uuid.uuid4().hex
        self.external_id = _name_in(request, "X-Request-Id", EXTERNAL_ID_CHARS_MAX)
        caller = caller_in(request.scope)
        named = _name_in(request, "X-Tenant", TENANT_CHARS_MAX)
        # A key that belongs to a tenant speaks for it, whatever the header says.
        self.tenant = (caller and caller.tenant) or named or "default"
        self.received_at_ns = 0

    async def body(self, request: Request, kind: type[Decoded]) -> Decoded:
        """Read and decode the body; the request counts as received from here on."""
        try:
            data = await request.body()
        except QueueFull as full:
            raise self.refused(full.reason, full.answer()) from None
        self.received_at_ns = self.context.clock.now_ns()
        return decode(data, kind)

    def refused(self, reason: RejectionReason, error: ApiError) -> ApiError:
        """Put a refusal on record and return its error."""
        retry_after = error.headers.get("Retry-After")
        self.context.bus.publish(
            Rejection(
                request_id=self.id,
                external_id=self.external_id,
                tenant=self.tenant,
                rejected_at_ns=self.context.clock.now_ns(),
                reason=reason,
                retry_after_s=float(retry_after) if retry_after else None,
            )
        )
        return error

    def run(self) -> RunRecord:
        """Return the limits in force, or refuse: no engine serves now."""
        context = self.context
        if not context.generations.admitting:
            error = engine_down("the server is shutting down", retry_after_s=5)
            raise self.refused("draining", error)
        if context.engine.state != "ready" or context.engine.run is None:
            loading = context.engine.state == "loading"
            text = "the model is loading" if loading else "the engine is down"
            raise self.refused("engine_down", engine_down(text, retry_after_s=2))
        return context.engine.run

    def headers(self) -> dict[str, str]:
        """Return the headers that name the request."""
        return {"x-request-id": self.external_id or self.id, "x-iterscope-request-id": self.id}


def _name_in(request: Request, header: str, chars_max: int) -> str | None:
    """Return what a header names, None when it is absent; refuses what a log should not hold."""
    given = request.headers.get(header)
    if given is None:
        return None
    if len(given) > chars_max or not given or not all("!" <= c <= "~" for c in given):
        raise invalid(header, f"{header} must be 1 to {chars_max} visible ASCII characters")
    return given
