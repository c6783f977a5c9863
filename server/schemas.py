"""What clients may send: the bodies of the OpenAI API, decoded strictly and checked by name.

Owns the request structs, their limits and the table of fields that are not built yet; called by
server/openai_api.py before anything reaches the engine. Unknown fields are ignored; a known one
that would change the answer and is not built is refused. Must raise nothing but ApiError.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.messages import Priority
from server.errors import ApiError, invalid, unsupported

STOP_CHARS_MAX = 1000
STOP_TOKEN_IDS_MAX = 128
LOGIT_BIASES_MAX = 1024

Count = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """What the slo policy aims at for one request, in ms; None is the server's default."""

    ttft_ms: Annotated[float, Meta(gt=0, le=86_400_000)] | None = None
    tpot_ms: Annotated[float, Meta(gt=0, le=86_400_000)] | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints share; None is the default of each."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_TOKEN_IDS_MAX)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    slo: Objective | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    include_metrics: bool | None = None
    user: str | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    logit_bias: Annotated[dict[int, Bias], Meta(max_length=LOGIT_BIASES_MAX)] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content; only text is taken."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. `content` may be null where the assistant only called tools."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt` is decoded by `prompts`: four forms share the field.

    With `echo`, max_tokens may be 0: the answer is the prompt, and its scores if asked for.
    """

    prompt: msgspec.Raw
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Alternatives | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    echo: bool | None = None
    suffix: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a prompt or a chat."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]


HARMLESS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("response_format", (None, {"type": "text"})),
    ("structured_outputs", (None,)),
    ("guided_json", (None,)),
    ("guided_regex", (None,)),
    ("guided_choice", (None,)),
    ("guided_grammar", (None,)),
    ("add_special_tokens", (None,)),
    ("skip_special_tokens", (None, True)),
    ("include_stop_str_in_output", (None, False)),
    ("tools", (None, [])),
    ("tool_choice", (None, "none")),
    ("functions", (None, [])),
    ("function_call", (None, "none")),
    ("modalities", (None, ["text"])),
    ("audio", (None,)),
    ("web_search_options", (None,)),
    ("chat_template", (None,)),
    ("chat_template_kwargs", (None, {})),
    ("add_generation_prompt", (None, True)),
    ("continue_final_message", (None, False)),
    ("best_of", (None, 1)),
    ("suffix", (None, "")),
)
"""Fields that are not built yet, with the values that ask for nothing."""

Body = TypeVar("Body", bound=msgspec.Struct)

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_BYTE = re.compile(r"\(byte (?P<byte>\d+)\)")
_KEY = re.compile(rb'"(?P<name>\w+)"\s*:\s*(?:\{[^{}]*:\s*)?-?\w*$')


def decode(data: bytes, kind: type[Body], path: str = "") -> Body:
    """Return the body as `kind`; ApiError 400 naming the field at fault, in `param`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), path) from error
    except msgspec.DecodeError as error:
        raise _malformed(data, str(error)) from error
    except RecursionError:
        raise invalid(None, "the JSON is nested too deeply") from None


def _named(message: str, path: str) -> ApiError:
    found = _PLACE.match(message)
    assert found is not None
    what, inner = found["what"], found["path"] or ""
    missing = _MISSING.search(what)
    param = (
        path + inner if inner.startswith("[") or not path else ".".join(filter(None, (path, inner)))
    )
    param = param.removesuffix("[...]")  # a value of an object whose keys are the client's
    if missing:
        param = ".".join(filter(None, (param, missing["name"])))
        what = "this field is required"
    return invalid(param or None, f"{param}: {what}" if param else f"the body: {what}")


def _malformed(data: bytes, message: str) -> ApiError:
    """Name the field before the bad byte: NaN and Infinity are the usual case, and not JSON."""
    found = _BYTE.search(message)
    param = None
    if found:
        byte = int(found["byte"])
        key = _KEY.search(data[max(0, byte - 100) : byte + 1])
        param = key["name"].decode() if key else None
    return invalid(param, f"the body is not JSON: {message}")


def check(body: GenerationRequest) -> None:
    """Raise ApiError for what types cannot say: fields not built yet, or that need another."""
    for name, harmless in HARMLESS:
        value = getattr(body, name, None)
        # 0 == False in Python, but logprobs=0 asks for something that false does not.
        if not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless
        ):
            raise unsupported(name)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")
    if isinstance(body, ChatRequest) and body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    asked = max_tokens(body)
    if asked == 0 and not (isinstance(body, CompletionRequest) and body.echo):
        raise invalid("max_tokens", "max_tokens 0 is only allowed when echo is true")
    if body.min_tokens and asked is not None and body.min_tokens > asked:
        raise invalid("min_tokens", f"min_tokens {body.min_tokens} is above max_tokens {asked}")


def max_tokens(body: GenerationRequest) -> int | None:
    """Return the most tokens asked for, or None for the rest of the context."""
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def stops(body: GenerationRequest) -> tuple[str, ...]:
    """Return the stop strings."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


Prompts = Sequence[str | list[int]]


def prompts(raw: bytes, vocab_size: int) -> Prompts:
    """Return the prompts of the field: a string, strings, token ids or arrays of token ids.

    An empty string stays in the list (its tokens decide); empty lists are refused, and so are ids
    outside the vocabulary, fractions, booleans and mixed forms.
    """
    head = raw.lstrip()[:1]
    if head == b'"':
        text: str = _decode_prompt(raw, str)
        return [text]
    if head != b"[":
        raise invalid("prompt", "prompt must be a string, or a list of strings or of token ids")
    first = raw.lstrip()[1:].lstrip()[:1]
    if first == b"]":
        raise invalid("prompt", "prompt must not be empty")
    if first == b'"':
        texts: list[str] = _decode_prompt(raw, list[str])
        return texts
    nested: list[list[int]]
    if first == b"[":
        nested = _decode_prompt(raw, list[list[TokenId]])
        empty = [index for index, ids in enumerate(nested) if not ids]
        if empty:
            raise invalid(f"prompt[{empty[0]}]", "a prompt must hold at least one token")
    else:
        nested = [_decode_prompt(raw, list[TokenId])]
    for ids in nested:
        if max(ids) >= vocab_size:
            raise invalid(
                "prompt", f"token id {max(ids)} is outside the vocabulary of {vocab_size} tokens"
            )
    return nested


def _decode_prompt(raw: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), "prompt") from error
    except msgspec.DecodeError as error:  # a raw field was not looked into before
        raise invalid("prompt", f"the body is not JSON: {error}") from error


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them: text content, no nulls."""
    return [_template_message(index, message) for index, message in enumerate(messages)]


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    place = f"messages[{index}].content"
    content = message.content
    if isinstance(content, list):
        content = "".join(_part_text(f"{place}[{at}]", part) for at, part in enumerate(content))
    if content is None and message.role != "assistant":
        raise invalid(place, f"{place}: a {message.role} message needs content")
    # Templates know no `developer`: it is the newer name of the same role.
    role = "system" if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            shown[name] = value
    return shown


def _part_text(place: str, part: Part) -> str:
    if part.type != "text":
        raise invalid(f"{place}.type", f"{place}: parts of type {part.type!r} are not supported")
    if part.text is None:
        raise invalid(f"{place}.text", f"{place}: a text part needs text")
    return part.text
