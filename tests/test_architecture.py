"""The house keeps its rules: every one that a program can check, on every file of the tree.

Owns the reading of the tree and of ARCHITECTURE.md; the rules themselves are functions in
house_rules.py and house_state.py, and test_house_rules.py proves that each can fail.
"""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import DeviceFacts, EngineConfig, resolve
from engine.rope import Rope
from engine.spec import ModelSpec
from tests import house_rules as rules
from tests import house_state as state

ROOT = Path(__file__).resolve().parent.parent
SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "node_modules", "vendor"}
TEXT = re.compile(r".*\.(py|js|css|html|md|toml|txt|cpp|h|sql|ya?ml|json|sh)|Makefile|run")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


@functools.lru_cache(maxsize=1)
def files() -> tuple[tuple[str, str], ...]:
    """Return every text file of ours: path from the root, content."""
    return tuple(_read_files())


def _read_files() -> Iterator[tuple[str, str]]:
    for folder, names, found in os.walk(ROOT):
        names[:] = sorted(n for n in names if n not in SKIPPED_FOLDERS and _ours(n))
        for name in sorted(found):
            path = Path(folder, name)
            if TEXT.fullmatch(name):
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def _ours(folder: str) -> bool:
    return folder == ".ci" or not (folder.startswith(".") or folder.endswith(".egg-info"))


def python(*, packages_only: bool = True) -> Iterator[tuple[str, str]]:
    for path, source in files():
        ours = not packages_only or path.split("/", maxsplit=1)[0] in rules.PACKAGES
        if path.endswith(".py") and ours:
            yield path, source


def modules() -> Iterator[tuple[str, str]]:
    for path, source in python():
        if not path.endswith("__init__.py"):
            yield path, source


def javascript() -> Iterator[tuple[str, str]]:
    for path, source in files():
        if path.startswith("dashboard/") and path.endswith(".js"):
            yield path, source


def assert_none(findings: list[str]) -> None:
    assert not findings, "\n" + "\n".join(dict.fromkeys(findings))


# ---- ARCHITECTURE.md as data


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", ARCHITECTURE, re.DOTALL | re.MULTILINE)
    assert found, f"ARCHITECTURE.md has no section '## {title}'"
    return found.group(1)


def table(title: str) -> list[list[str]]:
    """Return the rows of a section's table as cells without their backticks, the head left out."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def reading_order() -> dict[str, list[str]]:
    """Return the modules of each package in their order: lines `package: module, module`."""
    text = re.sub(r",\n\s+", ", ", section("Reading order"))
    found = re.findall(r"^(\w+): +(\w[\w, .]*)$", text, re.MULTILINE)
    return {package: [name.strip() for name in names.split(",")] for package, names in found}


def mutable_state() -> list[state.Listed]:
    rows = []
    for what, writer, *_ in table("Mutable state"):
        module, _, name = what.partition(":")
        rows.append(state.Listed(name, module, tuple(re.findall(r"[\w/]+\.py", writer))))
    return rows


# ---- sizes and texts


def test_files_and_lines_stay_short() -> None:
    sources = [*python(packages_only=False), *javascript()]
    assert_none([one for source in sources for one in rules.too_long(*source)])


def test_functions_stay_short() -> None:
    found = [one for source in python(packages_only=False) for one in rules.long_functions(*source)]
    found += [one for source in javascript() for one in rules.long_functions_javascript(*source)]
    assert_none(found)


def test_modules_open_by_saying_what_they_own() -> None:
    found = [one for source in modules() for one in rules.missing_opening(*source)]
    found += [one for source in javascript() for one in rules.missing_opening_javascript(*source)]
    assert_none(found)


def test_init_files_are_empty() -> None:
    assert_none([f"{path}:1: not empty" for path, text in python() if "__init__" in path and text])


def test_no_leftovers() -> None:
    problem = "unfinished work belongs to an issue"
    checked = [source for source in files() if source[0] != "LICENSE"]
    assert_none([one for file in checked for one in rules.matches(*file, rules.LEFTOVER, problem)])


def test_nothing_names_a_registry_or_a_workplace() -> None:
    problem = "names a place outside"
    assert_none([one for file in files() for one in rules.matches(*file, rules.ELSEWHERE, problem)])


def test_the_page_takes_text_as_text_and_no_code_from_afar() -> None:
    page = [f for f in files() if f[0].startswith("dashboard/") and "/tests/" not in f[0]]
    found = [one for f in page for one in rules.matches(*f, rules.HTML_FROM_TEXT, "unsafe")]
    found += [one for f in page for one in rules.matches(*f, rules.REMOTE_CODE, "from afar")]
    assert_none(found)


# ---- who may import whom


def test_the_import_law_holds() -> None:
    assert_none([one for source in python() for one in rules.against_the_law(*source)])


def test_modules_import_only_what_was_read_before() -> None:
    order = reading_order()
    assert_none([one for s in modules() for one in rules.against_reading_order(*s, order)])


def test_the_reading_order_names_only_what_exists() -> None:
    order = reading_order()
    assert set(order) <= set(rules.PACKAGES)
    wanted = [f"{package}/{n.replace('.', '/')}.py" for package in order for n in order[package]]
    assert len(wanted) == len(set(wanted)), "a module stands twice in the reading order"
    assert_none([f"{path} is listed and missing" for path in wanted if not (ROOT / path).exists()])


def loaded_by(module: str) -> set[str]:
    """Return the top-level packages that importing `module` loads in a fresh interpreter."""
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-c", code]
    return set(subprocess.check_output(command, cwd=ROOT, text=True, timeout=120).split())


def test_the_core_runs_without_torch_or_a_web_server() -> None:
    banned = {"torch", "duckdb", "starlette", "prometheus_client"}
    assert not loaded_by("engine.core") & banned


def test_the_server_never_loads_torch() -> None:
    server = [f"server.{name}" for name in reading_order()["server"]]
    assert not loaded_by(", ".join(server)) & {"torch", "kernels"}


def test_nothing_is_mocked() -> None:
    banned = {"unittest.mock", "mock", "pytest_mock"}
    every = python(packages_only=False)
    assert_none([one for s in every for one in rules.against_names(*s, banned, "mocks")])


def test_only_the_configuration_reads_the_environment() -> None:
    sources = [source for source in python() if source[0] != "server/config.py"]
    assert_none([one for source in sources for one in rules.environment_reads(*source)])


# ---- state


def test_modules_keep_no_state_and_do_no_work_at_import() -> None:
    assert_none([one for source in python() for one in state.module_state(*source)])


def test_tables_never_change_and_caches_have_bounds() -> None:
    assert_none([one for source in python() for one in state.changed_tables(*source)])


def test_mutable_classes_are_listed() -> None:
    listed = mutable_state()
    assert_none([one for source in modules() for one in state.unlisted_classes(*source, listed)])


def test_the_list_of_mutable_state_is_current() -> None:
    sources = dict(modules())
    for row in mutable_state():
        assert row.module in sources, f"{row.module} is listed and missing"
        assert row.writers, f"{row.name} has no writer"
        assert set(row.writers) <= set(sources), f"{row.name}'s writer {row.writers} is missing"
        assert re.search(rf"^ *class {row.name}\b", sources[row.module], re.MULTILINE), row


def test_state_has_one_writer() -> None:
    sources = dict(modules())
    writers: dict[str, set[str]] = {}
    for row in mutable_state():
        for name in state.attributes(sources.get(row.module, ""), row.name):
            writers.setdefault(name, set()).update({row.module, *row.writers})
    assert_none([one for source in modules() for one in state.foreign_stores(*source, writers)])


# ---- configuration, dependencies, documents


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("engine.config", "EngineConfig"),
        ("telemetry.config", "TelemetryConfig"),
        ("server.config", "ServerConfig"),
    ],
)
def test_every_setting_is_frozen_and_has_its_help(module: str, name: str) -> None:
    kind = getattr(__import__(module, fromlist=[name]), name)
    assert kind.__dataclass_params__.frozen
    composed = {"engine", "telemetry"} if name == "ServerConfig" else set()
    for field in dataclasses.fields(kind):
        help_text = field.metadata.get("help", "")
        assert field.name in composed or len(help_text) > 3, f"{name}.{field.name} has no help"


def test_nothing_is_auto_once_resolved() -> None:
    spec = ModelSpec(
        path="x",
        architecture="llama",
        layers=2,
        hidden=8,
        heads=2,
        kv_heads=1,
        head_dim=4,
        intermediate=8,
        vocab_size=8,
        rope=Rope(),
        norm_eps=1e-5,
        tied_head=True,
        model_len=64,
        bos_id=None,
        eos_ids=(0,),
        parameters=1,
    )
    facts = DeviceFacts(device="cpu", auto_dtype="f32", threads=2)
    resolved = dataclasses.asdict(resolve(EngineConfig(), spec, facts))
    open_ones = {name for name, value in resolved.items() if value == "auto"}
    assert open_ones <= {"attention_backend"}, "kernels/select.py decides that one alone"
    for name in ("max_model_len", "kv_blocks", "kv_cache_memory", "loop_depth", "engine_threads"):
        assert resolved[name] is not None


def test_every_dependency_says_what_it_is_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {re.split(r"[^\w-]", one)[0] for group in groups for one in group}
    vendored = {path.name.lower() for path in (ROOT / "dashboard" / "vendor").iterdir()}
    given = {name.lower() for name, *_ in table("Dependencies")}
    assert wanted <= given, f"no line for {sorted(wanted - given)}"
    assert given <= wanted | vendored, "a line for what is not used"
    assert all(len(reason) >= 10 for _, reason, *_ in table("Dependencies"))


def test_the_where_is_index_is_current() -> None:
    places = [place for _, *cells in table("Where is") for place in re.split(r"[`, ]+", cells[0])]
    missing = [place for place in places if place and not (ROOT / place).exists()]
    assert places
    assert not missing, f"the where-is index names {missing}"


def test_documents_link_to_what_exists() -> None:
    for name in ("README.md", "ARCHITECTURE.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / link).exists(), f"{name} links to {link}"


def test_the_javascript_package_has_no_dependencies() -> None:
    manifest = ROOT / "dashboard" / "package.json"
    if manifest.exists():
        assert not {"dependencies", "devDependencies"} & set(json.loads(manifest.read_text()))
