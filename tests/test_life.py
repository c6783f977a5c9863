"""How a server starts, refuses to start, drains and ends: real processes, exit codes, one line.

Starts that must fail do so before any engine is spawned, so most of these cost a second.
"""

import json
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import ConfigError
from server.cli import build_parser
from server.config import from_flags, shown
from tests import tiny
from tests.servers import Server, command, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("life") / "tiny")


def refused(arguments: list[str]) -> str:
    """Return the one line of a start that fails with exit code 2."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


# ---- what cannot start


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    assert "nowhere.gguf" in refused(command(tmp_path / "nowhere.gguf"))


def test_a_taken_port_is_known_before_the_model_is_read(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused([*command(tmp_path / "nowhere.gguf"), "--port", port])
    assert f"cannot listen on 127.0.0.1:{port}" in line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        (["--dtype", "f8"], "--dtype"),
        (["--client-stall-s", "nan"], "--client-stall-s"),
        (["--ring-records", "0"], "--ring-records"),
        (["--port", "70000"], "--port"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--api-key", "schl\u00fcssel"], "--api-key"),
    ],
)
def test_a_flag_out_of_range_is_named(model: Path, flags: list[str], named: str) -> None:
    assert named in refused([*command(model), *flags])


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "no-tokenizer")
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(command(folder))


def test_weights_that_cannot_be_read_end_the_server(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refused(command(folder))


# ---- settings


def test_flags_carry_the_names_of_the_settings() -> None:
    flags = ["serve", "--max-model-len", "100", "--no-enable-chunked-prefill", "--no-history"]
    config = from_flags(build_parser().parse_args(flags))
    assert config.engine.max_model_len == 100
    assert not config.engine.enable_chunked_prefill
    assert config.telemetry.history is None


def test_the_key_comes_from_the_environment_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ITERSCOPE_API_KEY", "secret")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    config = from_flags(build_parser().parse_args(["serve"]))
    assert config.api_key == ("secret",)
    assert "secret" not in json.dumps(shown(config))
    assert config.telemetry.history == "/state/iterscope/history"
    with pytest.raises(ConfigError, match="--port"):
        from_flags(build_parser().parse_args(["serve", "--port", "-1"]))


def test_a_sound_start_says_its_stages_and_no_warning(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model) as server:
        assert " WARNING " not in server.log
        assert "loading: reading the model's header" in server.log
        assert "loading: warming up" in server.log


def test_the_version_is_told() -> None:
    done = subprocess.run([command(Path())[0], "--version"], capture_output=True, check=True)
    assert done.stdout.startswith(b"iterscope ")


# ---- the end

LONG = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "stream": True}


def stream(server: Server, body: dict[str, Any]) -> str:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text


def watch(server: Server) -> bytes:
    """Return all of a telemetry stream, until the server ends it."""
    seen = b""
    with httpx.stream("GET", f"{server.url}/telemetry/stream", timeout=60) as response:
        try:
            for part in response.iter_raw():
                seen += part
        except httpx.RemoteProtocolError:
            return seen  # such a stream has no end of its own: it is cut
    return seen


def running(server: Server) -> bool:
    return server.metric("vllm:num_requests_running") > 0


def readers(server: Server) -> float:
    return server.metric("iterscope_telemetry_readers", reader="stream")


def test_what_outlasts_the_drain_gets_a_last_event(tmp_path: Path, model: Path) -> None:
    """A second signal makes it shorter still; an open telemetry stream does not hold it up."""
    for flags, signals, cause in (
        (["--drain-s", "0.1"], 1, "drain"),
        (["--drain-s", "60"], 2, "shutdown"),
    ):
        # The pool is left last: a server that is gone lets its readers go.
        with ThreadPoolExecutor(2) as pool, serving(tmp_path, model, *flags) as server:
            watching = pool.submit(watch, server)
            server.wait(lambda server=server: readers(server) == 1)
            text = pool.submit(stream, server, LONG | {"n": 4})
            server.wait(lambda server=server: running(server))
            server.process.send_signal(signal.SIGINT)
            if signals == 2:
                server.wait(lambda server=server: server.get("/ready").status_code == 503)
                server.process.send_signal(signal.SIGINT)
            last = text.result().rpartition("data: ")[2]
            assert json.loads(last)["error"]["code"] == "engine_unavailable"
            assert b"event: hello" in watching.result()
            assert server.process.wait(20) == 0
            assert f"cause={cause}" in server.log
            assert "Traceback" not in server.log
