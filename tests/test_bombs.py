"""Queries made to take all memory or all time: each costs its own child, and nothing else.

Owns the list of bombs and the proof that the server's memory stays where it was, with real children
under the kernel's real limits.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from telemetry.answer import QueryError
from telemetry.confinement import MEMORY_BYTES_MAX
from telemetry.queries import Queries
from tests import tiny
from tests.api import events, ids, post
from tests.children import ENDLESS, answering, pids, status_kb
from tests.servers import serving

GROWTH_KB_MAX = 64 * 1024


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queries]:
    with answering(tmp_path_factory.mktemp("history"), deadline_s=2.0) as queries:
        yield queries


BOMBS = {
    "a list of 500 million": "SELECT list_sum(range(500000000))",
    "a text of 2 GB": "SELECT repeat('x', 2000000000)",
    "its length": "SELECT length(repeat('x', 2000000000))",
    "300 million rows from a list": "SELECT unnest(range(300000000))",
    "a million large texts": "SELECT repeat('x', 100000000) FROM range(1000000)",
    "lists of lists": "SELECT range(10000000) FROM range(1000)",
    "everything in one list": "SELECT list(range) FROM range(100000000)",
    "sorted by chance": "SELECT * FROM range(100000000) ORDER BY random()",
    "distinct": "SELECT count(DISTINCT range) FROM range(100000000)",
    "sorted cross join": "SELECT * FROM range(100000) a, range(100000) b ORDER BY random()",
    "a text that doubles": (
        "WITH RECURSIVE t AS (SELECT 'xy' AS x UNION ALL SELECT x || x FROM t) SELECT count(*)"
        " FROM t"
    ),
    "cross join": ENDLESS,
    "endless recursion": (
        "WITH RECURSIVE t AS (SELECT 1 x UNION ALL SELECT x + 1 FROM t) SELECT count(*) FROM t"
    ),
    "a slow expression": "SELECT count(*) FROM range(100000000) WHERE sleep_ms(1000) IS NULL",
    "deep parentheses": "SELECT " + "(" * 40_000 + "1" + ")" * 40_000,
    "a long sum": "SELECT " + "+".join(["1"] * 40_000),
    "wide columns": "PIVOT range(10000) ON range",
    "deep JSON": "SELECT json_extract(repeat('[', 10000000), '$')",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_harms_its_child_alone(queries: Queries, bomb: str) -> None:
    before = status_kb("self", "VmRSS")
    started = time.monotonic()
    with pytest.raises(QueryError) as refused:
        queries.run(BOMBS[bomb])
    assert time.monotonic() - started < 20
    assert status_kb("self", "VmRSS") - before < GROWTH_KB_MAX
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 1000
    assert queries.run("SELECT count(*) FROM slice").rows == [[100]]
    for pid in pids(queries):
        assert status_kb(pid, "VmPeak") <= MEMORY_BYTES_MAX // 1024


def test_a_large_answer_is_cut_where_it_is_made(tmp_path: Path) -> None:
    with answering(tmp_path, deadline_s=30.0) as queries:
        before = status_kb("self", "VmRSS")
        rows = queries.run("SELECT range, repeat('x', 20000) FROM range(100000000)")
        assert rows.truncated
        assert 0 < rows.row_count < 1000
        one = queries.run("SELECT repeat('x', 20000000)")
        assert (one.rows, one.truncated) == ([], True)
        del rows, one
        assert status_kb("self", "VmRSS") - before < 2 * GROWTH_KB_MAX


def test_streams_beside_bombs_say_the_same_and_the_server_stays_small(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "model")
    story = {"prompt": ids(40), "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    flags = (f"--history={tmp_path / 'history'}", "--sql-deadline-s", "3")
    with serving(tmp_path, model, *flags) as server:

        def tell() -> str:
            chunks = events(server, "/v1/completions", story)
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        alone = tell()
        before = status_kb(server.process.pid, "VmRSS")
        with ThreadPoolExecutor(4) as threads:
            bombs = [
                threads.submit(post, server, "/telemetry/sql", {"sql": bomb})
                for bomb in (ENDLESS, *list(BOMBS.values())[:4], ENDLESS)
            ]
            told = {tell() for _ in range(2)}
            statuses = {bomb.result().status_code for bomb in bombs}
        assert told == {alone}
        assert statuses <= {400, 408}
        assert status_kb(server.process.pid, "VmHWM") - before < 2 * GROWTH_KB_MAX
        asked = post(server, "/telemetry/sql", {"sql": "SELECT count(*) FROM request_end"})
        assert asked.json().get("rows") == [[3]], asked.text
