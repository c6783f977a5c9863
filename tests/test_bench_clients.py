"""The very requests that load generators send, and their answers read as each of them reads.

Bodies and readers were made after the programs' own code (guidellm 0.8, aiperf 0.13, vLLM's and
sglang's serving benchmarks, evalscope); `make clients` runs the first two themselves. Each reader
here stops at what would stop the program.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.servers import Server, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = "The scheduler decides again"
USAGE = {"include_usage": True}
CONTINUOUS = USAGE | {"continuous_usage_stats": True}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "guidellm chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}]}],
            "max_completion_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "stream": True,
            "stream_options": CONTINUOUS,
        },
    ),
    "guidellm completions": (
        COMPLETIONS,
        {
            "prompt": WORDS,
            "max_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "stream": True,
            "stream_options": CONTINUOUS,
        },
    ),
    "aiperf chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": WORDS}],
            "max_completion_tokens": 8,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
    "vllm chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}]}],
            "max_completion_tokens": 8,
            "ignore_eos": True,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
    "vllm completions": (
        COMPLETIONS,
        {
            "prompt": WORDS,
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "ignore_eos": True,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
    "vllm completions of ids": (
        COMPLETIONS,
        {
            "prompt": [5, 6, 7, 8],
            "repetition_penalty": 1.0,
            "max_tokens": 1,
            "logprobs": 1,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
    "sglang completions": (
        COMPLETIONS,
        {
            "prompt": WORDS,
            "best_of": 1,
            "max_tokens": 8,
            "stream": True,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 2,
        },
    ),
    "sglang chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": WORDS}],
            "max_completion_tokens": 8,
            "stream": True,
            "temperature": 0.0,
            "ignore_eos": True,
        },
    ),
    "evalscope ids": (
        COMPLETIONS,
        {
            "prompt": [5, 6, 7, 8],
            "max_tokens": 8,
            "min_tokens": 8,
            "frequency_penalty": 0.1,
            "repetition_penalty": 1.0,
            "logprobs": True,
            "n": 1,
            "seed": 42,
            "stop": ["\n\n\n\n"],
            "stop_token_ids": [2],
            "stream": True,
            "stream_options": USAGE,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 50,
        },
    ),
    "evalscope chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": WORDS}],
            "max_tokens": 8,
            "logprobs": True,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bench-clients")
    flags = ("--served-model-name", "m")
    with serving(folder, tiny.write(folder / "tiny"), *flags) as running:
        yield running


def streamed(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks, each line read by itself and taken for JSON whatever it is."""
    chunks = []
    url = server.url + path
    with httpx.stream("POST", url, json={"model": "m"} | body, timeout=30, verify=False) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            data = line.strip().removeprefix("data: ")
            if data and data != "[DONE]":
                chunks.append(json.loads(data))
    return chunks


def text_of(chunk: dict[str, Any]) -> str:
    """Return the first choice's text, as readers take it that know no chunk without one."""
    choice = chunk["choices"][0]
    found: str | None = choice["delta"].get("content") if "delta" in choice else choice["text"]
    return found or ""


@pytest.mark.parametrize("name", REQUESTS)
def test_a_load_generators_request_is_answered_as_it_reads(server: Server, name: str) -> None:
    path, body = REQUESTS[name]
    most = body.get("max_completion_tokens") or body["max_tokens"]
    chunks = streamed(server, path, body)
    asked = body.get("stream_options", {}).get("include_usage")
    last = chunks.pop() if asked else None
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    "".join(map(text_of, chunks))
    assert chunks[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    if last is None:
        assert all("usage" not in chunk for chunk in chunks)
        return
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == most
    assert last["usage"]["prompt_tokens"] > 0
    if body["stream_options"].get("continuous_usage_stats"):
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
        assert counts == sorted(counts)
        assert counts[-1] == most
    else:
        assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_same_in_one_piece(server: Server, name: str) -> None:
    path, body = REQUESTS[name]
    plain = {key: value for key, value in body.items() if not key.startswith("stream")}
    answer = httpx.post(server.url + path, json=plain | {"model": "m", "stream": False}, timeout=30)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    (choice,) = found["choices"]
    assert choice["message"]["content"] if path == CHAT else choice["text"]
    assert found["usage"]["completion_tokens"] > 0


def test_what_they_ask_besides(server: Server) -> None:
    """guidellm asks /health and /v1/models first, aiperf scrapes /metrics all the time."""
    (model,) = server.get("/v1/models").json()["data"]
    assert model["id"] == "m"
    assert server.get("/health").status_code == 200
    assert "vllm:num_requests_running" in server.get("/metrics").text
