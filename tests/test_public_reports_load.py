"""Public reports of overload, abandoned work and streams, tried on a real server under load.

Each test names the report whose kind it stands for. Whatever a test does, the server answers,
and afterwards nothing runs, waits or holds memory.
"""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.api import LONG, complete, ids, in_flight, post, raw_request, settle
from tests.children import status_kb
from tests.servers import Server, serving
from tests.test_connections import HOST, POST, connect, rest_of, status_of

BUDGET = 64
GROWTH_KB_MAX = 48 * 1024


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("load")
    flags = (
        *("--max-num-batched-tokens", str(BUDGET), "--max-num-seqs", "8"),
        *("--client-stall-s", "2", "--history", str(folder / "history")),
        *("--ring-records", "500"),
    )
    with serving(folder, tiny.write(folder / "model"), *flags) as server:
        yield server


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    yield running_server
    settle(running_server)


def sql(server: Server, query: str) -> list[list[Any]]:
    found = post(server, "/telemetry/sql", {"sql": query})
    assert found.status_code == 200, found.text
    rows: list[list[Any]] = found.json()["rows"]
    return rows


def test_finished_answers_leave_nothing_in_the_server(server: Server) -> None:
    """ATOM#1441: finished requests without a stream stayed in a table for ever."""
    pid = server.process.pid
    with httpx.Client(base_url=server.url, timeout=20) as client:

        def finish(count: int) -> None:
            for number in range(count):
                body = {"prompt": ids(20 + number % 7), "max_tokens": 1}
                assert client.post("/v1/completions", json=body).status_code == 200

        finish(150)
        before_kb = status_kb(pid, "VmRSS")
        finish(350)
    assert not in_flight(server)
    assert status_kb(pid, "VmRSS") - before_kb < GROWTH_KB_MAX


def test_decodes_ride_along_with_a_long_prompt(server: Server) -> None:
    """ATOM#1835: a step with any prefill ran no decode, and a short request waited as long."""
    long, short = ids(20 * BUDGET), ids(10)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(raw_request(server, LONG | {"stream": True, "max_tokens": 1500}))
        server.wait(lambda: server.metric("vllm:num_requests_running") == 4)
        named = {"X-Request-Id": "the-long-one"}
        holder = raw_request(server, {"prompt": long, "max_tokens": 1}, **named)
        stack.enter_context(holder)
        server.wait(lambda: server.metric("vllm:num_requests_running") == 5)
        complete(server, {"prompt": short, "max_tokens": 1})
        holder.recv(100)
        ended = "SELECT 1 FROM request_end WHERE external_id = 'the-long-one'"
        server.wait(lambda: sql(server, ended))
    spans = """
        WITH long AS (
            SELECT request, prefill_finished_at_ns FROM request_end
            WHERE external_id = 'the-long-one'
        )
        SELECT count(*), min(decode_tokens), max(prefill_tokens)
        FROM iteration, long
        WHERE list_contains(requests, long.request) AND end_at_ns < prefill_finished_at_ns
    """
    ((steps, decoded_least, prefilled_most),) = sql(server, spans)
    assert steps >= 20
    assert decoded_least >= 4, "each step of the prefill also gave every stream its token"
    assert prefilled_most <= BUDGET


def test_readers_that_stop_cost_the_ring_and_no_more(server: Server) -> None:
    """mcp-context-forge#1682: each subscriber had a queue without a bound."""
    pid = server.process.pid
    with ExitStack() as stack:
        for _ in range(20):
            made = stack.enter_context(socket.socket())
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.connect(("127.0.0.1", httpx.URL(server.url).port or 0))
            made.sendall(b"GET /telemetry/stream?hz=60 HTTP/1.1\r\n" + HOST + b"\r\n")
            made.recv(100)
        server.wait(lambda: server.metric("iterscope_telemetry_readers", reader="stream") == 20)
        before_kb = status_kb(pid, "VmRSS")
        while server.metric("iterscope_telemetry_readers", reader="stream"):
            complete(server, {"prompt": [5], "max_tokens": 400, "ignore_eos": True})
        assert status_kb(pid, "VmRSS") - before_kb < GROWTH_KB_MAX


def test_tokens_are_not_held_back_for_clients_that_take_gzip(server: Server) -> None:
    """starlette#2753: compression waits for 32 KiB, and tokens come in bursts."""
    body = LONG | {"stream": True, "max_tokens": 1500}
    headers = {"Accept-Encoding": "gzip"}
    url = server.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=20) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        assert in_flight(server), "the first token came while the others were still to be made"
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["cache-control"] == "no-cache"
        assert stream.headers["x-accel-buffering"] == "no"
        assert not {"content-encoding", "content-length"} & set(stream.headers)


def test_five_hundred_megabytes_are_refused_before_they_are_read(server: Server) -> None:
    """vllm#24910: with a length and without one; the first eight megabytes decide."""
    began = time.monotonic()
    told = rest_of(connect(server, POST + b"Content-Length: 500000000\r\n\r\n" + b"x" * 1000))
    assert status_of(told) == 413
    assert time.monotonic() - began < 5
    made = connect(server, POST + b"Transfer-Encoding: chunked\r\n\r\n")
    sent = 0
    with suppress(OSError):
        while sent < 500_000_000:
            made.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            sent += 0x10000
    made.close()
    assert sent < 64_000_000
    server.wait(lambda: server.get("/health").status_code == 200)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "a": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"messages": [' + b'{"role": "user", "content": "x"},' * 10_000 + b"]}",
        b'{"messages": [' + b",".join([b'{"role":"user","content":"x"}'] * 10_000) + b"]}",
    ],
)
def test_deep_and_long_bodies_hold_nobody_up(server: Server, text: bytes) -> None:
    """vllm#24910: nested a hundred thousand deep, ten thousand messages; health goes on."""

    async def run() -> tuple[int, float]:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            path = "/v1/chat/completions" if b"messages" in text[:20] else "/v1/completions"
            asked = asyncio.create_task(client.post(path, content=text))
            worst_s = 0.0
            while not asked.done():
                began = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                worst_s = max(worst_s, time.monotonic() - began)
            return (await asked).status_code, worst_s

    status, worst_s = asyncio.run(run())
    assert status == 400
    assert worst_s < 2.0
