"""Clients as they are: ids of their own, hang-ups, resets, stalls, cancellations, a dead engine.

One server serves the whole file. Whoever leaves, the blocks come back and the next request is
answered; the last test takes the engine away.
"""

import json
import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.api import LONG as ANY_LONG
from tests.api import in_flight, post, raw_request, still_answers
from tests.servers import Server, serving

MODEL = "tiny-" + "x" * 600
"""A long name makes each chunk large, so that a client that reads nothing soon blocks a stream."""

LONG = ANY_LONG | {"max_tokens": 2000}
"""So long that twenty of them are seen side by side."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    model = tiny.write(folder / "tiny")
    flags = ["--served-model-name", MODEL, "--max-num-seqs", "16", "--client-stall-s", "1"]
    flags += ["--max-model-len", "2048", "--kv-blocks", "2100"]
    with serving(folder, model, *flags) as running:
        yield running


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


# ---- clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_hang_up_free_everything_within_two_seconds(
    server: Server, stream: bool
) -> None:
    ended = server.metric("iterscope_requests_ended_total", finish="cancelled")
    sockets = [raw_request(server, LONG | {"stream": stream}) for _ in range(20)]
    server.wait(lambda: server.metric("vllm:num_requests_running") == 16)
    server.wait(lambda: server.metric("vllm:num_requests_waiting") == 4)
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
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
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
