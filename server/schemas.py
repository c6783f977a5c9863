"""What clients may send: the bodies of the OpenAI API, decoded strictly and checked by name.

Owns the request structs, their limits and the table of fields that are not built yet; called by
server/openai_api.py before anything reaches the engine. Unknown fields are ignored; a known one
that would change the answer and is not built is refused. Must raise nothing but ApiError.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.messages import Priority
from server.decoding import check_detail, decode_field
from server.errors import ApiError, invalid, unsupported

STOP_CHARS_MAX = 1000
STOP_TOKEN_IDS_MAX = 128
LOGIT_BIASES_MAX = 1024
PROMPT_IDS_MAX = 2**20
"""Token ids of all prompts of one body."""

Count = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]


Unread = msgspec.Raw | UnsetType
"""A field that is only looked into where it must be: what nobody uses is not worth decoding."""
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA = {
    "oneOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
CALLS_SCHEMA = {"type": ["array", "null"], "items": {"type": "object"}}


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
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    logit_bias: Annotated[dict[int, Bias], Meta(max_length=LOGIT_BIASES_MAX)] | None = None
    response_format: Unread = UNSET
    structured_outputs: Unread = UNSET
    guided_json: Unread = UNSET
    guided_regex: Unread = UNSET
    guided_choice: Unread = UNSET
    guided_grammar: Unread = UNSET
    json_schema: Unread = UNSET
    regex: Unread = UNSET
    ebnf: Unread = UNSET
    grammar: Unread = UNSET
    bad_words: Unread = UNSET
    allowed_token_ids: Unread = UNSET
    use_beam_search: Unread = UNSET
    length_penalty: Unread = UNSET
    stop_regex: Unread = UNSET
    prompt_logprobs: Unread = UNSET
    prompt_embeds: Unread = UNSET
    truncate_prompt_tokens: Unread = UNSET
    logits_processors: Unread = UNSET
    lora_path: Unread = UNSET
    return_tokens_as_token_ids: Unread = UNSET
    spaces_between_special_tokens: Unread = UNSET
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One part of a message's content; only text is taken."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One turn. `content` may be null where the assistant only called tools."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: Annotated[Unread, Meta(extra_json_schema=CALLS_SCHEMA)] = UNSET
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Unread = UNSET
    tool_choice: Unread = UNSET
    functions: Unread = UNSET
    function_call: Unread = UNSET
    modalities: Unread = UNSET
    audio: Unread = UNSET
    web_search_options: Unread = UNSET
    chat_template: Unread = UNSET
    chat_template_kwargs: Unread = UNSET
    documents: Unread = UNSET
    echo: Unread = UNSET
    reasoning_effort: Unread = UNSET
    verbosity: Unread = UNSET
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt` is decoded by `prompts`: four forms share the field.

    `logprobs` true, which some clients send to both endpoints, is 1; false is none. With `echo`,
    max_tokens may be 0: the answer is the prompt, and its scores if asked for.
    """

    prompt: Annotated[msgspec.Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: bool | Alternatives | None = None
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


NOTHING: tuple[object, ...] = (None,)
OFF: tuple[object, ...] = (None, False)
NONE_OF: tuple[object, ...] = (None, [])
HARMLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "response_format": (None, {"type": "text"}),
        **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex"), NOTHING),
        **dict.fromkeys(("guided_choice", "guided_grammar", "json_schema", "regex"), NOTHING),
        **dict.fromkeys(("ebnf", "grammar", "stop_regex", "prompt_logprobs"), NOTHING),
        **dict.fromkeys(("prompt_embeds", "truncate_prompt_tokens", "lora_path"), NOTHING),
        **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors"), NONE_OF),
        **dict.fromkeys(("use_beam_search", "return_tokens_as_token_ids"), OFF),
        **dict.fromkeys(("include_stop_str_in_output", "continue_final_message"), OFF),
        "length_penalty": (None, 1),
        "spaces_between_special_tokens": (None, True),
        "add_special_tokens": NOTHING,
        "skip_special_tokens": (None, True),
        **dict.fromkeys(("tools", "functions", "documents"), NONE_OF),
        **dict.fromkeys(("tool_choice", "function_call"), (None, "none")),
        "modalities": (None, ["text"]),
        **dict.fromkeys(("audio", "web_search_options", "chat_template"), NOTHING),
        "chat_template_kwargs": (None, {}),
        "reasoning_effort": NOTHING,
        "verbosity": (None, "medium"),
        "add_generation_prompt": (None, True),
        "best_of": (None, 1),
        "suffix": (None, ""),
    }
)
"""Fields that are not built yet, with the values that ask for nothing."""

HARMLESS_BYTES_MAX = 64


def check(body: GenerationRequest) -> None:
    """Raise ApiError for what types cannot say: fields not built yet, or that need another."""
    for name, harmless in HARMLESS.items():
        value = getattr(body, name, None)
        if not _asks_for_nothing(name, value, harmless):
            raise unsupported(name)
    if isinstance(body, ChatRequest) and not _asks_for_nothing("echo", body.echo, OFF):
        raise unsupported("echo")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")
    if isinstance(body, ChatRequest) and body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    asked = max_tokens(body)
    if asked == 0 and not (isinstance(body, CompletionRequest) and body.echo):
        raise invalid("max_tokens", "max_tokens 0 is only allowed when echo is true")
    if body.min_tokens and asked is not None and body.min_tokens > asked:
        raise invalid("min_tokens", f"min_tokens {body.min_tokens} is above max_tokens {asked}")


def _asks_for_nothing(name: str, value: object, harmless: tuple[object, ...]) -> bool:
    if value is None or value is UNSET:
        return True
    if isinstance(value, msgspec.Raw):
        raw = bytes(value)
        if len(raw) > HARMLESS_BYTES_MAX:
            return False
        value = decode_field(raw, Any, name)
    # 0 == False in Python, but a number asks for something that false does not.
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless
    )


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


def prompts(raw: bytes, vocab_size: int, *, prompts_max: int, tokens_max: int) -> Prompts:
    """Return the prompts of the field: a string, strings, token ids or arrays of token ids.

    An empty string stays in the list (its tokens decide); empty lists are refused, and so are ids
    outside the vocabulary, fractions, booleans and mixed forms. What holds more than prompts_max
    prompts, or a list of more than tokens_max ids, is refused for its commas alone.
    """
    head = raw.lstrip()[:1]
    if head == b'"':
        text: str = decode_field(raw, str, "prompt")
        return [text]
    if head != b"[":
        raise invalid("prompt", "prompt must be a string, or a list of strings or of token ids")
    first = raw.lstrip()[1:].lstrip()[:1]
    if first == b"]":
        raise invalid("prompt", "prompt must not be empty")
    if first == b'"':
        # Each string has two quotes of its own; those inside have a backslash before them.
        if (raw.count(b'"') - raw.count(b'\\"')) // 2 > prompts_max:
            raise _too_many_prompts(prompts_max)
        texts: list[str] = decode_field(raw, list[str], "prompt")
        return texts
    nested: list[list[int]]
    if first == b"[":
        if raw.count(b"[") - 1 > prompts_max:
            raise _too_many_prompts(prompts_max)
        _check_ids(raw, tokens_max * prompts_max)
        nested = decode_field(raw, list[list[TokenId]], "prompt")
        empty = [index for index, ids in enumerate(nested) if not ids]
        if empty:
            raise invalid(f"prompt[{empty[0]}]", "a prompt must hold at least one token")
    else:
        _check_ids(raw, tokens_max)
        nested = [decode_field(raw, list[TokenId], "prompt")]
    for ids in nested:
        if max(ids) >= vocab_size:
            raise invalid(
                "prompt", f"token id {max(ids)} is outside the vocabulary of {vocab_size} tokens"
            )
    return nested


def _check_ids(raw: bytes, most: int) -> None:
    count = raw.count(b",") + 1
    if count > min(most, PROMPT_IDS_MAX):
        message = f"prompt has {count} token ids; {min(most, PROMPT_IDS_MAX)} could be served"
        raise invalid("prompt", message, code="context_length_exceeded")


def _too_many_prompts(most: int) -> ApiError:
    return invalid("prompt", f"prompt holds more than {most} prompts")


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
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            shown[name] = value
    calls = _tool_calls(f"messages[{index}].tool_calls", message.tool_calls)
    if calls is not None:
        shown["tool_calls"] = calls
    return shown


def _tool_calls(place: str, raw: Unread) -> list[dict[str, Any]] | None:
    """Return calls of an earlier turn as the template wants them, checked for what they cost."""
    if raw is UNSET:
        return None
    check_detail(raw, place)
    found: list[dict[str, Any]] | None = decode_field(
        bytes(raw), list[dict[str, Any]] | None, place
    )
    return found


def _part_text(place: str, part: Part) -> str:
    if part.type != "text":
        raise invalid(f"{place}.type", f"{place}: parts of type {part.type!r} are not supported")
    if part.text is None:
        raise invalid(f"{place}.text", f"{place}: a text part needs text")
    return part.text
