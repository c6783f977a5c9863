"""Named queries over HTTP: the list of them, and one run by its name.

Owns the routes under /telemetry/queries and the reading of their parameters; server/app.py puts
`queries_routes` in its table. A named query runs where POST /telemetry/sql does and answers in the
same shape. Must never put a parameter into a query's text: telemetry/named.py binds them.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.errors import ApiError, invalid
from server.telemetry_api import JSON, answer_sql, read_body
from telemetry.named import Bound, NamedQuery, Parameter, ParameterError, catalogue

BODY = msgspec.json.Decoder(dict[str, str | int | float | None])


async def queries(_: Request) -> Response:
    """GET /telemetry/queries: every named query with its meaning, parameters and SQL."""
    body = {"queries": [listed(query) for query in catalogue().values()]}
    return Response(msgspec.json.encode(body), media_type=JSON)


async def query(request: Request) -> Response:
    """GET or POST /telemetry/queries/{name}: run one, parameters in the address or as a body."""
    bound = bind(request.path_params["name"], await given(request))
    return await answer_sql(request, bound.sql, bound.parameters)


def bind(name: str, values: Mapping[str, object]) -> Bound:
    """Return a query with its parameters; raises ApiError, 404 or the 400 of a parameter."""
    found = catalogue().get(name)
    if found is None:
        raise ApiError(404, "there is no such query; GET /telemetry/queries lists them")
    try:
        return found.bind(values)
    except ParameterError as error:
        raise invalid(error.parameter, str(error), code="bad_parameter") from error


def listed(query: NamedQuery) -> dict[str, Any]:
    """Return what the list tells of a query."""
    return {
        "name": query.name,
        "kind": query.kind,
        "title": query.title,
        "meaning": query.meaning,
        "unit": query.unit,
        "chart": query.chart,
        "windowed": query.windowed,
        "parameters": [_parameter(parameter) for parameter in query.parameters],
        "sql": query.sql,
    }


queries_routes = (
    Route("/telemetry/queries", queries, methods=["GET"]),
    Route("/telemetry/queries/{name}", query, methods=["GET", "POST"]),
)


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "type": parameter.type,
        "required": parameter.required,
        "default": parameter.default,
        "min": parameter.low,
        "max": parameter.high,
        "doc": parameter.doc,
    }


async def given(request: Request) -> dict[str, object]:
    """Return the parameters of the address, and those of a POST's body; raises ApiError."""
    pairs: list[tuple[str, object]] = list(request.query_params.multi_items())
    if request.method == "POST" and (body := await read_body(request)):
        try:
            pairs += BODY.decode(body).items()
        except msgspec.DecodeError as error:
            message = f"the body must be an object of parameters: {error}"
            raise invalid(None, message) from error
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise invalid(name, f"{name} is given twice")
    return dict(pairs)
