"""docs/misconceptions.md: each query runs, refutes what it says it does, and names what there is.

Owns a small recording of its own, made as the document tells it: three lives of one server under
the same requests (its engine parrots, its scheduler and record are the real ones), and the check of
every named query and every flag that the document mentions. The recorded figures are not asked for
here: they belong to the machine that they name.
"""

import argparse
import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.cli import build_parser
from server.source import Source, history_source
from telemetry.named import catalogue
from tests import tiny
from tests.servers import serving

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "misconceptions.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
QUERIES = dict(re.findall(r"```sql\n-- (\w+)\n(.*?)```", TEXT, re.DOTALL))
LIVES: tuple[tuple[str, ...], ...] = ((), ("--no-enable-chunked-prefill",), ("--batching=static",))
REQUESTS, STEP_MS = 12, 4


async def ask_in_turns(url: str) -> None:
    """Send streams of unlike lengths, each once the one before it has begun to answer."""
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client:
        tasks = []
        for number in range(REQUESTS):
            body = {"prompt": [7 + number] * 40, "max_tokens": 12 + 9 * (number % 4)}
            body |= {"ignore_eos": True, "stream": True}
            tasks.append(asyncio.create_task(client.post("/v1/completions", json=body)))
            await asyncio.sleep(3 * STEP_MS / 1000)
        for answer in await asyncio.gather(*tasks):
            answer.raise_for_status()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    folder = tmp_path_factory.mktemp("misconceptions")
    model = tiny.write(folder / "tiny")
    common = ("--max-num-seqs=6", "--max-num-batched-tokens=32", "--max-model-len=256")
    kept = f"--history={folder / 'history'}"
    for flags in LIVES:
        with serving(folder, model, *common, kept, *flags, parrot=True, beat_ms=STEP_MS) as server:
            asyncio.run(ask_in_turns(server.url))
            server.wait_idle()
    with history_source(folder / "history") as source:
        yield source


def answer(record: Source, name: str) -> list[dict[str, Any]]:
    found = record.ask(QUERIES[name])
    names = [column["name"] for column in found.columns]
    return [dict(zip(names, row, strict=True)) for row in found.rows]


def test_there_are_six_each_with_a_query_and_an_answer() -> None:
    parts = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    said = [part for part in parts if re.match(r'\d\. "', part)]
    assert len(said) == len(QUERIES) == 6
    for part in said:
        name = re.findall(r"-- (\w+)", part)[0]
        heads = re.findall(r"^\| (.+) \|$", part, re.MULTILINE)
        assert len(heads) >= 2, f"{name} has no recorded answer"


def test_a_step_is_one_launch_for_all_that_run(record: Source) -> None:
    (row,) = answer(record, "one_launch")
    assert row["rows"] > 1.5 * row["steps"] > 0
    assert row["rows_most"] > 2


def test_the_batch_has_many_sizes(record: Source) -> None:
    (row,) = answer(record, "not_always_full")
    assert row["sizes"] > 2
    assert row["rows_least"] < row["rows_most"] <= row["seqs_max"] == 6
    assert row["full_share"] < 1


def test_blocks_in_one_piece_would_be_many_more(record: Source) -> None:
    (row,) = answer(record, "paging")
    assert 0 < row["blocks_held"] < row["blocks_set_aside_whole"]
    assert row["blocks_set_aside_whole"] == row["requests_then"] * 256 // 16


def test_a_token_beside_others_is_told_apart_from_one_alone(record: Source) -> None:
    found = {row["a_token"]: row["steps"] for row in answer(record, "not_everything")}
    assert set(found) <= {"alone", "beside others", "beside a prompt"}
    assert found["beside others"] > 0
    assert found["beside a prompt"] > 0


def test_joining_does_not_hang_on_cut_prompts(record: Source) -> None:
    chunked, whole, static = answer(record, "not_chunking")
    assert chunked["admitted"] == whole["admitted"] == static["admitted"] == REQUESTS
    assert chunked["joined_a_running_batch"] > 0
    assert chunked["prompts_in_parts"] > 0
    assert whole["joined_a_running_batch"] > 0
    assert whole["prompts_in_parts"] == 0
    assert static["joined_a_running_batch"] == 0
    assert static["prompts_in_parts"] > 0


def test_a_fixed_batch_streams_and_holds(record: Source) -> None:
    (row,) = answer(record, "streams_prove_nothing")
    assert row["streams"] == REQUESTS
    assert row["first_token_ms_p50"] < row["over_ms_p50"]
    assert row["joined_a_running_batch"] == 0
    assert row["held_ms_mean"] > 0
    assert row["idle_share"] > 0


def test_what_the_document_names_is_there() -> None:
    for line in re.findall(r"^Named queries: (.*)$", TEXT, re.MULTILINE):
        for code in re.findall(r"`([^`]+)`", line):
            name, *rest = shlex.split(code)
            if name in {"batch_held", "iterscope"}:
                continue
            given = dict(one.split("=", 1) for one in rest if "=" in one)
            catalogue()[name].bind(given)
    flags = set(
        re.findall(r"(?<![\w-])--[a-z][\w-]+", re.sub(r"```sql.*?```", "", TEXT, flags=re.S))
    )
    known = "".join(help_of(build_parser(command)) for command in ("serve", "sql", "lab"))
    assert flags
    assert not {flag for flag in flags if not re.search(rf"{flag}\b", known)}


def help_of(parser: argparse.ArgumentParser) -> str:
    """Return a parser's help and that of all commands below it."""
    below = [
        inner
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for inner in action.choices.values()
    ]
    return parser.format_help() + "".join(map(help_of, below))
