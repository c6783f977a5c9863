"""Hostile model files cost a line: never a crash, a hang, a trace or the machine's memory.

Random ones are read in a process of their own, seeded; `make soak` reads many times as many. Those
that were met in the field go through a real `iterscope serve`, whose exit code and line count.
"""

import asyncio
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import ATTENTION_BACKENDS, EngineConfig
from engine.spec import SpecError
from kernels.select import BACKENDS
from server.config import ServerConfig
from server.served_model import load_model
from server.template_process import TOO_MUCH, TOO_MUCH_NOW, TemplateProcess
from tests import tiny
from tests.api import HELLO, post, still_answers
from tests.servers import command, serving

QUICK, MANY = 60, 8000
GROWTH_MB_MAX = 500
"""Far above what the sound models take, far below what their headers can claim.

A header may well claim positions for a rope table of 100 MB, and Gemma has two.
"""


def read_broken(folder: Path, *, seed: int, count: int) -> dict[str, Any]:
    """Read so many broken models of each kind in another process; return what it says."""
    program = [sys.executable, "-m", "tests.hostile_models", str(seed), str(count), str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, f"the reader died of a model: {done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_harmless(found: dict[str, Any]) -> None:
    assert found["wrong"] == []
    assert found["slowest_s"] < 5
    assert found["grown_mb"] < GROWTH_MB_MAX
    tallies = found["tallies"]
    assert {name.split(":")[0] for name in tallies if name.endswith("refused")} == {
        "gguf header",
        "safetensors bytes",
        "safetensors header",
        "json",
        "index",
        "family gguf",
        "family json",
        "shards",
    }, "something was never refused"
    taken = sum(count for name, count in tallies.items() if name.endswith("taken"))
    assert taken > 0.03 * sum(tallies.values()), "the mutations are too coarse to reach far"


def test_random_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    assert_harmless(read_broken(tmp_path, seed=1, count=QUICK))


@pytest.mark.soak
def test_much_random_damage_is_refused_or_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_broken(tmp_path, seed=2, count=MANY)
    with capsys.disabled():
        sys.stdout.write(f"\n{found}\n")
    assert_harmless(found)


# ---- whole starts


def refused(arguments: list[str], seconds: float = 30) -> str:
    """Return the one line of a start that fails with exit code 2, within so many seconds of CPU."""
    before = os.times()
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=90, check=False)
    after = os.times()
    spent = after.children_user + after.children_system
    spent -= before.children_user + before.children_system
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert spent < seconds, f"{spent:.1f} s of CPU to say {lines[0]}"
    return lines[0]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def absent(file: Path) -> None:
    file.unlink()


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


def pipe_instead(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def index_of_absent(file: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    tiny.write_json(file.with_name("model.safetensors.index.json"), index)


def endless_header(file: Path) -> None:
    file.write_bytes(struct.pack("<Q", 2**62) + file.read_bytes()[8:])


def retyped(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b'"dtype":"F32"', b'"dtype":"F8E"', 1))


def not_utf8(file: Path) -> None:
    raw = file.read_bytes()
    place = raw.index(b'"version"') + 3
    file.write_bytes(raw[:place] + b"\x81" + raw[place + 1 :])


def subword_prefix(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["continuing_subword_prefix"] = "x"
    file.write_text(json.dumps(tokenizer))


def without_a_layer(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"model.layers.1.mlp.up_proj", b"model.layers.9.mlp.up_proj", 1))


@pytest.mark.parametrize(
    ("break_it", "file", "named"),
    [
        (cut, "model.safetensors", "model.safetensors: cut short"),
        (empty, "model.safetensors", "model.safetensors: the file is empty"),
        (pointer, "model.safetensors", "model.safetensors: a Git LFS pointer"),
        (pointer, "config.json", "config.json: a Git LFS pointer"),
        (absent, "model.safetensors", "0 safetensors files"),
        (absent, "config.json", "config.json: cannot be read: No such file"),
        (absent, "tokenizer.json", "tokenizer.json"),
        (empty, "tokenizer.json", "tokenizer.json: cannot be used"),
        (pointer, "tokenizer.json", "tokenizer.json"),
        (not_utf8, "tokenizer.json", "tokenizer.json: cannot be used"),
        (
            subword_prefix,
            "tokenizer.json",
            "tokenizer.json ends the program that reads it (SIGABRT)",
        ),
        (pipe_instead, "config.json", "config.json: not a plain file"),
        (pipe_instead, "tokenizer.json", "tokenizer.json"),
        (folder_instead, "config.json", "config.json: not a plain file"),
        (index_of_absent, "model.safetensors", "model-00002-of-00002.safetensors: no such file"),
        (endless_header, "model.safetensors", "model.safetensors: cut short or damaged"),
        (retyped, "model.safetensors", "has type F8E; supported are F32"),
        (without_a_layer, "model.safetensors", "'model.layers.1.mlp.up_proj.weight' is missing"),
    ],
)
def test_a_folder_broken_in_the_field(
    tmp_path: Path, break_it: Callable[[Path], None], file: str, named: str
) -> None:
    folder = tiny.write(tmp_path / "model")
    break_it(folder / file)
    with pytest.raises(SpecError) as caught:
        load_model(ServerConfig(engine=EngineConfig(model=str(folder))))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("break_it", [cut, pipe_instead])
def test_it_takes_no_engine_to_refuse_a_model(
    tmp_path: Path, break_it: Callable[[Path], None]
) -> None:
    folder = tiny.write(tmp_path / "model")
    break_it(folder / "model.safetensors")
    # Torch alone takes longer to import.
    assert "model.safetensors" in refused(command(folder), seconds=4)


def test_a_device_is_no_model() -> None:
    assert "/dev/zero: not a plain file" in refused(command(Path("/dev/zero")), seconds=4)


def test_an_engine_flag_is_named_before_the_model_is_read(tmp_path: Path) -> None:
    nowhere = command(tmp_path / "nowhere.gguf")
    for flags, named in (
        (["--max-num-batched-tokens", "3"], "--max-num-batched-tokens 3 is below"),
        (["--attention-backend", "flash"], "--attention-backend"),
    ):
        assert named in refused([*nowhere, *flags], seconds=4)


def test_the_backends_that_flags_name_are_those_there_are() -> None:
    named = [name for name in ATTENTION_BACKENDS if name != "auto"]
    assert named == [name for name, _ in BACKENDS]


def test_weights_that_are_no_numbers_end_the_start(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = tiny.write(tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][2, 3] = float("nan")
    save_file(weights, folder / "model.safetensors")
    line = refused(command(folder))
    assert "'model.layers.1.mlp.down_proj.weight' holds values that are not finite" in line


def test_a_cache_that_fits_no_memory_is_one_line(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    assert "--kv-blocks" in refused([*command(folder), "--kv-blocks", str(2**36)])


def test_a_history_that_can_never_be_kept_ends_the_start(tmp_path: Path) -> None:
    """It names the flag; a full disk or another server's lock would be no reason not to serve."""
    folder = tiny.write(tmp_path / "model")
    (tmp_path / "file").write_text("no folder")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        arguments = [*command(folder), "--history", str(place)]
        assert f"--history: {place}" in refused(arguments, seconds=4), place


# ---- templates


def verdict(source: str, tokens: dict[str, str]) -> str:
    template = TemplateProcess(source, tokens)
    try:
        return template.verdict()
    finally:
        template.close()


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ '%4000000000d' % 1 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_bomb_goes_off_elsewhere(source: str) -> None:
    began = time.monotonic()
    assert verdict(source, {}) == TOO_MUCH
    assert time.monotonic() - began < 30


def test_templates_that_work_or_refuse_are_let_in() -> None:
    assert verdict(tiny.CHAT_TEMPLATE, {"bos_token": "<s>"}) == ""
    assert verdict("{{ raise_exception('no') }}", {}) == ""
    assert "line 1" in verdict("{% if %}", {})
    assert "longer than" in verdict("x" * 2**21, {})


def test_a_model_whose_template_is_a_bomb_serves_completions(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "bomb")
    (folder / "chat_template.jinja").write_text("{{ 'a' * 10**10 }}")
    (taken := tmp_path / "taken").write_text("a file")
    flags = ("--max-model-len", "5000", "--packed-cache", str(taken))
    with serving(tmp_path, folder, *flags) as server:
        assert "completions only" in server.log
        answer = post(server, "/v1/chat/completions", HELLO)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "no_chat_template"
        assert TOO_MUCH in answer.json()["error"]["message"]
        still_answers(server)
        assert "--max-model-len 5000 is more than the model" in server.log
        assert f"--packed-cache {taken} cannot be made (File exists)" in server.log


BOMBS = {
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{% set n = 10 ** 10 %}{{ messages[0].content * n }}",
    "power": "{{ (messages | length + 8) ** (10 ** 9) }}",
    "lone": "{{ '\\ud800' }}",
    "silence": "{{ 1 / 0 }}",
}


def test_a_template_slow_for_certain_messages_holds_up_no_other(tmp_path: Path) -> None:
    """Each bomb costs its own sender a 400; streams and health beside it go on meanwhile."""
    folder = tiny.write(tmp_path / "model")
    branches = "".join(
        f"{{% elif messages[0].content == '{name}' %}}{bomb}" for name, bomb in BOMBS.items()
    )
    source = "{% if false %}" + branches + "{% else %}" + tiny.CHAT_TEMPLATE + "{% endif %}"
    (folder / "chat_template.jinja").write_text(source)
    with serving(tmp_path, folder) as server:
        for name in BOMBS:
            answer, worst_s = asyncio.run(_beside(server.url, name))
            assert answer.status_code == 400, name
            error = answer.json()["error"]
            assert error["param"] == "messages"
            assert (TOO_MUCH_NOW in error["message"]) == (name in ("time", "memory", "power"))
            assert worst_s < 2.0, f"{name} held /health for {worst_s:.2f} s"
            assert post(server, "/v1/chat/completions", HELLO).status_code == 200, name
        still_answers(server)


def said(text: str) -> dict[str, Any]:
    return HELLO | {"messages": [{"role": "user", "content": text}]}


async def _beside(url: str, bomb: str) -> tuple[httpx.Response, float]:
    """Return how a bomb was answered, and how long /health took at worst meanwhile."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=said(bomb)))
        worst_s = 0.0
        while not asked.done():
            began = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            worst_s = max(worst_s, time.monotonic() - began)
        return await asked, worst_s
