"""The load generator against real servers: on time whatever comes, every token stamped and counted.

GIVEN a server whose engine parrots on a beat, WHEN a workload is sent by the generator's own
process, THEN answers, leavers, refusals and the unfinished are told apart; a server that stands
still delays no send, and the wait counts from the scheduled instant.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.lab import ceiling
from bench.lab.figures import client_figures, counts, met
from bench.lab.http_stream import answer_of
from bench.lab.make import Recipe, make
from bench.lab.workload import Ask, Workload, write
from server.cli import main
from tests import tiny
from tests.servers import Server, engine_pid, serving

BEAT_MS = 20
FLAGS = ("--max-num-seqs", "64", "--kv-blocks", "2000")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("generator")
    model = tiny.write(folder / "tiny")
    with serving(folder, model, *FLAGS, parrot=True, beat_ms=BEAT_MS) as running:
        yield running


def workload(asks: list[Ask], seconds: float, **changed: Any) -> Workload:
    told = {"name": "w", "source": "test", "licence": "none", "arrivals": "given", "seed": 1}
    return Workload(**told, seconds=seconds, asks=asks, **changed)


def command(made: Workload, url: str, folder: Path, cut_off_s: float = 5.0) -> list[str]:
    write(made, folder / "w.json.gz")
    settings = ["--url", url, "--name", folder.name, "--cut-off-s", str(cut_off_s)]
    where = [str(folder / "w.json.gz"), "--out", str(folder / "load.json")]
    return [sys.executable, "-m", "bench.lab.generator", *where, *settings]


def load(made: Workload, url: str, folder: Path, cut_off_s: float = 5.0) -> dict[str, Any]:
    subprocess.run(command(made, url, folder, cut_off_s), check=True, timeout=60)
    found: dict[str, Any] = json.loads((folder / "load.json").read_text())
    return found


def test_every_token_has_its_instant(server: Server, tmp_path: Path) -> None:
    asks = [Ask(prompt=[20, 21, 22], max_tokens=5, at_s=0.0, tenant="t", priority=1)]
    asks += [Ask(prompt="hello there", max_tokens=4, at_s=0.1)]
    asks += [Ask(prompt=[30, 31], max_tokens=500, at_s=0.1, leaves_after_s=0.3)]
    asks += [Ask(prompt=[30, 31], max_tokens=1000, at_s=0.2)]
    asks += [Ask(prompt=[10**7], max_tokens=5, at_s=0.2)]
    found = load(workload(asks, 0.3), server.url, tmp_path, cut_off_s=0.6)
    first, text, leaver, long, bad = found["asks"]
    assert [ask["outcome"] for ask in found["asks"]] == [
        *("finished", "finished", "left", "unfinished", "failed")
    ]
    assert first["ids"] == [20, 21, 22, 20, 21]
    assert text["output_tokens"] == len(text["tokens_ns"]) == 4
    assert bad["status"] == 400
    assert "10000000" in bad["error"] or "prompt" in bad["error"]
    for ask in (first, text, leaver, long):
        assert ask["tokens_ns"] == sorted(ask["tokens_ns"])
        assert ask["tokens_ns"][0] > ask["sent_ns"] >= ask["scheduled_ns"]
    gaps = [b - a for a, b in zip(first["tokens_ns"], first["tokens_ns"][1:], strict=False)]
    # Tokens come on the engine's beat; a busy machine delays a read, never the mean by much.
    assert sum(gaps) / len(gaps) > 0.5 * BEAT_MS * 1e6
    assert 1 <= len(leaver["tokens_ns"]) < 30
    assert leaver["ended_ns"] - leaver["sent_ns"] > 0.29e9  # timers count whole milliseconds
    assert counts(found) == {
        "sent": 5, "finished": 2, "cancelled": 1, "failed": 1, "refused": 0, "unfinished": 1,
        "without_first_token": 1,
    }  # fmt: skip
    server.wait_idle()


def test_a_server_that_stands_still_delays_no_send(server: Server, tmp_path: Path) -> None:
    """Coordinated omission: requests that come while nothing is answered must be seen to wait."""
    asks = [Ask(prompt=[20], max_tokens=1, at_s=0.05 * number) for number in range(40)]
    process = subprocess.Popen(command(workload(asks, 2.0), server.url, tmp_path))
    engine = engine_pid(server)
    try:
        server.wait(lambda: server.metric("iterscope_requests_accepted_total") > 8)
        os.kill(engine, signal.SIGSTOP)
        stopped = time.monotonic()
        while time.monotonic() < stopped + 1.0:
            time.sleep(0.02)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert process.wait(30) == 0
    found = json.loads((tmp_path / "load.json").read_text())
    assert [ask["outcome"] for ask in found["asks"]] == ["finished"] * 40
    waited = [(ask["tokens_ns"][0] - ask["scheduled_ns"]) / 1e6 for ask in found["asks"]]
    # The pause of a second is met by some 20 of 40 sends, a twentieth of a second apart: a client
    # that waits for answers before it sends the next would have seen it once.
    assert sum(ms > 100 for ms in waited) >= 12
    assert max(waited) > 700
    figures = client_figures(found, ttft_ms=100.0, tpot_ms=100.0)
    assert figures["goodput_share"] is not None
    assert figures["goodput_share"] < 0.75


def test_a_closed_loop_keeps_so_many_in_flight(server: Server, tmp_path: Path) -> None:
    made = make(
        Recipe(ids_below=200, context_tokens=64), rate=500.0, seconds=0.8, seed=1, concurrency=3
    )
    found = load(made, server.url, tmp_path, cut_off_s=3.0)
    edges = sorted(
        edge for ask in found["asks"] for edge in ((ask["sent_ns"], 1), (ask["ended_ns"], -1))
    )
    deepest = flying = 0
    for _, step in edges:
        flying += step
        deepest = max(deepest, flying)
    assert deepest == 3
    assert len(found["asks"]) > 3
    assert all(ask["sent_ns"] < 0.85e9 for ask in found["asks"])


def test_a_server_that_is_gone_is_told(tmp_path: Path) -> None:
    asks = [Ask(prompt=[1], max_tokens=1, at_s=0.0)]
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        told = [*command(workload(asks, 0.1), url, tmp_path, 1.0), "--model", "m"]
        subprocess.run(told, check=True, timeout=30)
    (ask,) = json.loads((tmp_path / "load.json").read_text())["asks"]
    assert (ask["outcome"], ask["status"]) == ("failed", 0)


@pytest.mark.parametrize("word", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_keeps_what_was_sent_by_then(
    server: Server, tmp_path: Path, word: signal.Signals
) -> None:
    asks = [Ask(prompt=[20], max_tokens=1, at_s=0.0)]
    asks += [Ask(prompt=[20], max_tokens=900, at_s=0.02), Ask(prompt=[20], max_tokens=1, at_s=60.0)]
    write(workload(asks, 60.0), tmp_path / "w.json.gz")
    out, before = tmp_path / "load.json", server.metric("iterscope_requests_accepted_total")
    told = ["iterscope", "lab", "load", str(tmp_path / "w.json.gz"), "--url", server.url]
    told[0] = str(Path(sys.executable).parent / told[0])
    with subprocess.Popen([*told, "--out", str(out)], stdout=-1, stderr=-1, text=True) as process:
        try:
            server.wait(lambda: server.metric("iterscope_requests_accepted_total") == before + 2)
            server.wait(lambda: server.metric("iterscope_requests", state="running") == 1)
            process.send_signal(word)
            printed, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert "figures of" in printed
    assert f"what was sent by then is in {out}" in errors
    assert len(errors.splitlines()) == 1
    found = json.loads(out.read_text())
    assert [ask["outcome"] for ask in found["asks"]] == ["finished", "unfinished"]
    assert found["stopped"] is True
    assert 0 < found["seconds"] < 30
    assert found["cut_off_s"] == 0
    server.wait_idle()


class _Elsewhere(BaseHTTPRequestHandler):
    """A server that leads away from /v1/models, or has no such place."""

    def do_GET(self) -> None:
        away = self.path == "/v1/models"
        self.send_response(302 if away else 404)
        if away:
            self.send_header("Location", "https://elsewhere.example/login")
        self.end_headers()

    def log_message(self, format: str, *words: object) -> None:
        pass


@pytest.mark.parametrize(("path", "says"), [("", "302 and leads to"), ("/some/path", "404")])
def test_a_url_that_lists_no_models_is_one_line(
    path: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(workload([Ask(prompt=[1], max_tokens=1, at_s=0.0)], 0.1), tmp_path / "w")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere) as elsewhere:
        threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{elsewhere.server_port}{path}"
        told = ["lab", "load", str(tmp_path / "w"), "--url", url, "--out", str(tmp_path / "o")]
        assert main(told) == 2
        elsewhere.shutdown()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--url {url}: {url}/v1/models answers {says}" in line


@pytest.mark.parametrize(
    "data",
    [b"no http at all\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\ndata: {no json}\n\n"],
)
def test_an_answer_that_cannot_be_read_is_told(data: bytes) -> None:
    assert "not readable" in answer_of([(1, data)]).trouble


def test_the_ceiling_is_climbed_until_the_generator_gives_out(tmp_path: Path) -> None:
    recipe = Recipe(context_tokens=64)
    found = ceiling.ceiling(recipe, 4.0, tmp_path, multiples=(5,))
    (step,) = found["steps"]
    assert step["requests_s"] == pytest.approx(20.0, abs=0.5)
    # Whether a loaded machine lets it keep time is the machine's; that both agree is ours.
    assert (found["requests_s"] is not None) == (not step["bottleneck"])


def judged(tokens_ms: list[float], outcome: str, ended_ms: float) -> bool | None:
    ask = {
        "slo": None,
        "scheduled_ns": 0,
        "tokens_ns": [int(ms * 1e6) for ms in tokens_ms],
        "outcome": outcome,
        "ended_ns": int(ended_ms * 1e6),
    }
    return met(ask, ttft_ms=100.0, tpot_ms=10.0)


def test_an_objective_is_met_token_by_token() -> None:
    assert judged([99, 109, 119], "finished", 120) is True
    assert judged([99, 121, 122], "finished", 123) is False
    assert judged([99, 105], "unfinished", 500) is False
    assert judged([], "refused", 1) is False
    # Who leaves in time is not judged; who leaves when a token is overdue has been missed.
    assert judged([99], "left", 105) is None
    assert judged([], "left", 50) is None
    assert judged([99], "left", 200) is False
