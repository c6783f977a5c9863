"""/metrics of a real server under load: sums that agree at each scrape, and with SQL and clients.

Owns the proofs of public reports on metrics: gauges that froze, counts that disagreed, outcomes
that had no label, clocks that were set, stamps of one place, negative usage, counters that fell.
The engine computes a tiny model, in a pool too small for its load.
"""

import asyncio
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.api import ids, post
from tests.servers import Server, serving
from tests.test_metrics import Scrape

SCRAPES, SCRAPES_SOAK = 300, 1000
LENGTHS = (3, 12, 40)
FLAGS = (
    *("--kv-blocks", "12", "--block-size", "16", "--max-num-seqs", "6"),
    *("--max-queue-requests", "12", "--ring-records", "100000"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("metrics")
    flags = (*FLAGS, "--history", str(folder / "history"))
    with serving(folder, tiny.write(folder / "model"), *flags) as server:
        yield server


def scrape(server: Server) -> Scrape:
    return Scrape(server.get("/metrics").text)


def sql(server: Server, query: str) -> list[Any]:
    found = post(server, "/telemetry/sql", {"sql": query})
    assert found.status_code == 200, found.text
    row: list[Any] = found.json()["rows"][0]
    return row


class Clients:
    """Streams of all kinds, and a count of what became of each, as the clients saw it."""

    def __init__(self, server: Server) -> None:
        self._url = server.url
        self._pick = random.Random(5)
        self.seen: Counter[str] = Counter()

    async def run(self, count: int, done: threading.Event | None = None) -> None:
        """Send `count` requests with 8 at once, or go on until `done`."""
        limits = httpx.Limits(max_connections=40)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=30, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(8):
                group.create_task(self._some(client, count // 8, done))

    async def _some(
        self, client: httpx.AsyncClient, count: int, done: threading.Event | None
    ) -> None:
        while count > 0 if done is None else not done.is_set():
            count -= 1
            leave = self._pick.choice((None, None, 0, 2, 9))
            await self.stream(client, leave_after=leave, max_tokens=self._pick.choice((1, 20, 60)))

    async def stream(
        self, client: httpx.AsyncClient, *, leave_after: int | None, max_tokens: int
    ) -> None:
        """Read one answer, or leave it after so many events."""
        prompt = ids(self._pick.choice(LENGTHS))
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.seen[f"refused {answer.status_code}"] += 1
                return
            self.seen["accepted"] += 1
            events = 0
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                events += 1
                self.seen["first"] += events == 1
                if leave_after is not None and events > leave_after:
                    self.seen["left"] += 1
                    return
            self.seen["finished"] += 1


@pytest.mark.parametrize("scrapes", [SCRAPES, pytest.param(SCRAPES_SOAK, marks=pytest.mark.soak)])
def test_scrapes_agree_under_cancels_and_preemptions(server: Server, scrapes: int) -> None:
    """vllm-ascend#10048, client_python#495: in one scrape sums agree; between two none falls."""
    done, clients = threading.Event(), Clients(server)
    load = threading.Thread(target=lambda: asyncio.run(clients.run(0, done)), daemon=True)
    load.start()
    running: Counter[bool] = Counter()
    before: dict[Any, float] = {}
    counting = re.compile(r"_(total|count|sum|bucket)$")
    try:
        with httpx.Client(base_url=server.url, timeout=20) as client:
            for _ in range(scrapes):
                found = Scrape(client.get("/metrics").text)
                found.check()
                running[found("iterscope_requests", state="running") > 0] += 1
                now = {key: value for key, value in found.values.items() if counting.search(key[0])}
                fell = [key for key, value in before.items() if value > now[key]]
                assert not fell, fell
                before = now
    finally:
        done.set()
        load.join()
    assert running[True] > scrapes / 2, "there was no load"
    assert clients.seen["left"] > 20
    assert scrape(server)("iterscope_preemptions_total", cause="kv") > 20
    server.wait_idle()


def test_three_sources_count_the_same(server: Server) -> None:
    """vllm#8115, Rapid-MLX#783: clients, SQL and metrics agree; each outcome has its own label."""
    server.wait_idle()
    before, clients = scrape(server), Clients(server)

    async def all_kinds() -> None:
        await clients.run(120)
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            for wrong in ({"prompt": []}, {"prompt": "a", "max_tokens": -1}, {"n": 99}):
                answer = await client.post("/v1/completions", json=wrong)
                assert answer.status_code == 400
            async with asyncio.TaskGroup() as group:
                for _ in range(40):
                    work = clients.stream(client, leave_after=None, max_tokens=60)
                    group.create_task(work)

    asyncio.run(all_kinds())
    server.wait_idle()
    seen = clients.seen
    assert seen["refused 429"], "the queue was never full"
    assert min(seen["left"], seen["finished"]) > 20
    server.wait(lambda: scrape(server)("iterscope_history_lag_seconds") == 0)
    after = scrape(server)

    def grew(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    assert grew("iterscope_requests_accepted_total") == seen["accepted"]
    assert grew("iterscope_requests_rejected_total") == seen["refused 429"]
    assert grew("iterscope_requests_rejected_total", reason="queue_full") == seen["refused 429"]
    assert grew("iterscope_requests_invalid_total") == 3
    assert grew("iterscope_time_to_first_token_seconds_count") >= seen["first"]
    served = grew("iterscope_requests_ended_total", finish="length")
    cancelled = grew("iterscope_requests_ended_total", finish="cancelled")
    assert served >= seen["finished"], "some were done before their client had left"
    assert served + cancelled == seen["accepted"]
    assert grew("iterscope_requests_cancelled_total", cause="client") == cancelled
    assert grew("vllm:request_success_total", finished_reason="abort") == cancelled
    assert grew("iterscope_e2e_request_latency_seconds_count") == served
    assert (
        after("iterscope_requests_accepted_total")
        == sql(
            server,
            "SELECT count(*) FROM request_start WHERE run_id = (SELECT max(run_id) FROM run)",
        )[0]
    )
    first, last, output = sql(
        server,
        "SELECT count(first_write_at_ns), count(*), (SELECT sum(output_tokens) FROM request_end) "
        "FROM delivery",
    )
    assert after("iterscope_time_to_first_token_seconds_count") == first
    assert after("iterscope_requests_ended_total") == last
    assert after("iterscope_generation_tokens_total") == output
    ended, e2e = sql(
        server,
        "SELECT count(*), count(*) FILTER (finish IN ('stop', 'length')) FROM request_end",
    )
    assert after("iterscope_requests_ended_total") == ended
    assert after("iterscope_e2e_request_latency_seconds_count") == e2e


def test_forty_streams_closed_at_once_leave_idle_gauges(server: Server) -> None:
    """vllm#29928: no step runs any more, and gauges must not stay where they were."""

    async def crowd() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            body = {"prompt": ids(20), "max_tokens": 100, "stream": True, "ignore_eos": True}
            open_streams = [client.stream("POST", "/v1/completions", json=body) for _ in range(12)]
            answers = [await one.__aenter__() for one in open_streams]
            assert {answer.status_code for answer in answers} == {200}
            busy = Scrape((await client.get("/metrics")).text)
            assert busy("iterscope_requests") > 0
            assert busy("iterscope_kv_usage_ratio") > 0
            await asyncio.gather(*(answer.aclose() for answer in answers))

    asyncio.run(crowd())
    server.wait_idle(deadline_s=10)
    idle = scrape(server)
    assert idle("iterscope_requests") == 0
    assert idle("iterscope_kv_tokens") == idle("iterscope_kv_usage_ratio") == 0
    assert idle("iterscope_queue_oldest_seconds") == 0


def test_exemplars_name_requests_that_explain_knows(server: Server) -> None:
    accept = {"accept": "application/openmetrics-text"}
    text = httpx.get(server.url + "/metrics", headers=accept).text
    found = set(re.findall(r'# \{request_id="([^"]+)"\}', text))
    assert len(found) >= 10
    for name in found:
        told = server.get(f"/v1/requests/{name}")
        assert told.status_code == 200, name
        assert told.json()["request_id"] == name
    slowest = re.findall(r'first_token_seconds_bucket.*# \{request_id="([^"]+)"\} (\S+)', text)[-1]
    explained = server.get(f"/v1/requests/{slowest[0]}").json()
    assert explained["ttft_ms"] == pytest.approx(1e3 * float(slowest[1]), abs=0.01)


def test_stamps_are_not_of_one_place(tmp_path: Path) -> None:
    """vllm#6337: a step takes 50 ms, and so do a token, and the way to the first one."""
    model = tiny.write(tmp_path / "model")
    with serving(tmp_path, model, parrot=True, beat_ms=50) as server:
        body = {"prompt": ids(5), "max_tokens": 12, "ignore_eos": True, "stream": True}
        began = time.monotonic()
        for _ in range(4):
            assert post(server, "/v1/completions", body).status_code == 200
        took_s = time.monotonic() - began
        found = scrape(server)
        gaps = found("iterscope_inter_token_latency_seconds_count")
        assert gaps == 4 * 11
        mean_s = found("iterscope_inter_token_latency_seconds_sum") / gaps
        assert 0.045 <= mean_s <= took_s / gaps
        first_s = found("iterscope_time_to_first_token_seconds_sum") / 4
        e2e_s = found("iterscope_e2e_request_latency_seconds_sum")
        assert 4 * (first_s + 11 * mean_s) == pytest.approx(e2e_s, rel=0.2)
        assert e2e_s <= took_s


def test_a_clock_that_is_set_changes_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#22247: the wall clock swings by two hours at each look, and nobody notices."""
    monkeypatch.setattr("tests.servers.PARROT", ("-m", "tests.swinging_server", "--step-ms"))
    model = tiny.write(tmp_path / "model")
    with serving(tmp_path, model, parrot=True, beat_ms=5) as server:
        began = time.monotonic()
        for stream in (False, True):
            for path, what in (
                ("/v1/completions", {"prompt": ids(5)}),
                ("/v1/completions", {"prompt": ids(9)}),
            ):
                body = {**what, "max_tokens": 6, "ignore_eos": True, "stream": stream}
                assert post(server, path, body).status_code == 200
        took_s = time.monotonic() - began
        found = scrape(server)
    sums = {key[0]: value for key, value in found.values.items() if key[0].endswith("_seconds_sum")}
    assert len(sums) > 10
    assert all(0 <= value <= took_s + 1 for value in sums.values()), sums
    assert found("iterscope_time_to_first_token_seconds_sum") > 0


def test_there_is_one_process_to_scrape(tmp_path: Path) -> None:
    """client_python#495: more workers would each count for themselves; there is no such flag."""
    program = Path(sys.executable).parent / "iterscope"
    ran = subprocess.run([program, "serve", "--workers", "2"], capture_output=True, check=False)
    assert ran.returncode == 2
    assert b"--workers" in ran.stderr
