"""What an operator gets: settings from a file, JSON logs, doctor, a service unit, an image.

The image is not built here; its file is held to the tree it copies from, and the unit and the
settings beside it to the command line they call. Servers are real.
"""

import configparser
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig
from server.cli import build_parser
from server.config import ServerConfig, from_flags, setting_hints, setting_values
from server.config_file import as_toml, read_settings
from server.doctor_command import gpu_troubles
from tests import tiny
from tests.api import complete
from tests.servers import command, serving
from tests.test_hostile_models import refused

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"


def settings(tmp_path: Path, text: str, *flags: str) -> ServerConfig:
    """Return the configuration of a file and flags."""
    file = tmp_path / "iterscope.toml"
    file.write_text(text)
    parsed = build_parser().parse_args(["serve", *flags])
    return from_flags(parsed, read_settings(str(file), setting_hints()))


# ---- --config


def test_a_file_holds_where_no_flag_was_given(tmp_path: Path) -> None:
    text = """
    port = 9001
    api-key = ["one", "two"]
    [engine]
    max-num-seqs = 7
    dtype = "bf16"
    ttft_ms = 500
    enable_prefix_caching = false
    [telemetry]
    history = false
    """
    config = settings(tmp_path, text, "--max-num-seqs", "9", "--enable-prefix-caching")
    assert (config.port, config.api_key) == (9001, ("one", "two"))
    assert (config.engine.max_num_seqs, config.engine.dtype) == (9, "bf16")
    assert config.engine.ttft_ms == 500.0
    assert config.engine.enable_prefix_caching
    assert config.telemetry.history is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_num_sqs = 3", "max_num_sqs is no setting; did you mean max_num_seqs?"),
        ("[engine]\nport = 1", "engine.port is no setting"),
        ("[engin]\nport = 1", "[engin] is no table; there are server, engine, telemetry"),
        ('port = "8000"', "port is to be a whole number, not '8000'"),
        ("port = true", "port is to be a whole number, not True"),
        ("[engine]\nenable_prefix_caching = 1", "is to be true or false, not 1"),
        ("api_key = 'one'", "api_key is to be a list of texts"),
        ("[engine]\ndtype = 3", "engine.dtype is to be a text, not 3"),
        ("port = 1\n[server]\nport = 2", "server.port is set twice"),
        ("port =", "not valid TOML"),
        ("[engine]\nttft_ms = nan", "--ttft-ms must be at least 0, not nan"),
        ("log_format = 'xml'", "--log-format must be one of text, json"),
        ("[engine]\nbatching = 'best'", "--batching must be one of"),
        ("port = 70000", "--port must lie within 0 and 65535"),
    ],
)
def test_a_file_that_cannot_be_meant_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_setting_comes_back_from_its_own_print(tmp_path: Path) -> None:
    config = settings(tmp_path, "", "--no-history", "--model", 'a "b" \\ \u00e9', "--port", "1")
    again = settings(tmp_path, as_toml(setting_values(config)))
    assert again == config
    assert setting_values(again).keys() == setting_hints().keys()


def test_keys_are_never_printed(tmp_path: Path) -> None:
    config = settings(tmp_path, "", "--api-key", "secret")
    assert "secret" not in as_toml(setting_values(config))


def test_a_file_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    line = refused([*command(tmp_path / "nowhere"), "--config", str(tmp_path / "none.toml")])
    assert "none.toml: No such file or directory" in line


# ---- logs


def test_logs_are_json_by_switch(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny")
    file = tmp_path / "iterscope.toml"
    file.write_text('log_format = "json"\nreplica = "north"\n')
    body = {"prompt": "a secret thing", "max_tokens": 4, "ignore_eos": True}
    with serving(tmp_path, model, "--config", str(file)) as server:
        complete(server, body)
        server.stop()
        lines = [json.loads(line) for line in server.log.splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "message"} <= line.keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    (banner,) = (line["facts"] for line in lines if line["message"] == "settings")
    assert (banner["replica"], banner["log_format"]) == ("north", "json")
    (end,) = (line["facts"] for line in lines if line["logger"] == "iterscope.request")
    assert (end["finish"], end["prompt"] > 0, end["output"]) == ("length", True, 4)
    assert {"request", "tokenize_ms", "ttft_ms", "total_ms"} <= end.keys()
    assert "secret thing" not in server.log
    assert '"message":"stopped"' in server.log


# ---- doctor


def doctor(*flags: str) -> tuple[int, Any]:
    program = [command(Path())[0], "doctor", "--json", *flags]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def test_doctor_tells_what_auto_would_choose(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny")
    code, report = doctor("--model", str(model), "--history", str(tmp_path / "history"))
    assert (code, report["wrong"]) == (0, [])
    assert report["auto"]["max_model_len"] == tiny.Shape.model_len
    assert report["auto"]["attention_backend"] in report["attention_backends"]
    assert report["device"]["copy_bytes_per_s"] > 1e8
    assert report["history"]["disk_free_bytes"] > 0
    assert report["versions"]["torch"]


def test_doctor_finds_what_is_wrong(tmp_path: Path) -> None:
    code, report = doctor("--model", str(tmp_path / "none.gguf"), "--dtype", "bf16")
    assert code == 1
    assert any("none.gguf: no such file" in line for line in report["wrong"])
    assert report["auto"]["dtype"] == "bf16", "the rest is told all the same"


def test_doctor_names_what_a_gpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = {"device": "cpu", "cuda": None}
    assert gpu_troubles(cpu, driver=False) == []
    assert "without CUDA" in gpu_troubles(cpu, driver=True)[0]
    monkeypatch.setenv("PATH", "/nowhere")
    assert "gcc" in gpu_troubles({"device": "cuda", "cuda": "13.0"}, driver=True)[0]


# ---- deploy/


def test_the_image_copies_what_the_package_needs() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = {
        part
        for line in text.splitlines()
        if line.startswith("COPY") and "--from" not in line
        for part in line.split()[1:-1]
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], "pyproject.toml"}
    needed |= {*project["project"]["license-files"], project["project"]["readme"]}
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["path"]
    assert needed | {"constraints.txt", hook} == copied
    assert all((ROOT / part).exists() for part in copied)
    ((entry,), (arguments,)) = (
        re.findall(rf"^{word} (\[.*\])$", text, re.M) for word in ("ENTRYPOINT", "CMD")
    )
    config = from_flags(build_parser().parse_args([*json.loads(entry)[1:], *json.loads(arguments)]))
    assert (config.host, config.log_format, config.engine) == ("0.0.0.0", "json", EngineConfig())


def test_the_unit_calls_a_command_that_parses_and_waits_for_the_drain() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "iterscope.service", encoding="utf-8")
    arguments = shlex.split(unit["Service"]["ExecStart"])[1:]
    flags = build_parser().parse_args(arguments)
    assert flags.config == "/etc/iterscope/iterscope.toml"
    given = read_settings(str(DEPLOY / "iterscope.toml"), setting_hints())
    config = from_flags(build_parser().parse_args(["serve"]), given)
    assert config.drain_s + 10 < float(unit["Service"]["TimeoutStopSec"])
    assert unit["Service"]["RestartPreventExitStatus"] == "2"
