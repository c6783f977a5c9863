"""Hostile and broken connections against a real server: slow, silent, endless, too many, reset.

One server with short limits serves the file. Whatever hangs on its port, a healthy client beside it
is answered, and afterwards nothing is in flight.
"""

import asyncio
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx
import pytest

from tests import tiny
from tests.api import HELLO, LONG, in_flight, post, raw_request, settle
from tests.servers import Server, serving

HEAD_S, BODY_S, KEEP_S = 0.6, 0.8, 0.5
ADDRESS_MAX, ALL_MAX = 210, 230
WITHIN_S = 5.0
HOST = b"Host: 127.0.0.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("connections")
    flags = (
        *("--header-deadline-s", str(HEAD_S), "--body-deadline-s", str(BODY_S)),
        *("--body-bytes-per-s-min", "100000", "--keep-alive-s", str(KEEP_S)),
        *("--max-connections", str(ALL_MAX), "--max-connections-per-address", str(ADDRESS_MAX)),
        *("--header-bytes-max", "16384", "--client-stall-s", "1"),
    )
    with serving(folder, tiny.write(folder / "model"), *flags) as server:
        yield server


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    yield running_server
    settle(running_server)
    assert "Traceback" not in running_server.log


def connect(server: Server, sent: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
    port = httpx.URL(server.url).port or 0
    made = socket.create_connection(
        ("127.0.0.1", port), timeout=WITHIN_S, source_address=(address, 0)
    )
    made.sendall(sent)
    return made


def rest_of(made: socket.socket) -> bytes:
    """Return all the server says until it closes, in time, and close the socket too."""
    told = b""
    with made, suppress(ConnectionResetError):
        while part := made.recv(65536):
            told += part
    return told


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# ---- slow and silent


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /he", POST + b"X: "])
def test_a_head_that_does_not_come_is_cut(server: Server, sent: bytes) -> None:
    began = time.monotonic()
    assert status_of(rest_of(connect(server, sent))) == 408
    assert HEAD_S - 0.1 <= time.monotonic() - began < WITHIN_S


def test_a_head_that_drips_in_is_cut(server: Server) -> None:
    """Slowloris: each byte comes in time, the head never."""
    made = connect(server, b"GET /health HTTP/1.1\r\n")
    began = time.monotonic()
    told = b""
    with made:
        made.settimeout(0.05)
        while not told and time.monotonic() - began < WITHIN_S:
            made.sendall(b"a")
            with suppress(TimeoutError):
                told = made.recv(1000)
    assert status_of(told) == 408
    assert b'"code":"request_timeout"' in told


def test_a_body_that_stops_is_cut(server: Server) -> None:
    for framing in (
        b"Content-Length: 100000\r\n\r\n{",
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ):
        began = time.monotonic()
        told = rest_of(connect(server, POST + framing))
        assert status_of(told) == 408
        assert BODY_S - 0.1 <= time.monotonic() - began < WITHIN_S


def test_a_body_below_the_rate_is_cut_and_one_above_it_is_not(server: Server) -> None:
    """Bytes earn time: 100,000 of them one second."""
    text = b'{"prompt": "x", "max_tokens": 1, "user": "' + b"u" * 200_000 + b'"}'
    head = POST + b"Content-Length: %d\r\n\r\n" % len(text)
    for part_bytes, status in ((2_000, 408), (20_000, 200)):
        made = connect(server, head)
        told = b""
        with suppress(OSError):
            for at in range(0, len(text), part_bytes):
                made.sendall(text[at : at + part_bytes])
                made.settimeout(0.1)
                with suppress(TimeoutError):
                    told = made.recv(1000)
                    break
        made.settimeout(WITHIN_S)
        assert status_of(told or made.recv(1000)) == status
        made.close()


def test_an_idle_connection_is_closed_after_a_while(server: Server) -> None:
    made = connect(server, b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n")
    began = time.monotonic()
    assert status_of(rest_of(made)) == 200
    assert KEEP_S - 0.1 <= time.monotonic() - began < WITHIN_S


def test_a_client_that_reads_nothing_of_a_stream_of_events_is_cut(server: Server) -> None:
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(("127.0.0.1", httpx.URL(server.url).port or 0))
        made.sendall(b"GET /telemetry/stream?hz=60 HTTP/1.1\r\n" + HOST + b"\r\n")
        made.recv(100)
        server.wait(lambda: server.metric("iterscope_telemetry_readers", reader="stream") == 1)
        body = LONG | {"max_tokens": 1500}
        while server.metric("iterscope_telemetry_readers", reader="stream"):
            assert post(server, "/v1/completions", body).status_code == 200


# ---- too large


def test_a_head_without_end_is_refused(server: Server) -> None:
    """A hundred megabytes of one header: refused after some kilobytes."""
    made = connect(server, b"GET / HTTP/1.1\r\n" + HOST + b"X: ")
    sent = 0
    with suppress(OSError):
        while sent < 100 * 2**20:
            sent += made.send(b"a" * 65536)
    assert status_of(rest_of(made)) == 431
    assert sent < 20 * 2**20
    made.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"X: 1\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"Cookie: " + b"a" * 20_000 + b"\r\n\r\n",
    ],
)
def test_a_head_that_is_too_large_is_refused(server: Server, head: bytes) -> None:
    assert status_of(rest_of(connect(server, head))) == 431


def test_trailers_and_chunk_heads_are_bounded_too(server: Server) -> None:
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    for around in (b"1;" + b"x" * 70_000, b"1\r\n{\r\n0\r\n" + b"X: y\r\n" * 12_000):
        made = connect(server, chunked + around[:30_000])
        with suppress(OSError):
            made.sendall(around[30_000:])
        assert status_of(rest_of(made)) in (400, 431)


@pytest.mark.parametrize("name", ["Host", "Origin", "Authorization", "Sec-Fetch-Site", "X-Tenant"])
def test_a_header_that_decides_may_not_stand_twice(server: Server, name: str) -> None:
    """A proxy may have checked the first and we the second; others may stand as often as told."""
    values = {"Host": "127.0.0.1", "Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"}
    line = f"{name}: {values.get(name, 'x')}\r\n".encode()
    host = HOST if name != "Host" else b""
    head = b"GET /version HTTP/1.1\r\n" + host + b"Accept: */*\r\nAccept: a/b\r\n"
    end = b"Connection: close\r\n\r\n"
    assert status_of(rest_of(connect(server, head + line + end))) == 200
    told = rest_of(
        connect(server, head + line + line.replace(name.encode(), name.lower().encode()) + end)
    )
    assert status_of(told) == 400
    assert b"header_twice" in told


def test_requests_in_a_row_are_bounded(server: Server) -> None:
    """Pipelined behind a stream, where nobody has asked for them yet."""
    one = b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n"
    made = connect(server, one * 5)
    told = b""
    while told.count(b'"version"') < 5:
        told += made.recv(65536)
    made.close()
    for more in (one * 100, POST + b"Content-Length: 8000000\r\n\r\n" + b" " * 7_900_000):
        with raw_request(server, LONG | {"stream": True}) as made:
            made.recv(100)
            with suppress(OSError):
                made.sendall(more)
            rest_of(made)
            server.wait(lambda: not in_flight(server))


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + b"\r\n",
        "GET /caf\u00e9 HTTP/1.1\r\n".encode() + HOST + b"\r\n",
    ],
)
def test_what_is_not_http_is_answered_and_closed(server: Server, sent: bytes) -> None:
    told = rest_of(connect(server, sent))
    assert told == b"" or status_of(told) in (400, 404, 405)
    assert b"\r\n\r\n" not in told or b'{"error":' in told


def test_a_request_for_another_protocol_is_answered_in_this_one(server: Server) -> None:
    upgrade = b"GET /version HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + HOST
    made = connect(server, upgrade + b"\r\n")
    assert status_of(made.recv(65536)) == 200
    made.close()


# ---- too many


def test_two_hundred_connections_are_served_and_more_are_refused(server: Server) -> None:
    with ExitStack() as stack:
        opened = [
            stack.enter_context(connect(server, b"GET /version HTTP/1.1\r\n" + HOST + b"X: "))
            for _ in range(200)
        ]
        for made in opened:
            made.sendall(b"1\r\n\r\n")
        assert {status_of(made.recv(65536)) for made in opened} == {200}
    with ExitStack() as stack:
        opened = [stack.enter_context(connect(server)) for _ in range(ADDRESS_MAX + 5)]
        told = rest_of(opened[-1])
        assert (status_of(told), b"Retry-After".lower() in told) == (503, True)
        assert b"too_many_connections" in told
        # Another address is not the first one's fault, until all of them together are too many.
        others = [stack.enter_context(connect(server, address="127.0.0.2")) for _ in range(30)]
        assert status_of(rest_of(others[-1])) == 503
        others[0].sendall(b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n")
        assert status_of(others[0].recv(65536)) == 200
    server.wait(lambda: "too many connections of this address are open" in server.log)


def test_resets_at_every_moment_leave_nothing_behind(server: Server) -> None:
    """stemdeck#513: a place taken by a handler and given back by a generator that never ran."""
    requests = (
        b"GET /telemetry/stream HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /telemetry/str",
        POST + b'Content-Length: 50\r\n\r\n{"prompt"',
        POST + b'Content-Length: 49\r\n\r\n{"prompt": "abc", "stream": true, "max_tokens": 9}',
    )
    for index in range(200):
        made = connect(server, requests[index % len(requests)])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made.close()
    server.wait(lambda: server.metric("iterscope_telemetry_readers", reader="stream") == 0)
    server.wait(lambda: not in_flight(server))
    server.wait_idle()
    with httpx.stream("GET", server.url + "/telemetry/stream", timeout=WITHIN_S) as answer:
        assert answer.status_code == 200


def test_healthy_clients_notice_nothing_of_a_hundred_and_fifty_bad_ones(server: Server) -> None:
    async def polled() -> float:
        worst_s = 0.0
        async with httpx.AsyncClient(base_url=server.url, timeout=WITHIN_S) as client:
            for _ in range(40):
                began = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                answer = await client.post("/v1/chat/completions", json=HELLO | {"max_tokens": 2})
                assert answer.status_code == 200
                worst_s = max(worst_s, time.monotonic() - began)
        return worst_s

    alone_s = asyncio.run(polled())
    with ExitStack() as stack:
        bad = [stack.enter_context(connect(server, POST + b"X: ")) for _ in range(50)]
        bad += [
            stack.enter_context(connect(server, POST + b"Content-Length: 9000\r\n\r\n{"))
            for _ in range(50)
        ]
        bad += [
            stack.enter_context(connect(server, POST + b"X: " + b"a" * 9000)) for _ in range(50)
        ]
        assert asyncio.run(polled()) < 10 * alone_s + 0.5
