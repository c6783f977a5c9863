"""The whole path on a real server: load, laws, company, kills. Tiny model, real ports, real SQL.

GIVEN a small KV cache, WHEN prompts that ran alone run again in a crowd of which a third leaves,
THEN their texts are the same, every conservation law holds in SQL, and blocks are back. WHEN the
engine or the server is killed with -9, THEN clients get errors and every start has its end.
"""

import asyncio
import json
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.laws import laws
from tests import tiny
from tests.servers import WAIT_S, Server, answers, engine_pid, serving, wait

FLAGS = (
    *("--kv-blocks", "48", "--max-num-batched-tokens", "64", "--max-num-seqs", "16"),
    "--no-enable-prefix-caching",  # an equal text must not be won by reading the lone run's blocks
)
PROBE_LENGTHS = (3, 17, 60, 130)


@dataclass(frozen=True)
class Place:
    """A model folder and a history folder."""

    model: Path
    history: Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("whole-path")
    with serving(folder, model, *FLAGS, "--history", str(folder / "history")) as running:
        yield running


def rows(url: str, sql: str, *parameters: object) -> list[list[Any]]:
    body = {"sql": sql, "parameters": list(parameters)}
    answer = httpx.post(f"{url}/telemetry/sql", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    found: list[list[Any]] = answer.json()["rows"]
    return found


def assert_laws(url: str) -> None:
    for name, law in laws().items():
        assert rows(url, law.sql, *law.parameters) == [], name


def prompt(length: int, salt: str) -> list[int]:
    generator = random.Random(salt)
    return [generator.randrange(3, 200) for _ in range(length)]


async def stream(
    client: httpx.AsyncClient, name: str, ids: list[int], *, tokens: int, leave_after: int = 0
) -> str:
    body = {
        "prompt": ids,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, chunks = "", 0
    headers = {"X-Request-Id": name}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                chunks += 1
            if leave_after and chunks >= leave_after:
                return text
    return text


async def crowd(url: str) -> tuple[list[str], list[str]]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        alone = [
            await stream(client, f"alone-{length}", prompt(length, str(length)), tokens=30)
            for length in PROBE_LENGTHS
        ]
        others = [
            stream(
                client,
                f"crowd-{number}",
                prompt(3 + 6 * (number % 5), f"crowd{number}"),
                # Those that leave ask for so much that they cannot be done before it is noticed.
                tokens=40 if number % 3 else 600,
                leave_after=0 if number % 3 else 4,
            )
            for number in range(28)
        ]
        probes = [
            stream(client, f"load-{length}", prompt(length, str(length)), tokens=30)
            for length in PROBE_LENGTHS
        ]
        together = await asyncio.gather(*others[:20], *probes, *others[20:])
        return alone, together[20 : 20 + len(probes)]


@pytest.fixture(scope="module")
def texts(server: Server) -> tuple[list[str], list[str]]:
    found = asyncio.run(crowd(server.url))
    server.wait_idle()
    return found


def test_a_crowd_changes_nobodys_text(texts: tuple[list[str], list[str]]) -> None:
    alone, together = texts
    assert alone == together
    assert all(alone)


def test_the_probes_had_company_chunks_and_preemption(
    server: Server, texts: tuple[list[str], list[str]]
) -> None:
    """One SQL shows that equal texts were not won by being alone."""
    del texts
    found = rows(
        server.url,
        """
        SELECT max(len(i.requests)) AS rows, max(s.token_count) AS widest,
               count(DISTINCT s.step) FILTER (s.token_count > 1) AS chunks,
               (SELECT sum(preemptions) FROM request_end WHERE external_id LIKE 'load-%'
                   OR external_id LIKE 'crowd-%') AS preemptions
        FROM slice s JOIN iteration i USING (run_id, generation, step)
        JOIN request_end e USING (run_id, request)
        WHERE e.external_id = 'load-130'""",
    )
    ((batch_rows, widest, chunks, preemptions),) = found
    assert batch_rows > 8
    assert widest <= 64
    assert chunks >= 2
    assert preemptions >= 1


def test_every_law_holds_in_sql(server: Server, texts: tuple[list[str], list[str]]) -> None:
    del texts
    assert_laws(server.url)
    ((used, running, waiting),) = rows(
        server.url,
        "SELECT kv_blocks_used, running, waiting FROM iteration ORDER BY step DESC LIMIT 1",
    )
    assert (used, running, waiting) == (0, 0, 0)


def assert_counts_agree(server: Server) -> None:
    """SQL and recorded loss say what Prometheus says, and what the engine counted itself."""
    ((kept, lost, steps),) = rows(
        server.url,
        """
        SELECT sum(kept), sum(lost), sum(steps) FROM (
          SELECT count(*) AS kept, sum(lost_before) AS lost, max(step) AS steps
          FROM iteration GROUP BY run_id, generation)""",
    )
    assert kept + lost == steps, "the engine numbers its own steps"
    assert kept == server.metric("iterscope_iterations_total")
    ((seen, counted),) = rows(
        server.url,
        "SELECT (SELECT sum(len(preempted)) FROM iteration),"
        " (SELECT sum(preemptions) FROM request_end)",
    )
    assert seen == counted == server.metric("vllm:num_preemptions_total")
    for table, name in (("start", "accepted"), ("end", "ended")):
        ((found,),) = rows(server.url, f"SELECT count(*) FROM request_{table}")
        assert found == server.metric(f"iterscope_requests_{name}_total")
    ((computed, output),) = rows(
        server.url,
        "SELECT sum(prompt_tokens) FILTER (prefill_finished_at_ns IS NOT NULL),"
        " sum(output_tokens) FROM request_end",
    )
    assert computed == server.metric("vllm:prompt_tokens_total")
    assert output == server.metric("vllm:generation_tokens_total")


def test_sql_prometheus_and_the_engine_count_alike(
    server: Server, texts: tuple[list[str], list[str]]
) -> None:
    del texts
    assert_counts_agree(server)
    assert server.metric("vllm:num_preemptions_total") > 0


def test_a_client_that_leaves_frees_its_blocks_within_two_steps(
    server: Server, texts: tuple[list[str], list[str]]
) -> None:
    """No row of a cancelled request stands in a step after the one in flight at its abort."""
    del texts
    late = rows(
        server.url,
        """
        SELECT e.request, count(*) AS steps FROM request_end e
        JOIN slice s USING (run_id, request)
        JOIN iteration i ON i.run_id = s.run_id AND i.step = s.step
        WHERE e.finish = 'cancelled' AND i.begin_at_ns > e.cancel_requested_at_ns
        GROUP BY ALL HAVING steps > 1""",
    )
    cancelled = rows(
        server.url,
        "SELECT count(*), sum(wasted_tokens) FROM request_end WHERE cancel_cause = 'client'",
    )
    assert late == []
    assert cancelled[0][0] == 10


class Clients:
    """Streams on threads; each ends with what its client saw."""

    def __init__(self, url: str, count: int) -> None:
        self.seen: list[str] = []
        self.begun = 0
        self._threads = [
            threading.Thread(target=self._one, args=(url, number)) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _one(self, url: str, number: int) -> None:
        body = {
            "prompt": prompt(10, f"kill{number}"),
            "max_tokens": 1500,  # a busy machine takes its time to ask for the records
            "ignore_eos": True,
            "stream": True,
        }
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.begun += 1
                        if "error" in json.loads(line[6:]):
                            self.seen.append("error event")
                            return
            self.seen.append("whole answer")
        except httpx.TransportError as error:
            self.seen.append(type(error).__name__)

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"
        return self.seen


def test_engine_killed_under_load(model: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--kv-blocks", "900", "--history", str(tmp_path / "history"))
    with serving(tmp_path, model, *flags) as server:
        clients = Clients(server.url, 8)
        started = "SELECT count(*) FROM request_start"
        wait(lambda: clients.begun > 20 and rows(server.url, started) == [[8]], WAIT_S, server)
        os.kill(engine_pid(server), signal.SIGKILL)
        wait(lambda: server.get("/health").status_code == 503, WAIT_S, server)
        assert clients.join() == ["error event"] * 8
        wait(lambda: server.get("/ready").status_code == 200, 60, server)
        body = {"prompt": prompt(4, "after"), "max_tokens": 3, "ignore_eos": True}
        again = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
        assert again.json()["usage"]["completion_tokens"] == 3
        server.wait_idle()
        faults = """SELECT "where" FROM fault WHERE "where" <> 'flight recorder'"""
        assert rows(server.url, faults) == [["engine process"]]
        starts, ends = rows(
            server.url,
            "SELECT count(*) FROM request_start UNION ALL SELECT count(*) FROM request_end",
        )
        assert starts == ends == [9]
        lost = rows(
            server.url,
            """
            SELECT any_value(e.iterations) = count(s.step),
                   any_value(e.first_token_at_ns > e.admitted_at_ns)
            FROM request_end e JOIN slice s USING (run_id, request)
            WHERE e.finish = 'error' GROUP BY e.request""",
        )
        assert lost == [[True, True]] * 8, "the end does not tell what the iterations tell"
        assert rows(server.url, "SELECT count(DISTINCT generation) FROM run") == [[2]]
        assert_laws(server.url)
        assert_counts_agree(server)


def test_an_engine_that_cannot_be_started_is_tried_again(model: Path, tmp_path: Path) -> None:
    """No file descriptor is left when the engine dies: the server waits for some, and recovers."""
    with serving(tmp_path, model, *FLAGS) as server:
        pid = server.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, hard))
        os.kill(engine_pid(server), signal.SIGKILL)
        wait(lambda: "the engine could not be started" in server.log, WAIT_S, server)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        wait(lambda: answers(server, "/ready"), 60, server)
        body = {"prompt": prompt(4, "after"), "max_tokens": 3, "ignore_eos": True}
        again = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
        assert again.json()["usage"]["completion_tokens"] == 3


def test_server_killed_under_load(model: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--kv-blocks", "400", "--history", str(tmp_path / "history"))
    with serving(tmp_path, model, *flags) as server:
        clients = Clients(server.url, 8)
        wait(lambda: clients.begun > 20, WAIT_S, server)
        wait(
            lambda: rows(server.url, "SELECT count(*) FROM request_start") == [[8]], WAIT_S, server
        )
        engine = engine_pid(server)
        server.process.kill()
        server.process.wait()
        assert all(seen != "whole answer" for seen in clients.join())
        wait(lambda: not Path(f"/proc/{engine}").exists(), WAIT_S)
    with serving(tmp_path, model, *flags) as server:
        found = rows(server.url, "SELECT finish, error, count(*) FROM request_end GROUP BY ALL")
        assert found == [["error", "server lost", 8]]
        assert rows(server.url, "SELECT count(*) FROM request_start") == [[8]]
        law = laws()["each start has exactly one end"]
        assert rows(server.url, law.sql, *law.parameters) == []
