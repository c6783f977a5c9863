"""The OpenAI API end to end: a real server, the openai client and raw sockets, the tiny model.

One server serves the whole file; what a test leaves behind is checked by the next one's waiting
for idle. The tables of refused bodies run without a server: nothing may reach an engine.
"""

import asyncio
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from server.app import Gate
from server.config import ServerConfig
from server.errors import ApiError
from server.generation import choice_seed
from server.schemas import ChatRequest, CompletionRequest, check, decode, prompts
from tests import tiny
from tests.servers import Server, serving

MODEL = "tiny-" + "x" * 600
"""A long name makes each chunk large, so that a client that reads nothing soon blocks a stream."""
MODEL_LEN = 640
KV_BLOCKS = 500
HELLO = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openai")
    model = tiny.write(folder / "tiny")
    flags = ["--served-model-name", MODEL, "--max-num-seqs", "16", "--client-stall-s", "1"]
    flags += ["--max-model-len", str(MODEL_LEN), "--kv-blocks", str(KV_BLOCKS)]
    with serving(folder, model, *flags) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def post(server: Server, path: str, body: object, **headers: str) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=30)


def complete(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    response = post(server, "/v1/completions", {"temperature": 0, "return_token_ids": True} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the JSON of each event of a stream; every line must be data or blank."""
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = list(response.iter_lines())
    assert all(line == "" or line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def still_answers(server: Server) -> None:
    assert complete(server, {"prompt": [5, 6, 7], "max_tokens": 2})["usage"]["total_tokens"] == 5


def ids(count: int) -> list[int]:
    return [3 + index % 256 for index in range(count)]


# ---- answers


def test_chat_answers_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 12, **HELLO}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.model) == (12, MODEL)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[0].choices[0].delta.content
    assert [c.choices[0].delta.role for c in chunks[1:]] == [None] * (len(chunks) - 1)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


def test_completions_answer_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "The scheduler", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_comes_once_and_only_when_asked_for(server: Server, path: str, n: int) -> None:
    body = {"max_tokens": 4, "n": n} | (HELLO if "chat" in path else {"prompt": "hello"})
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert all(
            event["choices"] and "usage" not in event
            for event in events(server, path, body | options)
        )
    told = events(server, path, body | {"stream_options": {"include_usage": True}})
    assert [event["usage"] for event in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1]["choices"] == []
    usage = told[-1]["usage"]
    assert usage["completion_tokens"] == 4 * n
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4 * n
    continuous = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    running = events(server, path, body | continuous)
    counts = [e["usage"]["completion_tokens"] for e in running if e["choices"] and e["usage"]]
    assert max(counts) == 4


def test_stream_options_need_a_stream(server: Server) -> None:
    body = HELLO | {"stream_options": {"include_usage": True}}
    response = post(server, "/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


def test_a_stream_may_pass_proxies_untouched(server: Server) -> None:
    body = HELLO | {"stream": True, "max_tokens": 2}
    headers = {"accept-encoding": "gzip"}
    url = server.url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers) as response:
        response.read()
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert not {"content-length", "content-encoding"} & set(response.headers)


def test_lists_of_prompts_are_choices_in_order(server: Server) -> None:
    alone = [complete(server, {"prompt": p, "max_tokens": 5})["choices"][0] for p in ("a", "b")]
    answer = complete(server, {"prompt": ["a", "b"], "n": 2, "max_tokens": 5})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [alone[0]["text"]] * 2 + [alone[1]["text"]] * 2
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22}
    by_ids = complete(server, {"prompt": [[5, 6], [7]], "max_tokens": 3})
    assert [choice["prompt_token_ids"] for choice in by_ids["choices"]] == [[5, 6], [7]]


def test_seeds_reproduce_and_differ_by_choice(server: Server) -> None:
    asked = {"prompt": "x", "n": 3, "seed": 1, "temperature": 1.0, "max_tokens": 20}
    first, second = (
        [choice["token_ids"] for choice in complete(server, asked)["choices"]] for _ in range(2)
    )
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 3
    alone = complete(server, asked | {"n": 1})["choices"][0]["token_ids"]
    assert alone == first[0]
    other = complete(server, asked | {"seed": None})["choices"][0]["token_ids"]
    assert other != first[0]
    seeds = {choice_seed(seed, index) for seed in (0, 1, -1, 2**63 - 1) for index in range(16)}
    assert len(seeds) == 64
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_a_stream_of_several_choices_is_each_choice_whole(server: Server) -> None:
    asked = {"prompt": ["a", "The scheduler"], "n": 2, "max_tokens": 9, "temperature": 0}
    whole = complete(server, asked)
    texts = dict.fromkeys(range(4), "")
    ends: dict[int, str] = {}
    for event in events(server, "/v1/completions", asked):
        (choice,) = event["choices"]
        assert choice["index"] not in ends
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert set(ends.values()) == {"length"}


def test_stop_strings_cut_streams_and_answers_alike(server: Server) -> None:
    asked: dict[str, Any] = {"prompt": "The scheduler decides", "max_tokens": 40, "temperature": 0}
    solo = complete(server, asked)["choices"][0]
    text = solo["text"]
    stops = [text[0], text[5:8], text[3:12], text[-4:], ["never there", text[9:12], text[9:11]]]
    for stop in stops:
        wanted = [stop] if isinstance(stop, str) else stop
        cut = text[: min(text.find(one) for one in wanted if one in text)]
        answer = complete(server, asked | {"stop": stop})
        assert answer["choices"][0]["text"] == cut
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] <= 40
        told = events(server, "/v1/completions", asked | {"stop": stop})
        assert "".join(event["choices"][0]["text"] for event in told) == cut
        assert told[-1]["choices"][0]["finish_reason"] == "stop"
    server.wait_idle()


def test_stop_token_ids_end_the_text_without_being_it(server: Server) -> None:
    solo = complete(server, {"prompt": "x", "max_tokens": 10})["choices"][0]
    token = solo["token_ids"][4]
    first = solo["token_ids"].index(token)
    answer = complete(server, {"prompt": "x", "max_tokens": 10, "stop_token_ids": [token]})
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == (
        "stop",
        solo["token_ids"][: first + 1],
    )
    assert solo["text"].startswith(choice["text"])
    longer = {"prompt": "x", "max_tokens": 10, "stop_token_ids": [token], "min_tokens": first + 2}
    assert complete(server, longer)["usage"]["completion_tokens"] > first + 1


def test_text_parts_are_the_joined_string(server: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    counts = {
        post(
            server,
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "extra": [1]},
        ).json()["usage"]["prompt_tokens"]
        for content in ("ab", parts)
    }
    assert len(counts) == 1


def test_fifty_requests_of_one_token(server: Server) -> None:
    lengths = (1, 16, 17, 513)

    def one(index: int) -> Any:
        body = {"prompt": ids(lengths[index % 4]), "max_tokens": 1, "temperature": 0}
        if index % 2:
            return events(server, "/v1/completions", body)[-1]["choices"][0]["finish_reason"]
        return complete(server, body)["choices"][0]["finish_reason"]

    with ThreadPoolExecutor(50) as pool:
        assert set(pool.map(one, range(50))) == {"length"}
    server.wait_idle()


def test_models_tell_the_one_limit(client: openai.OpenAI, server: Server) -> None:
    (model,) = client.models.list().data
    assert (model.id, dict(model)["max_model_len"]) == (MODEL, MODEL_LEN)
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
    assert post(server, "/v1/completions", {"prompt": "x", "model": "gpt-5"}).status_code == 404


def test_tokenize_and_back(server: Server) -> None:
    text = "  Der Zug fährt früh\n\t👩‍👩‍👧"
    told = post(server, "/tokenize", {"prompt": text}).json()
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), MODEL_LEN)
    assert post(server, "/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": text}
    chat = post(server, "/tokenize", {"messages": HELLO["messages"]}).json()
    whole = post(server, "/v1/chat/completions", HELLO | {"max_tokens": 1}).json()
    assert chat["count"] == whole["usage"]["prompt_tokens"]
    assert post(server, "/detokenize", {"tokens": [320]}).status_code == 400
    assert post(server, "/tokenize", {}).status_code == 400


# ---- limits


@pytest.mark.parametrize("limit", [1, None])
def test_a_prompt_just_below_the_limit_gets_one_token(server: Server, limit: int | None) -> None:
    answer = complete(server, {"prompt": ids(MODEL_LEN - 1), "max_tokens": limit})
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    for length in (MODEL_LEN, MODEL_LEN + 1, 5000):
        response = post(server, "/v1/completions", {"prompt": ids(length), "max_tokens": limit})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    still_answers(server)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_too_many_tokens_are_refused_before_the_first_byte(server: Server, path: str) -> None:
    body = {"max_tokens": MODEL_LEN} | (HELLO if "chat" in path else {"prompt": "hello"})
    whole, streamed = (post(server, path, body | {"stream": stream}) for stream in (False, True))
    assert whole.status_code == streamed.status_code == 400
    assert whole.json() == streamed.json()
    assert whole.json()["error"]["code"] == "context_length_exceeded"
    assert whole.json()["error"]["param"] == "max_tokens"


def test_what_can_never_fit_the_pool_is_refused_on_record(server: Server) -> None:
    refused = server.metric("iterscope_requests_rejected_total", reason="infeasible")
    too_many = KV_BLOCKS * 16 // 16 - 100 + 1
    assert too_many < MODEL_LEN
    body = {"prompt": ids(100), "n": 16, "max_tokens": too_many, "temperature": 0}
    response = post(server, "/v1/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert server.metric("iterscope_requests_rejected_total", reason="infeasible") == refused + 1
    still_answers(server)


def test_bodies_above_the_limit_are_not_read(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b'{"prompt": "' + b"x" * 65536

    big = 9 * 2**20
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0)) as raw:
        raw.settimeout(10)
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % big)
        assert raw.recv(1000).startswith(b"HTTP/1.1 413 ")
    try:
        response = httpx.post(server.url + "/v1/completions", content=endless(), timeout=20)
        assert response.status_code == 413
    except httpx.TransportError:
        pass  # the server closed the connection while we were still sending
    still_answers(server)


def test_large_texts_leave_the_server_responsive(server: Server) -> None:
    """Five megabytes are refused by their bytes; 200 kB are tokenized beside the event loop."""
    gaps: list[float] = []
    stopping = threading.Event()

    def poll() -> None:
        with httpx.Client() as polling:
            while not stopping.is_set():
                begin = time.monotonic()
                assert polling.get(server.url + "/health").status_code == 200
                gaps.append(time.monotonic() - begin)

    poller = threading.Thread(target=poll)
    poller.start()
    texts = ["word " * 1_000_000, "w" * 5_000_000, "🙂" * 1_000_000, "word " * 8_000]
    messages = [{"role": "user", "content": "turn"}] * 10_000
    refused = [post(server, "/v1/completions", {"prompt": text}) for text in texts]
    refused.append(post(server, "/v1/chat/completions", {"messages": messages}))
    stopping.set()
    poller.join()
    for response in refused:
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert len(gaps) > 5
    assert max(gaps) < 1.0  # encoding any of them on the event loop takes several seconds


# ---- refusals

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
    *(("frequency_penalty", text, "frequency_penalty") for text in ("NaN", "2.5", "0.5", '"1"')),
    *(("presence_penalty", text, "presence_penalty") for text in ("-2.5", "1")),
    *(("logit_bias", text, "logit_bias") for text in ('{"5": 1e308}', '{"-1": 5}', '{"abc": 1}')),
    *(("logprobs", text, "logprobs") for text in ("-1", "100", "0", "true")),
    ("response_format", '{"type": "json_object"}', "response_format"),
    ("guided_json", "{}", "guided_json"),
    ("min_p", "0.1", "min_p"),
)
BAD_CHAT_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("tools", '[{"type": "function"}]', "tools"),
    ("tool_choice", '"auto"', "tool_choice"),
    ("top_logprobs", "20", "top_logprobs"),
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
        prompts(prompt.encode(), vocab_size=320)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": None, "top_p": None, "max_tokens": None, "n": None, "stop": None},
        {"temperature": 2, "top_p": 1, "top_k": -1, "seed": -1, "stop": [], "logit_bias": {}},
        {"logprobs": False, "frequency_penalty": 0, "presence_penalty": 0.0, "tools": []},
        {"tool_choice": "none", "response_format": {"type": "text"}, "user": "u", "store": True},
        {"modalities": ["text"], "metadata": {"a": "b"}, "best_of": 1, "echo": False},
    ],
)
def test_what_asks_for_nothing_is_taken(extra: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"} | extra
    check(decode(json.dumps(body).encode(), ChatRequest))
    if "logprobs" not in extra:
        check(decode(json.dumps(body).encode(), CompletionRequest))


BROKEN_BODIES = {
    "empty": b"",
    "not JSON": b"{'prompt': 'x'}",
    "cut off": b'{"prompt": "x"',
    "a list": b"[]",
    "null": b"null",
    "no prompt": b"{}",
    "half a pair": rb'{"prompt": "\ud800"}',
    "bad UTF-8": b'{"prompt": "\xff"}',
    "deep": b'{"x":' + b"[" * 100_000,
    "deep prompt": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "empty text": b'{"prompt": ""}',
    "one empty text": b'{"prompt": ["", "a"]}',
    "huge max_tokens": b'{"prompt": "x", "max_tokens": 9223372036854775808}',
    "min above max": b'{"prompt": "x", "max_tokens": 1, "min_tokens": 2}',
    "stop id": b'{"prompt": "x", "stop_token_ids": [320]}',
    "negative id": b'{"prompt": [0, -5, 7]}',
    "too many": b'{"prompt": [' + b",".join([b"[1]"] * 600) + b"]}",
}


@pytest.mark.parametrize("name", BROKEN_BODIES)
def test_a_broken_body_is_a_400_and_the_engine_goes_on(server: Server, name: str) -> None:
    response = httpx.post(server.url + "/v1/completions", content=BROKEN_BODIES[name], timeout=30)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    still_answers(server)


def test_the_last_id_of_the_vocabulary_works(server: Server) -> None:
    assert complete(server, {"prompt": [319], "max_tokens": 1})["usage"]["prompt_tokens"] == 1


def test_wrong_paths_and_methods_have_the_same_shape(server: Server) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/requests/nobody", 404),
    ):
        response = httpx.request(method, server.url + path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


# ---- who asks


def test_the_clients_id_is_an_attribute_and_ours_is_unique(server: Server) -> None:
    answers = [
        post(
            server, "/v1/completions", {"prompt": "x", "max_tokens": 1}, **{"x-request-id": "same"}
        )
        for _ in range(2)
    ]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    own = [answer.headers["x-iterscope-request-id"] for answer in answers]
    assert own == [answer.json()["id"] for answer in answers]
    assert own[0] != own[1]
    plain = post(server, "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert plain.headers["x-request-id"] == plain.json()["id"]


@pytest.mark.parametrize("id", ["a b", "x" * 129, "caf\u00e9", "🙂", "tab\there", ""])
def test_a_strange_id_is_refused(server: Server, id: str) -> None:
    headers = {"x-request-id": id.encode()}
    response = httpx.post(
        server.url + "/v1/completions",
        json={"prompt": "x"},
        headers=[(name.encode(), value) for name, value in headers.items()],
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Request-Id")


def gated(key: str | None, **headers: str) -> int:
    """Return the status of a request that passes the gate of a server with this key."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start)
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> int:
        transport = httpx.ASGITransport(Gate(app, ServerConfig(api_key=key)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (
                await client.get(headers.pop("path", "/v1/models"), headers=headers)
            ).status_code

    return asyncio.run(ask())


def test_the_key_guards_everything_but_health() -> None:
    assert gated(None) == 200
    assert gated("secret") == 401
    assert gated("secret", authorization="Bearer wrong") == 401
    assert gated("secret", authorization="Basic secret") == 401
    assert gated("secret", authorization="Bearer secret") == 200
    assert gated("secret", authorization="bearer  secret ") == 200
    assert gated("secret", path="/health") == 200
    assert gated("secret", path="/metrics") == 401
    assert gated("secret", path="/dashboard/") == 401


# ---- clients that leave

LONG = {"prompt": "go on", "max_tokens": 600, "ignore_eos": True, "temperature": 0}


def raw_request(server: Server, body: dict[str, Any]) -> socket.socket:
    """Send a request over a bare socket, which a test can then break as it likes."""
    text = json.dumps(body).encode()
    made = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=20)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text)
    made.sendall(head + text)
    return made


def in_flight(server: Server) -> list[Any]:
    listed: list[Any] = server.get("/v1/requests").json()["data"]
    return listed


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_hang_up_free_everything_within_two_seconds(
    server: Server, stream: bool
) -> None:
    ended = server.metric("iterscope_requests_ended_total", finish="cancelled")
    sockets = [raw_request(server, LONG | {"stream": stream}) for _ in range(20)]
    server.wait(lambda: server.metric("vllm:num_requests_running") == 16)
    assert server.metric("vllm:num_requests_waiting") == 4
    assert server.metric("vllm:kv_cache_usage_perc") > 0
    for made in sockets:
        made.close()
    server.wait_idle(2.0)
    server.wait(lambda: not in_flight(server), 2.0)
    now = server.metric("iterscope_requests_ended_total", finish="cancelled")
    assert now == ended + 20
    still_answers(server)


def test_clients_that_reset_at_once_leave_nothing_behind(server: Server) -> None:
    for index in range(100):
        made = raw_request(server, LONG | {"stream": bool(index % 4)})
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made.close()
    server.wait(lambda: not in_flight(server), 5.0)
    server.wait_idle(5.0)
    still_answers(server)


def test_a_client_that_reads_nothing_is_cut(server: Server) -> None:
    """Twelve choices at over 600 bytes a token fill every buffer long before their end."""
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(("127.0.0.1", httpx.URL(server.url).port or 0))
        body = LONG | {"stream": True, "n": 12}
        text = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        made.sendall(head % len(text) + text)
        server.wait(lambda: "cause=stall" in server.log)
        server.wait_idle()
    still_answers(server)


def test_requests_in_flight_are_listed_without_their_text(server: Server) -> None:
    with raw_request(server, LONG | {"n": 2, "stream": True, "prompt": "a secret"}):
        (shown,) = server.wait(lambda: in_flight(server))
        assert "secret" not in json.dumps(shown)
        assert [one["request_id"] for one in shown["sequences"]] == [
            f"{shown['request_id']}-{index}" for index in range(2)
        ]
    server.wait(lambda: not in_flight(server))


def test_a_request_can_be_cancelled_by_its_id(server: Server) -> None:
    for stream in (True, False):
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, server, "/v1/completions", LONG | {"stream": stream})
            (shown,) = server.wait(lambda: in_flight(server))
            path = f"{server.url}/v1/requests/{shown['request_id']}"
            assert httpx.delete(path).json()["cancelled"]
            assert httpx.delete(path).status_code == 404
            response = answer.result(20)
        assert response.status_code == (200 if stream else 499)
        last = response.text.strip().removeprefix("data: ").rpartition("data: ")[2]
        assert json.loads(last)["error"]["code"] == "request_cancelled"
        assert "[DONE]" not in response.text
    server.wait_idle()
    assert "cause=api" in server.log


# ---- an engine that dies


def engine_pid(server: Server) -> int:
    """Return the engine's process id: the server's child with the most memory."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return max(
        map(int, children.read_text().split()),
        key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]),
    )


def test_a_dead_engine_is_told_and_replaced(server: Server) -> None:
    """The last test of the file: it takes the engine away from everybody."""
    bodies = [LONG | {"stream": stream} for stream in (True, True, False)]
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(post, server, "/v1/completions", body) for body in bodies]
        server.wait(lambda: server.metric("vllm:num_requests_running") == 3)
        os.kill(engine_pid(server), 9)
        server.wait(lambda: server.get("/health").status_code == 503)
        streamed, _, whole = (answer.result(20) for answer in answers)
    assert '"error":{"message":"the engine died' in streamed.text.rpartition("data: ")[2]
    assert "[DONE]" not in streamed.text
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "engine_unavailable")
    refused = post(server, "/v1/completions", {"prompt": "x"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    server.wait(lambda: server.get("/ready").status_code == 200, 60.0)
    still_answers(server)
    server.wait_idle()
