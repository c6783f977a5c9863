"""Every rule of the house can fail: a bad sample is found at its line, a good one is not."""

import re
from collections.abc import Iterable

import pytest

from tests import house_rules as rules
from tests import house_state as state

ORDER = {"engine": ["plan", "kv", "scheduler"], "kernels": ["base", "cpu.build", "select"]}
LONG = "\n".join(["def plan() -> None:", *["    pass"] * rules.FUNCTION_LINES_MAX])


def lines(findings: Iterable[str]) -> list[int]:
    """Return the line numbers that findings name, ascending."""
    return sorted(int(one.split(":")[1]) for one in findings)


# ---- sizes and texts


def test_a_function_of_61_lines_is_found_and_one_of_60_is_not() -> None:
    assert lines(rules.long_functions("engine/x.py", "\n\n" + LONG)) == [3]
    assert not lines(rules.long_functions("engine/x.py", LONG.rsplit("\n", 1)[0]))


def test_a_file_of_401_lines_and_a_line_of_101_characters_are_found() -> None:
    assert lines(rules.too_long("engine/x.py", "pass\n" * 401)) == [401]
    assert lines(rules.too_long("engine/x.py", "pass\n#" + "-" * 100)) == [2]
    assert not lines(rules.too_long("engine/x.py", "pass\n" * 399 + "#" + "-" * 99))


@pytest.mark.parametrize(
    "opening",
    [
        "export function draw(a, { b } = {}) {",
        "const draw = (a) => {",
        "class Page {\n  async draw(a) {",
        "on('x', async function* (event) {",
    ],
)
def test_a_long_javascript_function_is_found(opening: str) -> None:
    body = "\n".join(["  a();"] * rules.FUNCTION_LINES_MAX)
    before = "const text = '{'; // {\nconst found = /[{]/.test(`${text} {`);\n"
    start = before.count("\n") + opening.count("\n") + 1
    source = f"{before}{opening}\n{body}\n}}\n}}"
    assert start in lines(rules.long_functions_javascript("dashboard/x.js", source))


def test_long_javascript_blocks_that_are_no_functions_pass() -> None:
    body = "\n".join(["  a();"] * 70)
    for opening in ("if (a(b)) {", "for (const a of b) {", "const table = {", "class Page {"):
        assert not lines(rules.long_functions_javascript("x.js", f"{opening}\n{body}\n}}"))


def test_a_module_that_opens_with_too_little_is_found() -> None:
    good = '"""Owns a.\n\nCalled by b.\nNever c.\n"""\n'
    assert not lines(rules.missing_opening("engine/x.py", good))
    assert lines(rules.missing_opening("engine/x.py", '"""Owns a."""\n')) == [1]
    assert lines(rules.missing_opening("engine/x.py", "import os\n")) == [1]
    assert not lines(rules.missing_opening_javascript("x.js", "// Owns a.\n// By b.\n// No c.\n"))
    assert not lines(
        rules.missing_opening_javascript("x.js", "/* Owns a.\n * By b.\n * No c. */\n")
    )
    assert lines(rules.missing_opening_javascript("x.js", "// Owns a.\nlet b;\n// c\n// d\n")) == [
        1
    ]


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "X" * 3])
def test_a_leftover_is_found(word: str) -> None:
    assert lines(rules.matches("x.md", f"fine\n# {word}: later", rules.LEFTOVER, "left")) == [2]


@pytest.mark.parametrize(
    "place", ["https://py" + "pi.org/simple", "registry.np" + "mjs.org", "../sha" + "red/x"]
)
def test_a_place_outside_is_found(place: str) -> None:
    assert lines(rules.matches("x.txt", place, rules.ELSEWHERE, "outside")) == [1]
    assert not lines(rules.matches("x.txt", "127.0.0.1 localhost", rules.ELSEWHERE, "outside"))


def test_html_made_from_text_and_code_from_afar_are_found() -> None:
    unsafe = "a.textContent = b;\na.innerHTML = b;\neval(c);"
    assert lines(rules.matches("x.js", unsafe, rules.HTML_FROM_TEXT, "unsafe")) == [2, 3]
    afar = '<script src="https://a/b.js">\nimport a from "//b/c.js"\n<script src="./d.js">'
    assert lines(rules.matches("x.html", afar, rules.REMOTE_CODE, "afar")) == [1, 2]


# ---- who may import whom


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("telemetry/records.py", "import msgspec"),
        ("telemetry/records.py", "from telemetry import bus"),
        ("telemetry/bus.py", "from engine.messages import Submit"),
        ("telemetry/bus.py", "import torch"),
        ("kernels/sdpa.py", "from telemetry.records import Run"),
        ("engine/core.py", "from telemetry import bus"),
        ("engine/core.py", "import telemetry"),
        ("engine/core.py", "def run():\n    from server import app"),
        ("engine/core.py", "import starlette.requests"),
        ("engine/core.py", "from importlib import import_module\nimport_module('duckdb')"),
        ("engine/core.py", "from ..server import app"),
        ("server/app.py", "import torch"),
        ("server/app.py", "from kernels import base"),
        ("server/app.py", "def lab():\n    from bench import lab"),
        ("server/cli.py", "from bench import lab"),
        ("bench/lab.py", "from server.config import ServerConfig"),
        ("bench/lab.py", "from tests import tiny"),
    ],
)
def test_an_import_against_the_law_is_found(path: str, source: str) -> None:
    assert lines(rules.against_the_law(path, source)) == [source.count("\n") + 1]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("telemetry/records.py", "from dataclasses import dataclass"),
        ("engine/core.py", "from telemetry.records import Run\nfrom kernels.base import Cache"),
        ("engine/core.py", "from telemetry import records\nimport torch"),
        ("server/app.py", "from telemetry.bus import Bus\nfrom engine.spec import ModelSpec"),
        ("server/cli.py", "def lab():\n    from bench import lab"),
        ("bench/lab.py", "from engine.core import Core"),
    ],
)
def test_an_import_within_the_law_passes(path: str, source: str) -> None:
    assert not lines(rules.against_the_law(path, source))


def test_importing_what_is_read_later_is_found() -> None:
    def found(path: str, source: str) -> list[int]:
        return lines(rules.against_reading_order(path, source, ORDER))

    assert found(
        "engine/kv.py", "from engine.plan import Plan\nfrom engine.scheduler import S"
    ) == [2]
    assert found("engine/kv.py", "def f():\n    from engine import scheduler") == [2]
    assert found("kernels/cpu/build.py", "from kernels import select") == [1]
    assert found("kernels/select.py", "from kernels.cpu import build") == []
    assert found("engine/new.py", "") == [1]


def test_a_mock_library_and_an_environment_read_are_found() -> None:
    banned = {"unittest.mock"}
    mocks = "import unittest\nfrom unittest import mock\nfrom unittest.mock import Mock"
    assert lines(rules.against_names("x.py", mocks, banned, "mocks")) == [2, 3]
    reads = "import os\nos.environ['A']\nos.getenv('A')\nfrom os import environ\nos.getpid()"
    assert lines(rules.environment_reads("x.py", reads)) == [2, 3, 4]


# ---- state


@pytest.mark.parametrize(
    "source",
    [
        "seen = []",
        "seen: dict[str, int] = {}",
        "names = set()",
        "LOCK = threading.Lock()",
        "RECENT = deque(maxlen=3)",
        "server = Server()",
        "start()",
        "for a in b:\n    c(a)",
        "TEXT = Path('x').read_text()",
    ],
)
def test_state_or_work_at_import_is_found(source: str) -> None:
    assert lines(state.module_state("engine/x.py", source)) == [1]


def test_constants_tables_and_types_pass() -> None:
    source = """
'''Opening.'''
from typing import TypeVar
LIMITS = {"a": 1}
_FIRST, _LAST = [1, 2]
WORD = re.compile("a")
Number = int | float
'''What Number is.'''
T = TypeVar("T")
if __name__ == "__main__":
    main()
"""
    assert not lines(state.module_state("engine/x.py", source))


@pytest.mark.parametrize(
    "source",
    [
        "LIMITS['a'] = 1",
        "records.KINDS.update(more)",
        "del LIMITS['a']",
        "LIMITS['a'] += 1",
        "def f():\n    global count",
        "@functools.cache\ndef f(): pass",
        "@lru_cache(maxsize=None)\ndef f(): pass",
    ],
)
def test_a_table_that_changes_is_found(source: str) -> None:
    assert len(lines(state.changed_tables("engine/x.py", source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "@dataclass(slots=True)\nclass Request:\n    computed: int = 0",
        "class Delta(msgspec.Struct):\n    tokens: list[int]",
        "class Pool:\n    def take(self):\n        self.free -= 1",
        "class Pool:\n    def take(self):\n        self.ring[3] = 1",
    ],
)
def test_a_mutable_class_must_be_listed(source: str) -> None:
    name = re.findall(r"class (\w+)", source)[0]
    row = state.Listed(name, "engine/x.py", ("engine/y.py",))
    assert len(lines(state.unlisted_classes("engine/x.py", source, []))) == 1
    assert not lines(state.unlisted_classes("engine/x.py", source, [row]))
    elsewhere = state.Listed(name, "engine/z.py", ("engine/y.py",))
    assert len(lines(state.unlisted_classes("engine/x.py", source, [elsewhere]))) == 1


def test_frozen_classes_need_no_listing() -> None:
    source = (
        "@dataclass(frozen=True)\nclass Plan:\n    step: int\n"
        "class Delta(msgspec.Struct, frozen=True):\n    request: int\n"
        "class Timer:\n    def __init__(self):\n        self.begin = 0\n"
    )
    assert not lines(state.unlisted_classes("engine/x.py", source, []))


def test_a_second_writer_is_found() -> None:
    source = (
        "@dataclass\nclass Request:\n    computed: int\n    def __init__(self): self.blocks = []"
    )
    assert state.attributes(source, "Request") == {"computed", "blocks"}
    writers = {"computed": {"engine/request.py", "engine/scheduler.py"}}
    store = "request.computed += 1"
    assert lines(state.foreign_stores("engine/core.py", store, writers)) == [1]
    assert not lines(state.foreign_stores("engine/scheduler.py", store, writers))
    assert not lines(state.foreign_stores("engine/core.py", "a = request.computed", writers))
