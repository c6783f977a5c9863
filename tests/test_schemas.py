"""Request bodies: what is refused names its field, and what asks for nothing is taken.

No server runs here: nothing in these tables may reach an engine.
"""

import json
import time
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from engine.messages import SamplingParams
from server.decoding import decode
from server.errors import ApiError
from server.sampling import check_tokens, sampling_of
from server.schemas import ChatRequest, CompletionRequest, check, prompts

BAD_FIELDS: tuple[tuple[str, str, str], ...] = (
    *(("temperature", text, "temperature") for text in ("NaN", "Infinity", "-Infinity", "-1")),
    *(("temperature", text, "temperature") for text in ("2.0001", '"0.7"', "1e400", "true", "[]")),
    *(("top_p", text, "top_p") for text in ("0", "-0.1", "1.1", "NaN", "true")),
    *(("top_k", text, "top_k") for text in ("-2", "1.5", "true", '"5"')),
    *(("max_tokens", text, "max_tokens") for text in ("-1", "0", "1.5", '"5"', "true")),
    *(("n", text, "n") for text in ("0", "-1", "17", "1.0", "true")),
    *(("seed", text, "seed") for text in (str(2**64), "1.5", str(-(2**63) - 1), '"1"')),
    *(("stop", text, "stop") for text in ('""', "5", "{}")),
    *(("stop", text, "stop[0]") for text in ('["", "x"]', "[5]")),
    ("stop", json.dumps(["x"] * 17), "stop"),
    *(("stop_token_ids", text, "stop_token_ids[0]") for text in ("[-1]", "[1.5]", "[true]")),
    *(("min_tokens", text, "min_tokens") for text in ("-1", "1.5")),
    ("priority", str(2**31), "priority"),
    ("ignore_eos", "1", "ignore_eos"),
    ("stream", '"yes"', "stream"),
    *(("frequency_penalty", text, "frequency_penalty") for text in ("NaN", "2.5", "[]", '"1"')),
    *(("presence_penalty", text, "presence_penalty") for text in ("-2.5", "Infinity", "true")),
    *(("repetition_penalty", text, "repetition_penalty") for text in ("0", "-1", "2.1", "NaN")),
    *(("min_p", text, "min_p") for text in ("-0.1", "1.1", "NaN", '"0.1"', "true")),
    *(("logit_bias", text, "logit_bias") for text in ('{"5": 1e308}', '{"abc": 1}', '{"5": null}')),
    *(
        ("logit_bias", text, "logit_bias")
        for text in ('{"5": "NaN"}', '{"5": NaN}', '{"": 1}', "[]")
    ),
    *(
        ("logit_bias", text, "logit_bias")
        for text in ('{"5": 100.5}', '{"5": -101}', '{"5": true}')
    ),
    ("logit_bias", json.dumps({str(token): 1 for token in range(2000)}), "logit_bias"),
    *(("logprobs", text, "logprobs") for text in ("-1", "100", '"1"', "1.5", "[]")),
    ("response_format", '{"type": "json_object"}', "response_format"),
    ("guided_json", "{}", "guided_json"),
    ("repetition_penalty", "5e-324", "repetition_penalty"),  # 0 in the engine's precision
    *(
        (name, text, name)
        for name, text in (
            ("regex", '"a+"'),
            ("grammar", '"root ::= x"'),
            ("json_schema", "{}"),
            ("bad_words", '["a"]'),
            ("allowed_token_ids", "[1]"),
            ("use_beam_search", "true"),
            ("length_penalty", "0.5"),
            ("prompt_logprobs", "1"),
            ("truncate_prompt_tokens", "5"),
            ("lora_path", '"x"'),
            ("spaces_between_special_tokens", "false"),
            ("response_format", json.dumps({"type": "json_schema", "x": "y" * 500})),
        )
    ),
)
BAD_CHAT_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("tools", '[{"type": "function"}]', "tools"),
    ("tool_choice", '"auto"', "tool_choice"),
    ("echo", "true", "echo"),
    ("reasoning_effort", '"high"', "reasoning_effort"),
    ("chat_template", '"{{ messages }}"', "chat_template"),
    ("top_logprobs", "20", "top_logprobs"),
    *(("top_logprobs", text, "top_logprobs") for text in ("-1", "21", "true", "2.0")),
    *(("logprobs", text, "logprobs") for text in ("1", "0")),
    ("max_completion_tokens", "0", "max_completion_tokens"),
    ("messages", "[]", "messages"),
    ("messages", "null", "messages"),
    ("messages", "{}", "messages"),
    ("continue_final_message", "true", "continue_final_message"),
)
BAD_PROMPTS: tuple[tuple[str, str], ...] = (
    *((text, "prompt") for text in ("null", "5", "{}", "[]", "true", "1.5")),
    *((text, "prompt[0]") for text in ("[-1]", "[1.5]", "[true]", "[[]]", "[null]")),
    *((text, "prompt[1]") for text in ("[0, -5, 7]", '["a", [1]]', "[[1], 3]", '[1, "a"]')),
    *((text, "prompt[1][0]") for text in ('[[1], ["a"]]', "[[1], [-2]]")),
    ("[320]", "prompt"),
    ("[[1, 2], [3, 99999]]", "prompt"),
)


@pytest.mark.parametrize(("field", "value", "param"), BAD_FIELDS)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_bad_field_is_named(kind: Any, field: str, value: str, param: str) -> None:
    rest = '"messages": [{"role": "user", "content": "x"}], "prompt": "x"'
    with pytest.raises(ApiError) as caught:
        check(decode(f'{{{rest}, "{field}": {value}}}'.encode(), kind))
    assert (caught.value.status, caught.value.param) == (400, param)
    json.loads(caught.value.body())


@pytest.mark.parametrize(("field", "value", "param"), BAD_CHAT_FIELDS)
def test_a_bad_chat_field_is_named(field: str, value: str, param: str) -> None:
    fields = {"messages": '[{"role": "user", "content": "x"}]', field: value}
    body = ", ".join(f'"{name}": {text}' for name, text in fields.items())
    with pytest.raises(ApiError) as caught:
        check(decode(f"{{{body}}}".encode(), ChatRequest))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(("prompt", "param"), BAD_PROMPTS)
def test_a_bad_prompt_is_named(prompt: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        prompts(prompt.encode(), vocab_size=320, prompts_max=8, tokens_max=100)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": None, "top_p": None, "max_tokens": None, "n": None, "stop": None},
        {"temperature": 2, "top_p": 1, "top_k": -1, "seed": -1, "stop": [], "logit_bias": {}},
        {"logprobs": False, "frequency_penalty": 0, "presence_penalty": 0.0, "tools": []},
        {"tool_choice": "none", "response_format": {"type": "text"}, "user": "u", "store": True},
        {"modalities": ["text"], "metadata": {"a": "b"}, "best_of": 1, "echo": False},
        {"logit_bias": None, "min_p": 0, "repetition_penalty": 1, "top_logprobs": 0},
    ],
)
def test_what_asks_for_nothing_is_taken(extra: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"} | extra
    check(decode(json.dumps(body).encode(), ChatRequest))
    if "logprobs" not in extra:
        check(decode(json.dumps(body).encode(), CompletionRequest))


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"logit_bias": {"320": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"7": 1, "99999999999999999999": 1}}, "logit_bias"),
        ({"stop_token_ids": [319, 320]}, "stop_token_ids"),
    ],
)
def test_tokens_outside_the_vocabulary_are_named(extra: dict[str, Any], param: str) -> None:
    body = decode(json.dumps({"prompt": "x"} | extra).encode(), CompletionRequest)
    check(body)
    with pytest.raises(ApiError) as caught:
        check_tokens(body, 320)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_every_parameter_reaches_the_engine_by_its_name() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "319": 100.0},
        "seed": 7,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [4],
    }
    expected = SamplingParams(
        **(given | {"logit_bias": ((5, -100.0), (319, 100.0)), "stop_token_ids": (4,)})
    )
    text: Any = {"prompt": "x"} | given
    chat: Any = {"messages": [{"role": "user", "content": "x"}]} | given

    def completion(**more: Any) -> SamplingParams:
        return sampling_of(decode(json.dumps(text | more).encode(), CompletionRequest))

    assert completion() == expected
    assert completion(echo=True) == expected
    assert completion(logprobs=0) == replace(expected, logprobs=0)
    assert completion(logprobs=3, echo=True) == replace(expected, logprobs=3, prompt_logprobs=3)
    for more, count in (
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ):
        body = decode(json.dumps(chat | more).encode(), ChatRequest)
        check(body)
        assert sampling_of(body) == replace(expected, logprobs=count)


@pytest.mark.parametrize("most", [0, 1])
def test_no_tokens_may_be_asked_for_with_echo_alone(most: int) -> None:
    for extra, refused in (({"echo": True}, False), ({"echo": False}, most == 0), ({}, most == 0)):
        text = json.dumps({"prompt": "x", "max_tokens": most} | extra).encode()
        with pytest.raises(ApiError) if refused else nullcontext() as caught:
            check(decode(text, CompletionRequest))
        assert caught is None or caught.value.param == "max_tokens"


MEGABYTES = 4 * 2**20
DEAR = {
    "unknown lists": b'{"x":[' + b"[]," * (MEGABYTES // 3) + b"[]]}",
    "tools": b'{"tools":[' + b"[]," * (MEGABYTES // 3) + b"[]]}",
    "messages": b'{"messages":[' + b'{"role":"user","content":"a"},' * (MEGABYTES // 30) + b"{}]}",
    "parts": b'{"messages":[{"role":"user","content":['
    + b'{"type":"text"},' * (MEGABYTES // 16)
    + b"{}]}]}",
    "stop": b'{"messages":[],"stop":[' + b'"a",' * (MEGABYTES // 4) + b'"a"]}',
    "stop_token_ids": b'{"messages":[],"stop_token_ids":[' + b"1," * (MEGABYTES // 2) + b"1]}",
    "logit_bias": b'{"messages":[],"logit_bias":{' + b'"1":1,' * (MEGABYTES // 6) + b'"1":1}}',
    "digits": b'{"messages":[],"seed":' + b"9" * MEGABYTES + b"}",
    "depth": b'{"tools":' + b"[" * MEGABYTES,
}


@pytest.mark.parametrize("name", DEAR)
def test_a_body_that_is_dear_to_decode_is_refused_before(name: str) -> None:
    """Decoded, each of these costs from half a second to three seconds of the event loop."""
    began = time.process_time()
    with pytest.raises(ApiError) as caught:
        decode(DEAR[name], ChatRequest)
    assert caught.value.status == 400
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize("value", ["NaN", "[1e9999]", '"\\udfaa"', '["\\x"]', '"\\u12"'])
def test_what_is_looked_into_late_is_json_all_the_same(value: str) -> None:
    """JSONTestSuite's own finds: a field that nobody decodes was a 500 once it was compared."""
    messages = '"messages": [{"role": "user", "content": "x"}]'
    with pytest.raises(ApiError) as caught:
        check(decode(f'{{{messages}, "response_format": {value}}}'.encode(), ChatRequest))
    assert caught.value.status == 400


@pytest.mark.parametrize("unit", [b"1,", b"[1],", b'"a",', b"[],"])
def test_a_prompt_of_too_many_is_counted_before_it_is_made(unit: bytes) -> None:
    raw = b"[" + (unit * (MEGABYTES // len(unit)))[:-1] + b"]"
    began = time.process_time()
    with pytest.raises(ApiError) as caught:
        prompts(raw, vocab_size=320, prompts_max=512, tokens_max=2048)
    assert caught.value.status == 400
    assert time.process_time() - began < 0.1
