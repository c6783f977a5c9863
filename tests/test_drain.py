"""The end of a server at every moment: as it reads a model, loads it, warms up, serves, drains.

Real processes and signals. Whatever hangs on its sockets at that moment, it ends with code 0 and
without a trace, and every client has an answer, an error or a closed connection.
"""

import json
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.api import raw_request
from tests.servers import Server, command, serving, wait
from tests.test_connections import HOST, POST, connect, rest_of, status_of

LONG = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("drain") / "tiny")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def listens(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_read(
    demo_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Before there is any event loop: reading the tokenizer of the demo takes a while."""
    port = free_port()
    log_file = tmp_path / "log"
    with log_file.open("wb") as log:
        arguments = [*command(demo_model), "--port", str(port)]
        process = subprocess.Popen(arguments, stdout=log, stderr=log)
    try:
        wait(lambda: listens(port), 60)
        process.send_signal(number)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log_file.read_text()


@pytest.mark.parametrize(
    ("stage", "number"), [("loading weights", signal.SIGTERM), ("warming up", signal.SIGINT)]
)
def test_a_signal_while_the_engine_starts(
    model: Path, tmp_path: Path, stage: str, number: signal.Signals
) -> None:
    with serving(tmp_path, model, ready=False) as server:
        server.wait(lambda: stage in server.log or "ready in" in server.log, 60)
        assert server.stop(number) == 0
        assert "Traceback" not in server.log


def held_open(server: Server, stack: ExitStack) -> list[socket.socket]:
    """Return connections of every kind that a server may meet at its end."""
    return [
        stack.enter_context(connect(server, sent))
        for sent in (
            b"",
            b"GET /health HT",
            POST + b"Content-Length: 5000\r\n\r\n{",
            POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
            b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n",
            b"GET /telemetry/stream HTTP/1.1\r\n" + HOST + b"\r\n",
        )
    ]


def test_whatever_hangs_on_the_sockets_there_is_no_trace(model: Path, tmp_path: Path) -> None:
    """A half-sent POST had uvicorn cancel a task, and print how."""
    history = tmp_path / "history"
    with serving(tmp_path, model, "--history", str(history), "--drain-s", "1") as server:
        with ExitStack() as stack:
            held = held_open(server, stack)
            stalled = stack.enter_context(raw_request(server, LONG | {"n": 8}))
            server.wait(lambda: server.metric("vllm:num_requests_running") == 8)
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < 12
            told = [rest_of(made) for made in held]
            rest_of(stalled)
        assert [status_of(one) for one in told[2:]] == [503, 503, 200, 200]
        assert b"retry-after" in told[2].lower()
        assert "Traceback" not in server.log
        assert "Exception" not in server.log
    ends = answer(history, "SELECT finish, cancel_cause, count(*) FROM request_end GROUP BY ALL")
    assert ends in ([["cancelled", "drain", 8]], [["cancelled", "client", 8]])


def answer(history: Path, sql: str) -> list[list[Any]]:
    found = subprocess.run(
        [command(Path())[0], "sql", "--history", str(history), "--json", sql],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    rows: list[list[Any]] = json.loads(found.stdout)["rows"]
    return rows


def test_the_drain_finishes_what_runs_and_takes_nothing_new(model: Path, tmp_path: Path) -> None:
    history = tmp_path / "history"
    with (
        ThreadPoolExecutor(6) as pool,
        serving(tmp_path, model, "--history", str(history), "--drain-s", "60") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        body = LONG | {"max_tokens": 600}
        streams = [pool.submit(streamed, server, body) for _ in range(5)]
        server.wait(lambda: server.metric("vllm:num_requests_running") == 5)
        watching = pool.submit(watched, server)
        server.wait(lambda: 'reader="stream"' in client.get("/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        server.wait(lambda: client.get("/ready").status_code == 503)
        assert client.get("/health").status_code == 200
        assert client.get("/health").json()["draining"]
        refused = client.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        for stream in streams:
            text = stream.result()
            assert text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in text
        assert server.process.wait(30) == 0
        assert b"event: request_end" in watching.result(), "the page saw the end of them all"
        assert "Traceback" not in server.log
    ends = answer(history, "SELECT finish, count(*) FROM request_end GROUP BY ALL")
    assert ends == [["length", 5]]
    assert answer(history, "SELECT reason, count(*) FROM rejection GROUP BY ALL") == [
        ["draining", 1]
    ]


def streamed(server: Server, body: dict[str, Any]) -> str:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text


def watched(server: Server) -> bytes:
    seen = b""
    try:
        with httpx.stream("GET", f"{server.url}/telemetry/stream", timeout=60) as response:
            for part in response.iter_raw():
                seen += part
    except httpx.RemoteProtocolError:
        pass  # such a stream has no end of its own: it is cut
    return seen


def test_show_prompts_does_what_it_says(model: Path, tmp_path: Path) -> None:
    """Off, nothing of a prompt is in the log (see test_security.py); on, all of it, escaped."""
    with serving(tmp_path, model, "--show-prompts") as server:
        assert "--show-prompts" in server.log
        prompt = 'say "hi"\n2026-01-01 ERROR forged line'
        sent = {"prompt": prompt, "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=sent, timeout=60).status_code == 200
        assert 'say \\"hi\\"\\n2026-01-01 ERROR forged line' in server.log
        assert "\n2026-01-01 ERROR" not in server.log
