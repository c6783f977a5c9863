"""The bounded queue: exactly so many wait, the others hear at once when to come back."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from server.queue import Queue, QueueFull
from tests import tiny
from tests.servers import WAIT_S, Server, serving

SECOND = 1_000_000_000
SLOTS, QUEUED = 2, 4


def full(queue: Queue, *, sequences: int = 1, tokens: int = 1, slots_free: int = 0) -> QueueFull:
    with pytest.raises(QueueFull) as found:
        queue.check(sequences=sequences, tokens=tokens, slots_free=slots_free, now_ns=20 * SECOND)
    return found.value


def test_bounds_in_requests_and_tokens() -> None:
    queue = Queue(requests_max=2, tokens_max=100)
    queue.check(sequences=1, tokens=5000, slots_free=0, now_ns=0)
    queue.joined(1, 60)
    queue.check(sequences=1, tokens=40, slots_free=0, now_ns=0)
    assert full(queue, tokens=41).reason == "queue_tokens"
    queue.joined(2, 40)
    assert full(queue).reason == "queue_full"
    queue.check(sequences=1, tokens=0, slots_free=1, now_ns=0)
    queue.left(1, 0)
    queue.left(1, 0)
    assert (len(queue), queue.tokens) == (1, 40)


def test_retry_after_is_the_measured_drain() -> None:
    """Ten left in the last five seconds, so that ten more take five."""
    queue = Queue(requests_max=10, tokens_max=1000)
    for number in range(20):
        queue.joined(number, 1)
    for number in range(10):
        queue.left(number, 15 * SECOND + number * SECOND // 2)
    assert full(queue).retry_after_s == 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("queue")
    flags = (
        *("--max-num-seqs", str(SLOTS), "--max-queue-requests", str(QUEUED)),
        *("--queue-deadline-s", "2", "--history", str(folder / "history")),
    )
    with serving(folder, tiny.write(folder / "model"), *flags) as running:
        yield running


async def burst(url: str, count: int, max_tokens: int) -> list[httpx.Response]:
    body = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True}
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as client:
        requests = [client.post("/v1/completions", json=body) for _ in range(count)]
        return list(await asyncio.gather(*requests))


def test_exactly_slots_and_queue_are_admitted(server: Server) -> None:
    answers = asyncio.run(burst(server.url, 40, 60))
    counts = Counter(answer.status_code for answer in answers)
    refused = [answer for answer in answers if answer.status_code == 429]
    served = counts[200]
    # Slots may become free while the burst still arrives, so that later ones take them.
    assert served >= SLOTS + QUEUED
    assert served + len(refused) == 40
    assert refused
    for answer in refused:
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
    server.wait_idle()
    query = "SELECT reason, count(*) FROM rejection GROUP BY 1"
    found = httpx.post(f"{server.url}/telemetry/sql", json={"sql": query}, timeout=WAIT_S)
    assert found.json()["rows"] == [["queue_full", len(refused)]]
    again = asyncio.run(burst(server.url, SLOTS + QUEUED, 2))
    assert {answer.status_code for answer in again} == {200}


def test_a_request_that_waits_past_the_deadline_is_cancelled(server: Server) -> None:
    """Two hold both slots for longer than two seconds; the third waits, and is told."""

    async def all_three() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            holders = [
                asyncio.ensure_future(
                    client.post(
                        "/v1/completions",
                        json={"prompt": [9], "max_tokens": 2000, "ignore_eos": True},
                    )
                )
                for _ in range(SLOTS)
            ]
            while server.metric("vllm:num_requests_running") < SLOTS:
                await asyncio.sleep(0.01)
            late = await client.post("/v1/completions", json={"prompt": [8], "max_tokens": 4})
            for holder in holders:
                holder.cancel()
            return [late]

    (late,) = asyncio.run(all_three())
    assert late.status_code == 503, late.text
    assert late.json()["error"]["code"] == "queue_deadline"
    server.wait_idle()
    query = "SELECT cancel_cause, count(*) FROM request_end WHERE finish = 'cancelled' GROUP BY 1"
    found = httpx.post(f"{server.url}/telemetry/sql", json={"sql": query}, timeout=WAIT_S)
    assert ["deadline", 1] in found.json()["rows"]
