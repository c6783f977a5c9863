"""Requests by their ids: what is in flight, why one was slow, and the end of one.

Owns the handlers of /v1/requests; server/app.py puts them in its table. An explanation comes from
the ring, or from the history where the ring no longer reaches back to the request's arrival. Must
never show a word of a prompt unless --show-prompts says so, and never go through iterations on the
event loop.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.context import Context, context_of
from server.errors import ApiError
from server.gate import caller_in
from server.generation import Generation
from server.openai_api import answer
from telemetry.answer import QueryError
from telemetry.explain_case import Case, case_from_bus, case_from_history
from telemetry.explanation import explain
from telemetry.records import Delivery, RequestStart

FLUSH_S = 1.0


async def requests_in_flight(request: Request) -> Response:
    """Answer GET /v1/requests: what is in flight, without a word of it."""
    context = context_of(request)
    now = context.clock.now_ns()
    queue = context.engine.queue
    shown = [
        {
            "request_id": generation.id,
            "external_id": generation.job.external_id,
            "endpoint": generation.job.style.endpoint,
            "stream": generation.job.stream,
            "age_ms": (now - generation.job.received_at_ns) / 1e6,
            "sequences": [
                {
                    "request_id": choice.sequence.request_id,
                    "state": "waiting" if queue.holds(choice.sequence.request) else "running",
                    "prompt_tokens": len(choice.sequence.submission.prompt),
                    "output_tokens": choice.output_tokens,
                    "max_tokens": choice.sequence.submission.max_tokens,
                }
                for choice in generation.choices
            ],
        }
        for generation in context.generations.live()
    ]
    return answer({"object": "list", "data": shown})


async def explain_request(request: Request) -> Response:
    """Answer GET /v1/requests/{id}: where every millisecond of it went, so far or in all."""
    context = context_of(request)
    asked = request.path_params["id"]
    live = _live_named(context, asked)
    deliveries = {
        sequence.request: delivery for one in live for sequence, delivery in one.deliveries()
    }
    body = await asyncio.to_thread(_explained, context, asked, deliveries)
    if body is None and live:
        body = await asyncio.to_thread(_not_in_yet, context, live[-1])
    if body is None:
        raise ApiError(404, "no request on record has this id", code="request_not_found")
    return Response(body, media_type="application/json")


def _live_named(context: Context, asked: str) -> list[Generation]:
    """Return the requests in flight that an id may mean, oldest first."""
    found = context.generations.find(asked)
    if found is not None:
        return [found]
    return [one for one in context.generations.live() if one.job.external_id == asked]


def _explained(context: Context, asked: str, deliveries: Mapping[int, Delivery]) -> bytes | None:
    """Return the explanation of what an id names, as JSON."""
    case = case_from_bus(context.bus, asked)
    if case is None or not case.whole:
        case = _older(context, asked) or case
    if case is None:
        return None
    if case.delivery is None:
        case = replace(case, delivery=deliveries.get(case.start.request))
    return msgspec.json.encode(_with_prompt(context, explain(case)))


def _with_prompt(context: Context, body: dict[str, Any]) -> dict[str, Any]:
    """Add the prompt where the operator shows prompts; without that there is no such field."""
    if context.prompts is not None:
        body["prompt"] = context.prompts.of(body["request_id"])
    return body


def _older(context: Context, asked: str) -> Case | None:
    """Return the case as the history has it, None where that has none or keeps nothing."""
    history = context.history
    if not history.status().kept:
        return None
    history.flush(FLUSH_S)
    try:
        return case_from_history(history.queries.run, asked)
    except (QueryError, TimeoutError):
        return None


def _not_in_yet(context: Context, generation: Generation) -> bytes:
    """Explain a request that is on its way to the engine: nothing of it is on record yet."""
    sequence, delivery = generation.deliveries()[0]
    submission = sequence.submission
    start = RequestStart(
        request=sequence.request,
        request_id=submission.request_id,
        external_id=submission.external_id,
        parent_id=submission.parent_id,
        tenant=submission.tenant,
        arrived_at_ns=context.clock.now_ns(),
        prompt_tokens=len(submission.prompt),
        max_tokens=submission.max_tokens,
        priority=submission.priority,
        slo=submission.slo,
        stream=submission.stream,
    )
    case = Case(
        run_id=context.bus.run_id,
        began_unix_us=None,
        start=start,
        end=None,
        delivery=delivery,
        share=None,
        tiles=[],
        prior_step=None,
        names={},
        prompts={},
        matches=[generation.id],
        whole=True,
        told={},
    )
    return msgspec.json.encode(_with_prompt(context, explain(case)))


async def cancel_request(request: Request) -> Response:
    """Answer DELETE /v1/requests/{id}: the whole HTTP request of this id is cancelled."""
    context = context_of(request)
    generation = context.generations.find(request.path_params["id"])
    caller = caller_in(request.scope)
    if generation is None or (caller and caller.tenant not in (None, generation.job.tenant)):
        raise ApiError(404, "no request in flight has this id", code="request_not_found")
    failure = ApiError(499, "the request was cancelled", code="request_cancelled")
    generation.cancel("api", failure)
    return answer({"id": generation.id, "object": "request", "cancelled": True})


ROUTES = (
    Route("/v1/requests", requests_in_flight, methods=["GET"]),
    Route("/v1/requests/{id:path}", explain_request, methods=["GET"]),
    Route("/v1/requests/{id}", cancel_request, methods=["DELETE"]),
)
