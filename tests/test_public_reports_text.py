"""Faults that servers of this kind had with text, tried on a real server whose engine parrots.

An answer is its prompt's tokens again, so a test chooses every token that is generated. The oracle
is the tokenizer's own decoding of all of them at once; each test names the public report.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend

from server.tokenizer import byte_of_char
from tests import tiny
from tests.api import complete, events, post
from tests.servers import Server, serving
from tests.test_schemas import DEAR

VOCAB = tiny.Shape.vocab_size
MODEL_LEN = 65_536
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("text")
    model = tiny.write(folder / "model", shape=tiny.Shape(model_len=MODEL_LEN))
    with serving(folder, model, "--kv-blocks", "20000", parrot=True) as running:
        yield running


@pytest.fixture(scope="module")
def backend() -> Backend:
    return tiny.tokenizer()


def deltas(server: Server, ids: list[int], **more: Any) -> tuple[list[str], str]:
    """Return the texts of a stream that generates `ids`, and its finish_reason."""
    body = {"prompt": ids, "max_tokens": len(ids), "ignore_eos": True} | more
    found = events(server, "/v1/completions", body)
    reasons = [event["choices"][0]["finish_reason"] for event in found]
    assert reasons[:-1] == [None] * (len(found) - 1)
    return [event["choices"][0]["text"] for event in found], reasons[-1]


def whole(server: Server, ids: list[int], **more: Any) -> tuple[str, str]:
    body = {"prompt": ids, "max_tokens": len(ids), "ignore_eos": True} | more
    (choice,) = complete(server, body)["choices"]
    return choice["text"], choice["finish_reason"]


def bytes_as_ids(backend: Backend, text: str) -> list[int]:
    """Return one token for each byte of a text, as a model that never merges would write it."""
    char_of = {byte: char for char, byte in byte_of_char().items()}
    return [backend.token_to_id(char_of[byte]) for byte in text.encode()]


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 ok", "ภาษาไทย 日本語", "Z̷̡͎̪̓a̵̙̅l̴̰͝g̸̬͗o̷͕̍", "🇩🇪👍🏽"])
def test_characters_come_whole_byte_by_byte(server: Server, backend: Backend, text: str) -> None:
    """qwisp#134: half a character became U+FFFD, and the stream was silent from there on."""
    ids = bytes_as_ids(backend, text)
    pieces, _ = deltas(server, ids)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == whole(server, ids)[0] == text


def test_a_text_that_ends_within_a_character(server: Server, backend: Backend) -> None:
    ids = bytes_as_ids(backend, "a🙂")[:-1]
    pieces, _ = deltas(server, ids)
    assert "".join(pieces) == whole(server, ids)[0] == "a" + REPLACEMENT
    assert [piece for piece in pieces if REPLACEMENT in piece] == [pieces[-1] or pieces[-2]]


def test_no_sequence_of_ids_breaks_a_stream(server: Server, backend: Backend) -> None:
    """vllm#17448: legal sequences raised in the incremental decoder, which ended all requests."""
    draw = random.Random(4)
    sequences = [[draw.randrange(VOCAB) for _ in range(64)] for _ in range(1000)]

    async def run() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=20)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            calls = [
                client.post(
                    "/v1/completions",
                    json={"prompt": sequences[at : at + 50], "max_tokens": 64, "ignore_eos": True},
                )
                for at in range(0, len(sequences), 50)
            ]
            return list(await asyncio.gather(*calls))

    texts = [choice["text"] for one in asyncio.run(run()) for choice in one.json()["choices"]]
    assert texts == backend.decode_batch(sequences, skip_special_tokens=True)
    for ids in sequences[:20]:
        pieces, _ = deltas(server, ids)
        assert "".join(pieces) == backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "text",
    ["for LLMs. It is", "a    b", "\n\n  x", "   leading", "\ttabs\t\tand\r\n", "        if x:\n"],
)
def test_blanks_are_as_in_the_whole(server: Server, backend: Backend, text: str) -> None:
    """vllm#984: decoding token by token lost blanks."""
    ids = backend.encode(text, add_special_tokens=False).ids
    assert "".join(deltas(server, ids)[0]) == text == backend.decode(ids)


STOPPED = (
    "The scheduler decides again at every iteration.\nA request waits; 東京は今日も晴れです 🙂."
)


@pytest.mark.parametrize(
    "stop",
    [
        ["T"],
        ["ched"],
        ["r d"],
        ["s again at e"],
        [".\nA"],
        ["京は今"],
        ["🙂"],
        ["waits", "wait", "wa", "w"],
        ["iteration!", "iterations", "iteration."],
        ["never there", "again at x", "again at every y"],
        ["e"] * 4,
    ],
)
def test_a_stop_string_cuts_before_its_earliest_place(
    server: Server, backend: Backend, stop: list[str]
) -> None:
    """vllm#3672: parts of stop strings that crossed tokens were already streamed."""
    for ids in (backend.encode(STOPPED).ids, bytes_as_ids(backend, STOPPED)):
        places = [place for one in stop if (place := STOPPED.find(one)) >= 0]
        want = (STOPPED[: min(places)], "stop") if places else (STOPPED, "length")
        pieces, reason = deltas(server, ids, stop=stop)
        assert ("".join(pieces), reason) == want
        assert whole(server, ids, stop=stop) == want


def test_a_long_text_without_blanks_costs_the_same_throughout(
    server: Server, backend: Backend
) -> None:
    """vllm#16963: outputs without blanks were decoded again from their start at each step."""
    for unit in ("a", "犬"):
        ids = bytes_as_ids(backend, unit)
        count = 8_000 // len(ids)
        body = {"prompt": ids * count, "max_tokens": len(ids) * count, "ignore_eos": True}
        stamps: list[float] = []  # of every character
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text = json.loads(line[6:])["choices"][0]["text"]
                    stamps += [time.monotonic()] * text.count(unit)
        assert len(stamps) == count
        quarter = count // 4
        early, late = stamps[quarter] - stamps[0], stamps[-1] - stamps[-1 - quarter]
        assert late < 3 * early + 0.3, (unit, early, late)


def test_megabytes_of_text_leave_streams_alone(server: Server) -> None:
    """vllm#24910: templates and tokens of a large text were made on the event loop.

    So would be the values of a body that is all brackets, and dearer than any text.
    """
    body = {"prompt": "a", "max_tokens": 50_000, "ignore_eos": True, "stream": True}
    texts = ["word " * 10_000, "w" * 5_000_000, "🙂" * 1_000_000, "word " * 1_000_000]
    gaps: list[float] = []

    async def poll(client: httpx.AsyncClient, done: asyncio.Event) -> None:
        while not done.is_set():
            began = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            gaps.append(time.monotonic() - began)

    async def run() -> None:
        done = asyncio.Event()
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            polling = asyncio.create_task(poll(client, done))
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                for text in texts:
                    message = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
                    answer = await client.post("/v1/chat/completions", json=message)
                    assert answer.status_code in (200, 400)
                for data in DEAR.values():
                    answer = await client.post("/v1/chat/completions", content=data)
                    assert answer.status_code == 400
                await anext(lines)
            done.set()
            await polling

    asyncio.run(run())
    assert max(gaps) < 1.0, "encoding any of these on the event loop takes seconds"
    still = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert still.json()["choices"][0]["text"] == "a"
