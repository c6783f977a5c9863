"""The OpenAI API: chat, completions, models and tokens.

Owns the handlers of /v1, /tokenize and /detokenize; server/app.py puts them in its table. A handler
checks everything that can be refused before the first byte, then hands a Job over. Must never
queue what cannot run: whatever the engine accepted fits an empty engine.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.answers import Style
from server.arrival import Arrival
from server.chat_template import Message, no_template
from server.context import Context, context_of
from server.decoding import decode
from server.engine_client import EngineDown
from server.errors import ApiError, engine_down, invalid
from server.generation import Job
from server.queue import QueueFull
from server.sampling import check_tokens, sampling_of
from server.schemas import (
    PROMPT_IDS_MAX,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    check,
    max_tokens,
    prompts,
    stops,
    template_messages,
)
from server.streaming import GenerationResponse
from server.verbatim import mark_controls
from telemetry.records import Run as RunRecord

ALOUD_MESSAGES_MAX = 256
"""The control tokens of longer chats are marked off the event loop."""


async def chat_completions(request: Request) -> Response:
    """Answer POST /v1/chat/completions."""
    arrival = Arrival(request, "chat")
    body = await arrival.body(request, ChatRequest)
    _check(arrival.context, body)
    run = arrival.run()
    prompt = await _chat_prompt(arrival.context, body.messages, run.model_len_max)
    return _generate(arrival, body, run, [prompt])


async def completions(request: Request) -> Response:
    """Answer POST /v1/completions."""
    arrival = Arrival(request, "completions")
    body = await arrival.body(request, CompletionRequest)
    context = arrival.context
    _check(context, body)
    most = context.config.sequences_max
    given = prompts(
        bytes(body.prompt),
        context.spec.vocab_size,
        prompts_max=most,
        tokens_max=context.spec.model_len,
    )
    if len(given) * (body.n or 1) > most:
        raise invalid("prompt", f"{len(given)} prompts x n {body.n or 1} exceed {most} sequences")
    run = arrival.run()
    ids: list[list[int]] = []
    for index, prompt in enumerate(given):
        if isinstance(prompt, list):
            ids.append(prompt)
        else:
            place = f"prompt[{index}]" if len(given) > 1 else "prompt"
            ids.append(await _encode(context, prompt, place, run.model_len_max))
    if not body.echo:
        return _generate(arrival, body, run, ids)
    hidden = [
        context.tokenizer.prefix_tokens(prompt, tokens) if isinstance(prompt, str) else 0
        for prompt, tokens in zip(given, ids, strict=True)
    ]
    return _generate(arrival, body, run, ids, hidden)


def _check(context: Context, body: GenerationRequest) -> None:
    check(body)
    if body.model is not None and body.model not in context.model_names:
        known = ", ".join(context.model_names)
        message = f"the model {body.model!r} does not exist; this server has {known}"
        raise ApiError(404, message, param="model", code="model_not_found")
    check_tokens(body, context.spec.vocab_size)


async def _chat_prompt(
    context: Context, messages: list[ChatMessage], model_len_max: int
) -> list[int]:
    if context.template is None:
        raise no_template(context.template_fault)
    shown = template_messages(messages)
    chars = sum(len(message["content"]) for message in shown)
    if len(shown) > ALOUD_MESSAGES_MAX or context.tokenizer.is_long(chars):
        marked, mark = await context.tokenizer.aside(_marked, context, shown)
    else:
        marked, mark = _marked(context, shown)
    text = await context.template.render(marked)
    return await _encode(context, text, "messages", model_len_max, mark=mark)


def _marked(context: Context, shown: list[dict[str, Any]]) -> tuple[Sequence[Message], str]:
    """Return a chat with a mark in what must not be taken for a control token, and the mark."""
    try:
        return mark_controls(shown, context.tokenizer.spelled)
    except RecursionError:
        raise invalid("messages", "messages are nested too deeply") from None


async def _encode(
    context: Context, text: str, param: str, model_len_max: int, *, mark: str | None = None
) -> list[int]:
    """Return the ids of a prompt; refuses what cannot fit, unencoded where bytes alone tell.

    With a `mark`, even an empty one, the text is a rendered chat: it has all it needs around it.
    """
    floor = context.tokenizer.tokens_floor(text.replace(mark, "") if mark else text)
    if floor >= model_len_max:
        raise _too_long(param, f"at least {floor}", model_len_max)
    if mark:
        ids = await context.tokenizer.encode_marked(text, mark)
    else:
        ids = await context.tokenizer.encode(text, add_special=mark is None)
    if not ids:
        raise invalid(param, f"{param} holds no tokens, and this model has none to begin with")
    if max(ids) >= context.spec.vocab_size:
        raise invalid(param, f"{param} holds a token that the model does not know")
    return ids


def _too_long(param: str, tokens: str, model_len_max: int) -> ApiError:
    message = (
        f"this model's context is {model_len_max} tokens, one of them for the answer; "
        f"{param} has {tokens}"
    )
    return invalid(param, message, code="context_length_exceeded")


def _limits(
    arrival: Arrival, body: GenerationRequest, run: RunRecord, ids: Sequence[list[int]]
) -> list[int]:
    """Return max_tokens for each prompt; refuses what the context or the KV pool cannot hold.

    Absent, it is the rest of the context, as far as n sequences of it fit the pool together.
    """
    asked = max_tokens(body)
    if asked == 0:
        asked = 1  # a prompt that is only shown is computed as if one token were wanted
    n = body.n or 1
    pool = run.kv_blocks_total * run.block_tokens
    limits = []
    for prompt in ids:
        room = run.model_len_max - len(prompt)
        if room < 1:
            param = "messages" if arrival.endpoint == "chat" else "prompt"
            raise _too_long(param, str(len(prompt)), run.model_len_max)
        if asked is not None and asked > room:
            message = (
                f"this model's context is {run.model_len_max} tokens; "
                f"{len(prompt)} of the prompt and max_tokens {asked} exceed it"
            )
            raise invalid(_limit_name(body), message, code="context_length_exceeded")
        if arrival.context.config.engine.batching != "continuous":
            # A fixed batch reserves all of it, so that "the rest" would fill the pool.
            room = min(room, arrival.context.config.engine.static_max_tokens)
        limit = asked or min(room, pool // n - len(prompt))
        if limit < 1 or n * (len(prompt) + limit) > pool:
            message = (
                f"n {n} x ({len(prompt)} prompt tokens + max_tokens {max(limit, 1)}) can never "
                f"fit the KV cache of {pool} tokens"
            )
            named = "n" if n > 1 else _limit_name(body)
            raise arrival.refused("infeasible", invalid(named, message))
        limits.append(limit)
    return limits


def _limit_name(body: GenerationRequest) -> str:
    newer = isinstance(body, ChatRequest) and body.max_completion_tokens is not None
    return "max_completion_tokens" if newer else "max_tokens"


def _generate(
    arrival: Arrival,
    body: GenerationRequest,
    run: RunRecord,
    ids: list[list[int]],
    echo: list[int] | None = None,
) -> Response:
    """Submit the checked request and return its answer; `echo` as a Job has it."""
    context = arrival.context
    limits = _limits(arrival, body, run, ids)
    options = body.stream_options
    style = Style(
        endpoint=arrival.endpoint,
        id=arrival.id,
        created=int(time.time()),
        model=context.model,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
    )
    job = Job(
        style=style,
        external_id=arrival.external_id,
        tenant=arrival.tenant,
        prompts=ids,
        n=body.n or 1,
        max_tokens=limits,
        sampling=sampling_of(body),
        stops=stops(body),
        priority=body.priority or 0,
        slo=msgspec.json.encode(body.slo).decode() if body.slo else None,
        cache_salt=_cache_salt(context, arrival.tenant, body.cache_salt),
        stream=bool(body.stream),
        received_at_ns=arrival.received_at_ns,
        tokenized_at_ns=context.clock.now_ns(),
        echo=echo,
        alone=max_tokens(body) == 0,
        receipt=bool(body.include_metrics),
    )
    try:
        generation = context.generations.start(job)
    except EngineDown:
        error = engine_down("the engine is down", retry_after_s=2)
        raise arrival.refused("engine_down", error) from None
    except QueueFull as full:
        raise arrival.refused(full.reason, full.answer()) from None
    return GenerationResponse(
        context.generations,
        generation,
        headers=arrival.headers(),
        client_stall_s=context.config.client_stall_s,
    )


def _cache_salt(context: Context, tenant: str, given: str | None) -> str:
    """Return what sequences must have in common to reuse each other's blocks."""
    isolated = context.config.engine.prefix_cache_isolation == "tenant"
    return f"{tenant if isolated else ''}/{given or ''}"


def answer(content: object, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    body = msgspec.json.encode(content)
    return Response(body, media_type="application/json", headers=headers)


async def models(request: Request) -> Response:
    """Answer GET /v1/models."""
    return answer({"object": "list", "data": [_model(context_of(request))]})


async def model(request: Request) -> Response:
    """Answer GET /v1/models/{name}."""
    context = context_of(request)
    name = request.path_params["name"]
    if name not in context.model_names:
        raise ApiError(404, f"the model {name!r} does not exist", code="model_not_found")
    return answer(_model(context))


def _model(context: Context) -> dict[str, object]:
    run = context.engine.run
    return {
        "id": context.model,
        "object": "model",
        "created": context.clock.started_unix_us // 1_000_000,
        "owned_by": "iterscope",
        "max_model_len": run.model_len_max if run else None,
    }


async def tokenize(request: Request) -> Response:
    """Answer POST /tokenize."""
    context = context_of(request)
    body = decode(await request.body(), TokenizeRequest)
    longest = context.engine.run.model_len_max if context.engine.run else context.spec.model_len
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "either prompt or messages is required")
    if body.messages is not None:
        ids = await _chat_prompt(context, body.messages, longest)
    else:
        assert body.prompt is not None
        special = body.add_special_tokens is not False
        ids = await context.tokenizer.encode(body.prompt, add_special=special)
    return answer({"tokens": ids, "count": len(ids), "max_model_len": longest})


async def detokenize(request: Request) -> Response:
    """Answer POST /detokenize."""
    context = context_of(request)
    data = await request.body()
    if data.count(b",") > PROMPT_IDS_MAX:
        raise invalid("tokens", f"more than {PROMPT_IDS_MAX} token ids")
    body = decode(data, DetokenizeRequest)
    vocab = context.spec.vocab_size
    if body.tokens and max(body.tokens) >= vocab:
        raise invalid("tokens", f"a token id is outside the vocabulary of {vocab} tokens")
    return answer({"prompt": await context.tokenizer.decode(body.tokens)})


ROUTES = (
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{name:path}", model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
)
