"""Inputs that others collected to break parsers, sent to a real server: JSON, strings, UTF-8.

The engine parrots, so what goes in must come out again, character by character. tests/data/NOTICE
says where the files are from. Nothing may be a server error, and the server answers afterwards.
"""

import asyncio
import gzip
import json
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend

from server.tokenizer import byte_of_char
from tests import tiny
from tests.api import complete, events, still_answers
from tests.fuzz import Client
from tests.servers import Server, serving

DATA = Path(__file__).parent / "data"
STOP_CHARS_MAX = 1000


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    model = tiny.write(folder / "model", shape=tiny.Shape(model_len=65_536))
    with serving(folder, model, "--kv-blocks", "20000", parrot=True) as running:
        yield running


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    yield running_server
    assert complete(running_server, {"prompt": [5, 6], "max_tokens": 2})["usage"]
    running_server.wait_idle()


@pytest.fixture(scope="module")
def backend() -> Backend:
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def naughty() -> list[str]:
    packed = (DATA / "naughty_strings.json.gz").read_bytes()
    strings: list[str] = json.loads(gzip.decompress(packed))
    return [text for text in strings if text]


def json_files() -> dict[str, bytes]:
    found = {}
    with tarfile.open(DATA / "json_test_suite.tar.gz") as archive:
        for member in archive.getmembers():
            if member.name.endswith(".json"):
                file = archive.extractfile(member)
                assert file is not None
                found[Path(member.name).name] = file.read()
    return found


def posted(server: Server, bodies: list[tuple[str, bytes]]) -> list[tuple[int, Any]]:
    """Return status and JSON of each body, sent one after another over one connection."""

    async def run() -> list[tuple[int, Any]]:
        client = Client(server.url)
        answers = [await client.post(path, data) for path, data in bodies]
        await client.close()
        return [(status, json.loads(body)) for status, body in answers]

    return asyncio.run(run())


def completed(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first choice of each completion."""
    sent = [
        ("/v1/completions", json.dumps({"ignore_eos": True} | body).encode()) for body in bodies
    ]
    answers = posted(server, sent)
    assert [status for status, _ in answers] == [200] * len(bodies)
    return [answer["choices"][0] for _, answer in answers]


FORMS = {
    "/v1/completions": (
        b"%s",
        b'{"prompt":%s,"max_tokens":1}',
        b'{"prompt":[5],"max_tokens":1,"logit_bias":%s}',
        b'{"prompt":[5],"max_tokens":1,"stop":%s}',
        b'{"prompt":[5],"max_tokens":1,"user":%s}',
        b'{"prompt":[5],"max_tokens":1,"response_format":%s}',
    ),
    "/v1/chat/completions": (
        b'{"messages":%s,"max_tokens":1}',
        b'{"messages":[{"role":"user","content":%s}],"max_tokens":1}',
        b'{"messages":[{"role":"assistant","content":"","tool_calls":%s}],"max_tokens":1}',
    ),
    "/tokenize": (b'{"prompt":%s}',),
    "/detokenize": (b'{"tokens":%s}',),
}


def test_no_json_breaks_anything(server: Server) -> None:
    files = json_files()
    assert len(files) == 318
    bodies = [
        (path, form % data if form != b"%s" else data)
        for path, forms in FORMS.items()
        for form in forms
        for data in files.values()
    ]
    for (path, data), (status, answer) in zip(bodies, posted(server, bodies), strict=True):
        assert status in (200, 400, 404), (path, data, answer)
        if status != 200:
            assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_json_is_taken_for_what_it_is(server: Server) -> None:
    """Whatever stands in a field nobody knows: the body is JSON or it is not."""
    files = {name: data for name, data in json_files().items() if name[0] in "yn"}
    form = b'{"prompt":[5],"max_tokens":1,"unknown":%s}'
    bodies = [("/v1/completions", form % data) for data in files.values()]
    for name, (status, answer) in zip(files, posted(server, bodies), strict=True):
        assert status == (200 if name[0] == "y" else 400), (name, answer)


def test_naughty_strings_come_out_as_they_went_in(
    server: Server, backend: Backend, naughty: list[str]
) -> None:
    naughty = naughty[::2]
    counts = [len(backend.encode(text).ids) for text in naughty]
    bodies = [
        {"prompt": text, "max_tokens": count, "user": text}
        for text, count in zip(naughty, counts, strict=True)
    ]
    assert [choice["text"] for choice in completed(server, bodies)] == naughty
    for text, body in list(zip(naughty, bodies, strict=True))[::10]:
        pieces = events(server, "/v1/completions", {"ignore_eos": True} | body)
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == text


def test_naughty_strings_stop_a_text_where_they_stand(
    server: Server, backend: Backend, naughty: list[str]
) -> None:
    bodies, want = [], []
    for text in naughty[1::4]:
        if len(text) <= STOP_CHARS_MAX:
            whole = f"ab {text}{text} cd"
            count = len(backend.encode(whole).ids)
            bodies.append({"prompt": whole, "max_tokens": count, "stop": [text]})
            want.append((whole[: whole.index(text)], "stop"))
    choices = completed(server, bodies)
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == want


def test_naughty_strings_are_said_in_a_chat(server: Server, naughty: list[str]) -> None:
    bodies = [
        ("/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": 1}).encode())
        for text in naughty
        for messages in ([{"role": "user", "content": text, "name": text}],)
    ]
    assert {status for status, _ in posted(server, bodies)} == {200}


def test_naughty_strings_in_a_header_are_echoed_or_refused(
    server: Server, naughty: list[str]
) -> None:
    port = httpx.URL(server.url).port or 0
    body = b'{"prompt":[5],"max_tokens":1}'
    codes = set()
    for text in naughty:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Length: %d\r\nX-Request-Id: %s\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
            raw.sendall(head % (len(body), text.encode()) + body)
            answer = b""
            while part := raw.recv(65536):
                answer += part
        status = int(answer[9:12])
        codes.add(status)
        assert status in (200, 400, 431), (text, answer)
        if status == 200 and text.strip() == text and text.isascii() and " " not in text:
            assert b"x-request-id: %s\r\n" % text.encode() in answer
    assert 200 in codes
    assert 400 in codes


def test_utf8_is_read_as_utf8(server: Server) -> None:
    """Bytes that are no UTF-8 are a 400; what is comes out again, unchanged."""
    lines = (DATA / "utf8_tests.bin").read_bytes().split(b"\n")
    cases = [parts for line in lines if len(parts := line.split(b":", 2)) == 3]
    assert len(cases) > 100
    bodies = [
        ("/v1/completions", b'{"prompt":"%s","max_tokens":1,"echo":true}' % data)
        for _, _, data in cases
    ]
    for (number, kind, data), (status, answer) in zip(cases, posted(server, bodies), strict=True):
        if kind == b"invalid" or any(byte < 32 or byte in b'"\\' for byte in data) or not data:
            assert status == 400, (number, data, answer)
        else:
            assert status == 200, (number, data, answer)
            assert answer["choices"][0]["text"].startswith(data.decode()), (number, data)


def test_bytes_of_no_character_are_replaced_once_each(server: Server, backend: Backend) -> None:
    """As output: a model may write any bytes, and the text is what Python makes of them."""
    id_of = {byte: backend.token_to_id(char) for char, byte in byte_of_char().items()}
    lines = (DATA / "utf8_tests.bin").read_bytes().split(b"\n")
    cases = [parts[2] for line in lines if len(parts := line.split(b":", 2)) == 3 and parts[2]]
    bodies = [{"prompt": [id_of[byte] for byte in data], "max_tokens": len(data)} for data in cases]
    texts = [choice["text"] for choice in completed(server, bodies)]
    assert texts == [data.decode("utf-8", "replace") for data in cases]


def test_every_kind_of_character_comes_out(server: Server, backend: Backend) -> None:
    text = (DATA / "utf8_printable.txt").read_text(encoding="utf-8")
    body = {"prompt": text, "max_tokens": len(backend.encode(text).ids), "ignore_eos": True}
    assert complete(server, body)["choices"][0]["text"] == text
    pieces = [one["choices"][0]["text"] for one in events(server, "/v1/completions", body)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text
    still_answers(server)
