"""The API described as OpenAPI 3.1, made from the route table and the structs that bodies become.

Owns the document and, by hand, what types cannot say of answers; GET /openapi.json answers with
it. What no route serves is not in it and what one serves is, so it cannot be out of date. Must
never hold a path of its own.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from server.schemas import (
    HARMLESS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

Schema = dict[str, Any]

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")

BODIES: Mapping[str, type[msgspec.Struct]] = MappingProxyType(
    {
        "chat_completions": ChatRequest,
        "completions": CompletionRequest,
        "tokenize": TokenizeRequest,
        "detokenize": DetokenizeRequest,
    }
)
"""The struct that the body of a handler becomes, by the handler's name."""

ANSWERS: Mapping[str, str] = MappingProxyType(
    {
        "chat_completions": "ChatCompletion",
        "completions": "Completion",
        "models": "Models",
        "model": "Model",
        "tokenize": "Tokens",
        "detokenize": "Text",
    }
)
"""The schema of a handler's answer, by the handler's name; the others' are any JSON, or no JSON."""

STREAMED = frozenset({"chat_completions", "completions"})


def _named(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(kind: str) -> Schema:
    return {"type": [kind, "null"]}


def answer_schemas() -> dict[str, Schema]:
    """Return the schemas of answers, by name."""
    count: Schema = {"type": "integer", "minimum": 0}
    text: Schema = {"type": "string"}
    reason: Schema = {"enum": ["stop", "length"]}
    message = _object(role={"const": "assistant"}, content=text)
    choice = {"index": count, "logprobs": _or_null("object"), "finish_reason": reason}

    def completion(kind: str, **shown: Schema) -> Schema:
        return _object(
            id=text,
            object={"const": kind},
            created=count,
            model=text,
            choices=_list(_object(**choice, **shown)),
            usage=_named("Usage"),
        )

    return {
        "Usage": _object(
            prompt_tokens=count,
            completion_tokens=count,
            total_tokens=count,
            prompt_tokens_details=_object(cached_tokens=count),
        ),
        "ChatCompletion": completion("chat.completion", message=message),
        "Completion": completion("text_completion", text=text),
        "Model": _object(
            id=text,
            object={"const": "model"},
            created=count,
            owned_by=text,
            max_model_len=_or_null("integer"),
        ),
        "Models": _object(object={"const": "list"}, data=_list(_named("Model"))),
        "Tokens": _object(tokens=_list(count), count=count, max_model_len=count),
        "Text": _object(prompt=text),
        "Error": _object(
            error=_object(
                message=text, type=text, param=_or_null("string"), code=_or_null("string")
            )
        ),
    }


def body_schemas() -> dict[str, Schema]:
    """Return the schemas of bodies, by name; fields that are not built take what asks nothing."""
    _, schemas = msgspec.json.schema_components(
        list(BODIES.values()), ref_template="#/components/schemas/{name}"
    )
    for schema in schemas.values():
        for name in HARMLESS.keys() & schema.get("properties", {}).keys():
            schema["properties"][name] = {
                "enum": list(HARMLESS[name]),
                "description": "not supported yet: only what asks for nothing is taken",
            }
    if echo := schemas["ChatRequest"]["properties"].get("echo"):
        echo["enum"] = [None, False]
    return schemas


def document(routes: Iterable[BaseRoute]) -> Schema:
    """Return the OpenAPI document of the routes that serve programs."""
    paths: dict[str, Schema] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            path = _PARAMETER.sub(r"{\1}", route.path)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Iterscope", "version": version("iterscope")},
        "paths": paths,
        "components": {
            "schemas": body_schemas() | answer_schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: Route) -> Schema:
    name = route.name
    summary = (inspect.getdoc(route.endpoint) or name).splitlines()[0]
    answered: Schema = {"*/*": {}}
    if name in ANSWERS:
        answered = {"application/json": {"schema": _named(ANSWERS[name])}}
    if name in STREAMED:
        answered["text/event-stream"] = {}
    error = {"application/json": {"schema": _named("Error")}}
    operation: Schema = {
        "summary": summary,
        "responses": {
            "200": {"description": "the answer", "content": answered},
            "default": {"description": "an error", "content": error},
        },
    }
    if name in BODIES:
        content = {"application/json": {"schema": _named(BODIES[name].__name__)}}
        operation["requestBody"] = {"required": True, "content": content}
    if parameters := _PARAMETER.findall(route.path):
        operation["parameters"] = [
            {"name": one, "in": "path", "required": True, "schema": {"type": "string"}}
            for one in parameters
        ]
    return operation


async def openapi(request: Request) -> Response:
    """Answer GET /openapi.json: this API as OpenAPI 3.1."""
    found = msgspec.json.encode(document(request.app.routes))
    return Response(found, media_type="application/json")


ROUTES = (Route("/openapi.json", openapi, methods=["GET"]),)
