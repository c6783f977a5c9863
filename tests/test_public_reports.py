"""Faults that servers of this kind really had (hangs, leaks, wrong output), tried on a real server.

Each test names the public report whose kind it stands for. One server with a small pool, prefix
caching on, chunked prefill: whatever is thrown at it, a short request is answered afterwards and
running, waiting and used blocks are back at zero.
"""

import asyncio
import random
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.api import complete, ids, post, raw_request, settle
from tests.servers import Server, serving

BLOCK, BLOCKS, MODEL_LEN = 16, 64, 1024


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reports")
    flags = (
        *("--kv-blocks", str(BLOCKS), "--block-size", str(BLOCK)),
        *("--max-num-batched-tokens", "64", "--max-num-seqs", "16"),
    )
    with serving(folder, tiny.write(folder / "model"), *flags) as server:
        yield server


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    yield running_server
    settle(running_server)


async def together(server: Server, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        calls: list[Coroutine[Any, Any, httpx.Response]] = [
            client.post("/v1/completions", json={"temperature": 0, "return_token_ids": True} | body)
            for body in bodies
        ]
        return list(await asyncio.gather(*calls))


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize("max_tokens", [1, None])
def test_a_prompt_as_long_as_the_context(server: Server, max_tokens: int | None) -> None:
    """lm-evaluation-harness#3134: one past the buffers killed the engine."""
    for length in (MODEL_LEN - 2, MODEL_LEN - 1, MODEL_LEN, MODEL_LEN + 1):
        body = {"prompt": ids(length), "max_tokens": max_tokens, "ignore_eos": True}
        answer = post(server, "/v1/completions", body)
        if length < MODEL_LEN:
            choice = answer.json()["choices"][0]
            assert choice["finish_reason"] == "length"
            made = answer.json()["usage"]["completion_tokens"]
            assert made == (max_tokens or MODEL_LEN - length)
        else:
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_clients_that_leave_in_mid_prefill(server: Server) -> None:
    """sendnn-inference#577: a request cancelled between its chunks broke the next plan."""
    pick = random.Random(1)
    for _ in range(12):
        body = {"prompt": ids(900), "max_tokens": 50, "stream": True}
        clients = [raw_request(server, body) for _ in range(3)]
        time.sleep(pick.random() * 0.1)  # the report's own random delay
        for client in clients:
            client.close()
    server.wait_idle(5)


def test_a_prompt_larger_than_the_pool_is_refused_and_blocks_nobody(server: Server) -> None:
    """vllm#35541: retried at every step for ever, and everything behind it stopped."""
    bodies = [{"prompt": ids(1100), "max_tokens": 50}] * 5 + [{"prompt": ids(8), "max_tokens": 4}]
    *refused, served = asyncio.run(together(server, bodies))
    assert {answer.status_code for answer in refused} == {400}
    assert served.status_code == 200


def test_more_output_than_the_pool_holds_is_refused(server: Server) -> None:
    """vllm#39734: admitted, then nobody was left to preempt but itself."""
    body = {"prompt": ids(900), "max_tokens": 2000, "ignore_eos": True}
    assert post(server, "/v1/completions", body).status_code == 400
    rest = complete(server, {"prompt": ids(900), "max_tokens": None, "ignore_eos": True})
    assert rest["usage"]["completion_tokens"] == MODEL_LEN - 900


def test_one_token_ends_in_the_prefill_step(server: Server) -> None:
    """sglang-jax#56: the finish was only looked for in decode."""
    lengths = [1, BLOCK, BLOCK + 1, 65] * 12
    bodies = [{"prompt": ids(n), "max_tokens": 1, "ignore_eos": True} for n in lengths]
    for answer in asyncio.run(together(server, bodies)):
        assert answer.json()["usage"]["completion_tokens"] == 1
        assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_one_effective_limit(server: Server) -> None:
    """vllm#40302: the advertised limit was not the enforced one."""
    (model,) = server.get("/v1/models").json()["data"]
    limit = model["max_model_len"]
    assert limit == BLOCKS * BLOCK
    most = {"prompt": ids(limit - 1), "max_tokens": 1, "ignore_eos": True}
    assert post(server, "/v1/completions", most).status_code == 200
    error = post(server, "/v1/completions", most | {"prompt": ids(limit)}).json()["error"]
    assert str(limit) in error["message"]


def test_blocks_return_after_every_round(server: Server) -> None:
    """imp#1115: each finished request left the block for the token after its last."""
    for count in (40, 24, 24):
        bodies = [
            {
                "prompt": ids(10 + n % 3),
                "max_tokens": BLOCK * (1 + n % 3) + (-1, 0, 1)[n % 3] - 10,
                "ignore_eos": True,
            }
            for n in range(count)
        ]
        bodies = [body for body in bodies if body["max_tokens"] > 0]  # type: ignore[operator]
        answers = asyncio.run(together(server, bodies))
        assert {answer.status_code for answer in answers} == {200}
        server.wait_idle(5)


def test_two_requests_of_one_name(server: Server) -> None:
    """vllm#10583: the client's id was the engine's key."""
    body = {"prompt": ids(5), "max_tokens": 30, "ignore_eos": True}
    named = {"X-Request-Id": "same"}
    first = post(server, "/v1/completions", body, **named)
    second = post(server, "/v1/completions", body, **named)
    assert first.json()["id"] != second.json()["id"]
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "same"
    assert post(server, "/v1/completions", body, **{"X-Request-Id": "x" * 1000}).status_code == 400


def test_a_shared_prefix_three_hundred_times(server: Server) -> None:
    """xllm#829: blocks entered the cache before their count fell, and usage passed 100 %."""
    prefix = ids(10 * BLOCK)
    began = time.monotonic()
    halves = []
    for number in range(300):
        complete(server, {"prompt": [*prefix, 3 + number % 250], "max_tokens": 1})
        if number % 50 == 0:
            assert 0 <= server.metric("vllm:kv_cache_usage_perc") <= 1
        if number == 149:
            halves.append(time.monotonic() - began)
    halves.append(time.monotonic() - began - halves[0])
    assert halves[1] < 3 * halves[0], "later requests are slower than earlier ones"


def test_a_prompt_of_whole_blocks_that_are_all_cached(server: Server) -> None:
    """nano-vllm#144: nothing was left to compute, and there were no logits."""
    body = {"prompt": [9, *ids(4 * BLOCK - 1)], "max_tokens": 12, "ignore_eos": True}
    first = complete(server, body)["choices"][0]["token_ids"]
    assert complete(server, body)["choices"][0]["token_ids"] == first
    assert complete(server, body | {"max_tokens": 1})["choices"][0]["token_ids"] == first[:1]
    assert [tokens(one) for one in asyncio.run(together(server, [body, body]))] == [first, first]


def test_two_equal_prompts_at_once(server: Server) -> None:
    """MinivLLM#98: the second took the first's blocks before their contents existed."""
    body = {"prompt": [8, *ids(5 * BLOCK + 2)], "max_tokens": 12, "ignore_eos": True}
    pair = [tokens(one) for one in asyncio.run(together(server, [body, body]))]
    alone = complete(server, body)["choices"][0]["token_ids"]
    assert pair == [alone, alone]


def test_cancelling_again_and_again_changes_nothing(server: Server) -> None:
    """omlx#2512: each further abort counted as another cancellation."""
    before = server.metric("iterscope_requests_ended_total", finish="cancelled")
    client = raw_request(server, {"prompt": ids(5), "max_tokens": 900, "stream": True})
    listed = server.wait(lambda: server.get("/v1/requests").json()["data"])
    path = f"{server.url}/v1/requests/{listed[0]['request_id']}"
    codes = [httpx.delete(path, timeout=20).status_code for _ in range(5)]
    client.close()
    assert codes[0] == 200
    assert set(codes) <= {200, 404}
    assert httpx.delete(f"{server.url}/v1/requests/nobody", timeout=20).status_code == 404
    server.wait_idle(5)
    ended = "iterscope_requests_ended_total"
    server.wait(lambda: server.metric(ended, finish="cancelled") == before + 1)


def test_forty_five_neighbours_change_nobodys_tokens(server: Server) -> None:
    """imp#1314: greedy text differed in a batch."""
    probes = [
        {"prompt": [7 + n, *ids(6 + 9 * n)], "max_tokens": 16, "ignore_eos": True} for n in range(5)
    ]
    alone = [complete(server, body)["choices"][0]["token_ids"] for body in probes]
    others = [
        {"prompt": [30 + n, *ids(3 + 5 * (n % 20))], "max_tokens": 10 + n % 30, "ignore_eos": True}
        for n in range(45)
    ]
    answers = asyncio.run(together(server, others[:20] + probes + others[20:]))
    assert [tokens(answer) for answer in answers[20:25]] == alone
