"""Faults that servers of this kind had at their API, tried on a real server with a real client.

Each test names the public report whose kind it stands for. Whatever is refused, two streams that
run beside it say what they say alone, and a short request is answered afterwards.
"""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests import tiny
from tests.api import complete, events, post, raw_request, settle
from tests.servers import Server, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VOCAB = tiny.Shape.vocab_size
HEALTHY = {"prompt": "A request waits", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reports-api")
    with serving(folder, tiny.write(folder / "model"), "--max-model-len", "512") as running:
        yield running


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    yield running_server
    settle(running_server)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def raw(server: Server, path: str, text: str) -> httpx.Response:
    # No certificates are read for a plain connection: they cost more than the request.
    return httpx.post(server.url + path, content=text.encode(), timeout=30, verify=False)


def bodies_with(field: str, value: str) -> list[tuple[str, str]]:
    """Return a chat and a completion with a field of raw JSON in it."""
    chat = f'"messages": [{{"role": "user", "content": "x"}}], "{field}": {value}'
    plain = f'"prompt": "x", "{field}": {value}'
    return [
        (path, f'{{"max_tokens": 1, {text}, "stream": {stream}}}')
        for path, text in ((CHAT, chat), (COMPLETIONS, plain))
        for stream in ("false", "true")
    ]


BAD_NUMBERS = (
    *(("temperature", text) for text in ("NaN", "Infinity", "-1", "2.0001", '"0.7"', "1e400")),
    *(("temperature", text) for text in ("true", "[]")),
    *(("top_p", text) for text in ("0", "-0.1", "1.1", "NaN")),
    *(("frequency_penalty", text) for text in ("NaN", "-2.1", "2.1")),
    *(("presence_penalty", text) for text in ("Infinity", '"1"')),
    *(("n", text) for text in ("0", "-1", "1000")),
    *(("seed", text) for text in (str(2**64), "1.5")),
    *(("logprobs", text) for text in ("-1", "100")),
)


def test_no_bad_number_passes(server: Server) -> None:
    """Rapid-MLX#740: NaN slipped through comparisons, and broke even the error's own JSON."""
    for field, value in BAD_NUMBERS:
        for path, text in bodies_with(field, value):
            answer = raw(server, path, text)
            assert answer.status_code == 400, (path, text)
            error = json.loads(answer.text, parse_constant=pytest.fail)["error"]
            assert error["param"] == field


def test_nothing_refused_reaches_the_engine(server: Server) -> None:
    before = server.metric("iterscope_requests_accepted_total")
    for most in ("-1", "0", "1.5", str(2**63)):
        for path in (CHAT, COMPLETIONS):
            prompts = '"prompt": "x", "messages": [{"role": "user", "content": "x"}]'
            text = f'{{{prompts}, "max_tokens": {most}}}'
            assert raw(server, path, text).json()["error"]["param"] == "max_tokens"
    assert server.metric("iterscope_requests_accepted_total") == before


def test_streams_go_on_while_biases_are_refused(server: Server) -> None:
    """vllm#16529: a token id beyond the vocabulary killed the engine for everybody."""
    alone = complete(server, HEALTHY)["choices"][0]["text"]
    texts: list[str] = []

    def stream() -> None:
        found = events(server, COMPLETIONS, HEALTHY)
        texts.append("".join(one["choices"][0]["text"] for one in found))

    healthy = [threading.Thread(target=stream) for _ in range(2)]
    for thread in healthy:
        thread.start()
    keys = (str(VOCAB), "-1", "99999999999", "99999999999999999999999", "abc", "")
    biases = [json.dumps({key: 5}) for key in keys]
    biases += ['{"5": 1e308}', '{"5": "NaN"}', '{"5": NaN}', '{"5": 101}', "[[5, 1]]"]
    biases.append(json.dumps({str(key): 1 for key in range(2000)}))
    for bias in biases:
        for path, text in bodies_with("logit_bias", bias):
            answer = raw(server, path, text)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")
    for thread in healthy:
        thread.join()
    assert texts == [alone, alone]


@pytest.mark.parametrize(
    "fields",
    [
        *({"prompt": prompt} for prompt in ("", [""], [], ["", "a"], [[]], None)),
        {},
        {"messages": []},
        *(
            {"messages": [{"role": "user", "content": content}]}
            for content in ([{"type": "text"}], None, 5, {"type": "text", "text": "a"})
        ),
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "foo", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ],
)
def test_what_says_nothing_is_refused(server: Server, fields: dict[str, Any]) -> None:
    """vllm#7632 and llama.cpp#8367: an empty prompt ended the loop; parts were printed."""
    path = CHAT if "messages" in fields else COMPLETIONS
    answer = post(server, path, fields | {"max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(("prompt", "messages"))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "user", "content": []},
        {"role": "system", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
        {"role": "user", "content": "a", "name": "me", "unknown": {"x": [1]}},
        {"role": "tool", "content": "a", "tool_call_id": "1"},
    ],
)
def test_messages_that_say_little_are_taken(server: Server, message: dict[str, Any]) -> None:
    answer = post(server, CHAT, {"messages": [message], "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_usage_is_where_it_was_asked_for(client: openai.OpenAI, server: Server) -> None:
    """apfel#100: an unasked usage chunk without choices broke those that index them."""
    asked: dict[str, Any] = {"model": "model", "max_tokens": 3, "stream": True}
    asked["messages"] = [{"role": "user", "content": "hello"}]
    asked |= {"extra_body": {"ignore_eos": True}}
    for options in (None, {"include_usage": False}):
        more = {} if options is None else {"stream_options": options}
        for chunk in client.chat.completions.create(**asked, **more):
            assert chunk.choices
            assert chunk.usage is None
    for n in (1, 2):
        *chunks, last = client.chat.completions.create(
            **asked, n=n, stream_options={"include_usage": True}
        )
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)
        assert (last.choices, last.usage.completion_tokens) == ([], 3 * n)
    stream = client.chat.completions.create(**asked | {"max_tokens": 400})
    for _ in range(3):
        next(stream)
    stream.close()
    server.wait_idle(5)


@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 1, "temperature": 1},
        {"top_p": 0.01, "temperature": 1},
        {"logit_bias": {"70": -100}, "temperature": 0},
        {"min_p": 1, "temperature": 2},
    ],
)
def test_scores_are_numbers_whatever_is_masked(server: Server, extra: dict[str, Any]) -> None:
    """vllm#10234: tokens masked to -inf could not be told in JSON."""
    body = {"max_tokens": 4, "ignore_eos": True} | extra
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    plain = {"prompt": "xyz", "logprobs": 5, "echo": True}
    for path, one in ((CHAT, chat), (COMPLETIONS, plain)):
        whole = post(server, path, body | one)
        assert whole.status_code == 200
        found = json.loads(whole.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]
        values = (
            [token["logprob"] for token in found["content"]]
            if path == CHAT
            else [value for value in found["token_logprobs"] if value is not None]
        )
        assert values
        assert all(math.isfinite(value) and value >= -9999 for value in values)
        assert events(server, path, body | one)


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [
        *(([bad], 0) for bad in (-1, VOCAB, 1.5, True, None, 2**70)),
        ([0, -5, 7], 0),
        ([[1], ["a"]], 0),
        (["a", [1]], 0),
        ([VOCAB - 1], 1),
        ([[1, 2], [3]], 2),
        (["a", "b", "c"], 3),
    ],
)
def test_arrays_of_ids_are_checked_at_both_ends(
    server: Server, prompt: list[Any], choices: int
) -> None:
    """vllm#51795: a negative id indexed from the end of the embedding table."""
    answer = post(server, COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
    if not choices:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("prompt")
        return
    assert [one["index"] for one in answer.json()["choices"]] == list(range(choices))


def test_samples_of_one_request_are_apart(server: Server) -> None:
    """vllm#16863: samples overwrote one another."""
    body = {"prompt": ["a", "b"], "n": 2, "temperature": 1, "seed": 1, "max_tokens": 20}
    first, again = (complete(server, body) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert texts == [choice["text"] for choice in again["choices"]]
    greedy = complete(server, {"prompt": "a", "n": 3, "temperature": 0, "max_tokens": 8})
    assert len({choice["text"] for choice in greedy["choices"]}) == 1
    gone = raw_request(server, body | {"stream": True, "max_tokens": 400, "ignore_eos": True})
    server.wait(lambda: server.get("/v1/requests").json()["data"])
    gone.close()
    server.wait_idle(5)


def test_two_streams_of_one_name_end_apart(server: Server) -> None:
    """vllm#10583: the client's id was the engine's key; cancelling one of two cancelled both."""

    async def run() -> tuple[str, str]:
        headers = {"X-Request-Id": "same"}
        body = HEALTHY | {"stream": True, "max_tokens": 300}
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=30) as client,
            client.stream("POST", COMPLETIONS, json=body, headers=headers) as one,
            client.stream("POST", COMPLETIONS, json=body, headers=headers) as other,
        ):
            ids = [answer.headers["x-iterscope-request-id"] for answer in (one, other)]
            assert ids[0] != ids[1]
            await client.delete(f"/v1/requests/{ids[0]}")
            return (await one.aread()).decode(), (await other.aread()).decode()

    cancelled, whole = asyncio.run(run())
    assert whole.endswith("data: [DONE]\n\n")
    assert whole.count('"text"') > cancelled.count('"text"')


def test_a_prefix_found_in_the_cache_is_told(server: Server) -> None:
    """The usage says what was not computed, in one piece, in a stream and for each prompt."""
    prompt = [9, *range(3, 103)]
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    found = [complete(server, body)["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in found]
    assert cached == [0, 96]
    *_, last = events(server, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    several = complete(server, body | {"prompt": [prompt, [7, 7]], "n": 2})["usage"]
    assert several["prompt_tokens_details"]["cached_tokens"] == 96
    assert several["prompt_tokens"] == len(prompt) + 2


@pytest.mark.parametrize("chunked", [True, False])
def test_prompts_around_the_step_budget(tmp_path_factory: Any, chunked: bool) -> None:
    """vllm-tt#436: with chunks off, a prompt above the budget was admitted and never ran."""
    folder = tmp_path_factory.mktemp("budget")
    flags = ["--max-num-batched-tokens", "256", "--max-num-seqs", "8"]
    flags.append("--enable-chunked-prefill" if chunked else "--no-enable-chunked-prefill")
    with serving(folder, tiny.write(folder / "model"), *flags, parrot=True) as server:
        for length in (1, 255, 256, 257, 600):
            ids = [3 + index % 200 for index in range(length)]
            (choice,) = complete(server, {"prompt": ids, "max_tokens": 4})["choices"]
            assert choice["token_ids"] == [ids[index % length] for index in range(4)]
