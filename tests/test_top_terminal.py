"""`iterscope top` at a real terminal, watching a real server that is under load, killed, and back.

Owns the proofs of server/top_command.py, server/screen.py and server/event_stream.py: keys, sizes,
signals, scripts, reconnects, and that the terminal is left as it was found.
"""

import argparse
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from server.top_command import add_top_flags, run_top_command
from tests import tiny
from tests.api import LONG, raw_request
from tests.pseudo_terminal import Terminal, terminal
from tests.servers import Server, serving, wait

ITERSCOPE = str(Path(sys.executable).parent / "iterscope")
NAMES = ("first-one", "second-one", "third-one")
KEY = "let-me-in"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("top") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    flags = ("--max-num-seqs=2", f"--api-key={KEY}", f"--history={folder / 'history'}")
    with serving(folder, model, *flags, parrot=True, beat_ms=50) as running:
        yield running


@pytest.fixture(scope="module")
def load(server: Server) -> Iterator[None]:
    """Keep two running and one waiting, each with a name of its client's."""
    headers = {"Authorization": f"Bearer {KEY}", "X-Tenant": "acme"}
    body = LONG | {"max_tokens": 1900, "stream": True}
    opened = [raw_request(server, body, **headers, **{"X-Request-Id": name}) for name in NAMES]
    yield
    for one in opened:
        one.close()


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [ITERSCOPE, "top", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def at(server: Server) -> tuple[str, ...]:
    return ("--url", server.url, "--api-key", KEY)


@contextmanager
def top(*arguments: str, columns: int = 100, lines: int = 30) -> Iterator[Terminal]:
    command = (ITERSCOPE, "top", "--interval", "0.1", *arguments)
    with terminal(*command, columns=columns, lines=lines) as found:
        yield found


def shows(*words: str) -> Callable[[list[str]], bool]:
    return lambda lines: all(any(word in line for line in lines) for word in words)


def assert_left_as_found(shown: Terminal) -> None:
    assert shown.mode() == shown.found_mode
    written = shown.written.decode()
    assert written.index("\x1b[?1049h") < written.index("\x1b[?1049l")
    assert written.endswith("\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l")


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_frame_of_a_busy_server_and_the_way_out(server: Server, load: None) -> None:
    with top(*at(server)) as shown:
        full = shows("2 running, 1 waiting", "itl      p50")
        lines = shown.wait(lambda lines: len(lines) == 30 and full(lines))
        text = "\n".join(lines)
        assert lines[0].startswith(f"iterscope top tiny at {server.url}")
        assert "█" in text
        for name in NAMES:
            assert name in text
        waiting = next(line for line in lines if line.startswith("third-one"))
        assert waiting.split()[-1] == "seqs"
        shown.resize(62, 18)
        lines = shown.wait(lambda lines: len(lines) == 18)
        assert max(map(len, lines)) <= 62
        assert shown.mode() != shown.found_mode, "keys come one by one"
        shown.press("xq")
        assert shown.end() == 0
        assert_left_as_found(shown)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_a_sane_terminal(server: Server, load: None, number: int) -> None:
    with top(*at(server)) as shown:
        shown.wait(shows("running 2"))
        if number == signal.SIGINT:
            shown.press("\x03")
        else:
            shown.process.send_signal(number)
        assert shown.end() == 128 + number
        assert_left_as_found(shown)


def test_a_stop_gives_the_terminal_back_and_goes_on(server: Server, load: None) -> None:
    """GIVEN Ctrl-Z, THEN the shell has its terminal; after fg the frames go on."""
    with top(*at(server)) as shown:
        shown.wait(shows("running 2"))
        shown.press("\x1a")
        wait(lambda: not shown.read() and stopped(shown.process.pid), 20)
        assert_left_as_found(shown)
        seen = len(shown.written)
        shown.process.send_signal(signal.SIGCONT)
        shown.wait(lambda _: shown.written.count(b"\x1b[H", seen) > 3)
        shown.press("q")
        assert shown.end() == 0
        assert_left_as_found(shown)


def test_a_script_gets_one_plain_frame(server: Server, load: None) -> None:
    found = run(*at(server))
    assert found.returncode == 0, found.stderr
    assert "\x1b" not in found.stdout
    assert "2 running, 1 waiting; held by seqs at third-one" in found.stdout
    assert len([line for line in found.stdout.splitlines() if " acme " in line]) == 3
    body = json.loads(run(*at(server), "--json").stdout)
    assert [row["external_id"] for row in body["running"]] == ["first-one", "second-one"]
    assert body["rates"]["iterations_per_s"] == pytest.approx(20, rel=0.9)
    assert body["kv"]["used"] > 0


def test_the_history_says_where_its_server_is(server: Server, load: None, tmp_path: Path) -> None:
    folder = next(server.log_file.parent.glob("history"))
    assert run("--history", str(folder), "--api-key", KEY, "--once").returncode == 0
    found = run("--history", str(tmp_path))
    assert found.returncode == 1
    assert "no server says that it holds" in found.stderr


def test_what_cannot_be_watched_is_said(server: Server) -> None:
    """GIVEN no server, a wrong key, a server without a stream, THEN one line, and exit code 1."""
    for arguments, word in (
        (("--url", "http://127.0.0.1:9"), "does not answer"),
        (("--url", "nonsense"), "does not answer"),
        (("--url", server.url, "--api-key", "wrong"), "key"),
        (("--url", server.url + "/v1", "--api-key", KEY), "there is no"),
    ):
        found = run(*arguments)
        assert found.returncode == 1, found
        assert word in found.stderr.lower(), found.stderr
        assert found.stderr.count("\n") == 1
    assert run("--url", server.url, "--interval", "0").returncode == 2


def test_a_server_that_was_killed_is_waited_for(model: Path, tmp_path: Path) -> None:
    """GIVEN a kill -9 and a restart at the same port, THEN both are said and the watch goes on."""
    with serving(tmp_path, model, parrot=True) as first:
        port = str(httpx.URL(first.url).port)
        with top("--url", first.url) as shown:
            before = shown.wait(shows("live; 0 records lost"))
            first.stop(signal.SIGKILL)
            shown.wait(shows("no stream: ", "trying again"))
            with serving(tmp_path, model, "--port", port, parrot=True) as second:
                after = shown.wait(shows("live; 0 records lost", "the server was started anew"), 30)
                assert after[0].split("run ")[1] != before[0].split("run ")[1]
                second.post("/v1/completions", {"prompt": [5], "max_tokens": 4})
                shown.wait(shows("ended 1 length"))
                shown.press("q")
                assert shown.end() == 0
                assert_left_as_found(shown)


def test_streams_of_nonsense_are_survived(capsys: pytest.CaptureFixture[str]) -> None:
    """GIVEN a server of another kind, or records of another version, THEN no trace."""
    good = b'data: {"schema_version":9,"run_id":"r","generation":0,"run":null,"live":[],"lost":0}'
    frames = b"id: r.1\nevent: hello\n" + good + b"\n\nid: r.2\nevent: iteration\ndata: {}\n\n"
    frames += b"id: r.3\nevent: invented\ndata: 1\n\n"

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream" if "past" in self.path else "x")
            self.send_header("Content-Length", str(len(frames) + 1))  # never whole: it stays open
            self.end_headers()
            self.wfile.write(frames)
            self.wfile.flush()
            stop.wait(10)

        def log_message(self, *_: object) -> None:
            pass

    stop = threading.Event()
    other = HTTPServer(("127.0.0.1", 0), Other)
    serving_other = threading.Thread(target=other.serve_forever)
    serving_other.start()
    try:
        parser = argparse.ArgumentParser()
        add_top_flags(parser)
        url = f"http://127.0.0.1:{other.server_port}"
        assert run_top_command(parser.parse_args(["--url", url, "--once"])) == 0
    finally:
        stop.set()
        other.shutdown()
        serving_other.join(10)
        other.server_close()
    shown = capsys.readouterr().out
    assert "records are of version 9" in shown
    assert "the event iteration could not be read" in shown
