"""The live stream over a real port: places, losses, filters, and clients that misbehave.

Owns the proofs of server/telemetry_stream.py on a real uvicorn: nothing doubled, nothing missing
that is not counted, wherever a client was cut and whatever it sends as its place.
"""

import socket
import struct
import time

import httpx
import pytest

from server.telemetry_stream import LABEL
from tests import samples
from tests.telemetry_server import WAIT_S, running, seqs, stream, wait_for
from tests.test_schema import validator

# ---- hello, bodies, headers


def test_a_new_client_gets_the_state_and_then_each_record_once() -> None:
    with running() as server:
        server.publish(samples.run(), samples.start(1), samples.start(2), samples.end(1))
        with stream(server) as client:
            hello = client.next()
            assert (hello.name, hello.id) == ("hello", "run-1.4")
            assert hello.body["run_id"] == "run-1"
            assert (hello.body["generation"], hello.body["schema_version"]) == (1, 1)
            assert hello.body["run"]["model"] == "tiny"
            assert [start["request"] for start in hello.body["live"]] == [2]
            assert hello.body["lost"] == 0
            server.publish(samples.iteration(1, [2]), samples.end(2))
            events = client.until(6)
            assert [(event.name, event.id) for event in events[1:]] == [
                ("iteration", "run-1.5"),
                ("request_end", "run-1.6"),
            ]
            for event in events:
                validator(event.name or "").validate(event.body)
            assert not {"run_id", "generation", "seq"} & events[1].body.keys()


@pytest.mark.parametrize(("published", "first"), [(9, 3), (40, 34)])
def test_a_client_may_begin_with_what_the_ring_still_holds(published: int, first: int) -> None:
    """`past` gives the state as it was then and each record since, once; its place goes before."""
    with running(ring=8) as server:
        server.publish(samples.run(), samples.start(1), samples.start(2))
        server.publish(*(samples.iteration(step, [1]) for step in range(4, published + 1)))
        with stream(server, "?past=1000000") as client:
            hello = client.next()
            assert (hello.name, hello.id) == ("hello", f"run-1.{first}")
            assert [start["request"] for start in hello.body["live"]] == [1, 2]
            assert hello.body["lost"] == 0
            server.publish(samples.end(1))
            events = client.until(published + 1)
            assert seqs(events)[-1] == published + 1
            assert [event.name for event in events].count("iteration") == published - first
            assert not any(event.name == "lost" for event in events)
        with stream(server, f"?past=1000000&last_event_id=run-1.{published}") as client:
            assert client.next().id == f"run-1.{published}", "a place goes before the past"
            assert client.next().name == "request_end"


def test_the_headers_keep_proxies_and_caches_out() -> None:
    with running() as server, stream(server) as client:
        headers = client.response.headers
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["cache-control"] == "no-cache"
        assert headers["x-accel-buffering"] == "no"
        assert "content-length" not in headers
        assert "content-encoding" not in headers
        assert client.next().body["run"] is None, "before an engine was ready"


def test_a_head_request_opens_no_stream() -> None:
    with running() as server:
        response = httpx.head(f"{server.url}/telemetry/stream", timeout=WAIT_S, trust_env=False)
        assert response.status_code == 200
        wait_for(lambda: server.readers() == 0)


# ---- cut and resumed


@pytest.mark.parametrize("how", ["header", "query"])
def test_a_cut_within_the_ring_is_resumed_without_a_hello(how: str) -> None:
    with running(ring=1000) as server:
        server.iterations(1, 10)
        with stream(server) as client:
            client.next()
            server.iterations(11, 20)
            before = client.until(20)
            place = client.last_id
        server.iterations(21, 220)
        asked = (f"?last_event_id={place}", None) if how == "query" else ("", place)
        with stream(server, *asked) as client:
            server.iterations(221, 230)
            after = client.until(230)
    assert [event.name for event in after] == ["iteration"] * 210, "no hello, no loss"
    assert seqs(before) + seqs(after) == list(range(11, 231))


def test_a_cut_beyond_the_ring_is_told_exactly_and_followed_by_a_hello() -> None:
    with running(ring=64) as server:
        server.publish(samples.run(), samples.start(1))
        with stream(server) as client:
            client.next()
            server.iterations(3, 10)
            before = client.until(10)
            place = client.last_id
        server.iterations(11, 110)
        server.publish(samples.start(2), samples.end(1))
        server.iterations(113, 250)
        with stream(server, last_event_id=place) as client:
            assert client.next().name is None, "the place it asked for, at once"
            events = client.until(250)
            lost, hello, *rest = events
    assert (lost.name, lost.id) == ("lost", "run-1.186")
    assert lost.body == {"from": 11, "to": 186, "count": 176, "by_kind": None}
    assert (hello.name, hello.id, hello.body["lost"]) == ("hello", "run-1.186", 0)
    assert [start["request"] for start in hello.body["live"]] == [2], "no ghost"
    assert seqs(before) == list(range(3, 11))
    assert seqs(rest) == list(range(187, 251)), "nothing doubled, nothing else missing"


def test_a_client_that_is_too_slow_loses_by_kind_and_reads_on() -> None:
    with running(ring=16) as server, stream(server, "?hz=1") as client:
        client.next()
        # Published in one turn of the loop: no reader can keep up with it.
        starts = [samples.start(request) for request in range(1, 11)]
        server.publish(*starts, *(samples.iteration(step) for step in range(1, 31)))
        lost, hello = [event for event in client.until(40) if event.name in ("lost", "hello")][1:]
        assert lost.body == {
            "from": 1,
            "to": 24,
            "count": 24,
            "by_kind": {"request_start": 10, "iteration": 14},
        }
        assert len(hello.body["live"]) == 10
        assert seqs(client.events) == list(range(25, 41))
        assert server.bus.losses()[LABEL] == 24


@pytest.mark.parametrize(
    "place",
    ["abc", "-1", "1", "run-1.-1", "run-1.", "run-1.x", "run-0.3", f"run-1.{10**30}", "run-1.99",
     "run-1.٣", "run-1.3.3", str(10**30), "run-1.1e1", "run-1." + "9" * 5000],
)  # fmt: skip
def test_another_runs_place_or_garbage_gets_a_fresh_hello(place: str) -> None:
    with running() as server:
        server.publish(samples.run(), samples.start(1), samples.iteration(1))
        with stream(server, "?last_event_id=" + place) as client:
            hello = client.next()
            assert (hello.name, hello.id) == ("hello", "run-1.3")
            assert hello.body["lost"] == "unknown"
            server.iterations(2, 3)
            assert seqs(client.until(5)) == [4, 5]


def test_a_place_before_the_first_record_is_a_place() -> None:
    with running() as server:
        server.iterations(1, 3)
        with stream(server, last_event_id="run-1.0") as client:
            assert seqs(client.until(3)) == [1, 2, 3]


def test_an_empty_place_is_none() -> None:
    with running() as server, stream(server, "?last_event_id=") as client:
        assert client.next().body["lost"] == 0


def test_cuts_at_random_places_double_and_miss_nothing() -> None:
    with running(ring=64) as server:
        place: str | None = None
        received: list[int] = []
        lost = 0
        for turn in range(8):
            with stream(server, "?hz=60", place) as client:
                if place is None:
                    place = client.next().id
                head = server.bus.head
                server.iterations(head + 1, head + 25 + 10 * turn)
                events = client.until(server.bus.head if turn % 2 else head + 5)
                place = client.last_id
            received += seqs(events)
            lost += sum(event.body["count"] for event in events if event.name == "lost")
            head = server.bus.head
            server.iterations(head + 1, head + 40 * (turn % 3))
        with stream(server, "?hz=60", place) as client:
            events = client.until(server.bus.head)
        received += seqs(events)
        lost += sum(event.body["count"] for event in events if event.name == "lost")
        assert received == sorted(set(received))
        assert len(received) + lost == server.bus.head
        assert lost


# ---- filters and rate


def test_a_filter_sends_its_kinds_and_a_place_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.telemetry_stream.PING_S", 0.05)
    with running() as server:
        with stream(server, "?kinds=request_start,request_end&hz=60") as client:
            client.next()
            server.publish(samples.start(1), samples.iteration(1), samples.end(1))
            server.iterations(2, 50)
            names = [event.name for event in client.until(52)]
            assert names == ["hello", "request_start", "request_end"]
            assert client.last_id == "run-1.52", "moved by a frame of its id alone"
            place = client.last_id
        server.iterations(51, 52)
        with stream(server, "?kinds=request_end", place) as client:
            server.publish(samples.end(2))
            assert [event.name for event in client.until(55)] == ["request_end"]


def test_a_loss_is_counted_before_filters() -> None:
    with running(ring=8) as server, stream(server, "?kinds=request_end&hz=1") as client:
        client.next()
        server.publish(*(samples.iteration(step) for step in range(1, 21)), samples.end(1))
        lost = next(event for event in client.until(21) if event.name == "lost")
        assert (lost.body["count"], lost.body["by_kind"]) == (13, {"iteration": 13})


@pytest.mark.parametrize(
    "query", ["?kinds=nonsense", "?kinds=", "?hz=fast", "?hz=nan", "?past=-1", "?past=x"]
)
def test_a_wrong_parameter_is_refused(query: str) -> None:
    with running() as server:
        url = f"{server.url}/telemetry/stream{query}"
        response = httpx.get(url, timeout=WAIT_S, trust_env=False)
        assert response.status_code == 400
        assert response.json()["error"]["param"] in ("kinds", "hz", "past")


def test_records_are_joined_into_few_sends() -> None:
    with running() as server, stream(server, "?hz=2") as client:
        client.next()
        for step in range(1, 201):
            server.iterations(step, step)
        chunks = 0
        while not client.last_id.endswith(".200"):
            if "\n\n" not in client.rest:
                chunks += 1
            client.next()
        assert seqs(client.events) == list(range(1, 201))
        assert chunks <= 20, "200 records came in a few pieces"


# ---- clients that misbehave


def test_clients_that_reset_before_the_body_leak_nothing() -> None:
    with running(readers_max=4) as server:
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(b"GET /telemetry/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        # Connections are accepted in their order: when this one is answered, all those have been.
        httpx.get(f"{server.url}/nowhere", timeout=WAIT_S, trust_env=False)
        wait_for(lambda: server.readers() == 0)
        with stream(server) as client:
            assert client.next().name == "hello"


def test_more_readers_than_allowed_are_refused_and_room_comes_back() -> None:
    with running(readers_max=2) as server:
        with stream(server) as first, stream(server) as second:
            first.next()
            second.next()
            url = f"{server.url}/telemetry/stream"
            response = httpx.get(url, timeout=WAIT_S, trust_env=False)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "too_many_streams"
            assert response.headers["retry-after"]
        wait_for(lambda: server.readers() == 0)
        with stream(server) as third:
            assert third.next().name == "hello"


def test_a_client_that_never_reads_is_dropped_and_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(ring=200, stall_s=0.5) as server, stream(server, "?hz=60") as healthy:
        healthy.next()
        with socket.socket() as idle:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            idle.connect(("127.0.0.1", server.port))
            idle.sendall(b"GET /telemetry/stream?hz=60 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            wait_for(lambda: server.readers() == 2)
            big = samples.fault(traceback="x" * 100_000)
            deadline = time.monotonic() + WAIT_S
            while server.readers() == 2:
                assert time.monotonic() < deadline, "the idle client was kept"
                server.publish(*([big] * 5))
                healthy.until(server.bus.head)
        assert seqs(healthy.events) == list(range(1, server.bus.head + 1))
    assert "Traceback" not in caplog.text, "a client that sleeps is no fault of ours"
