"""The API's own description: valid, complete, and obeyed by the server under schemathesis.

schemathesis runs as its users run it, as a program against a real server; a longer run of more
examples is marked soak. It draws what the document allows and what it forbids, and looks for
server errors, undocumented answers, and answers of another shape than documented.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

from server.openapi import ANSWERS, BODIES, document
from server.schemas import HARMLESS, ChatRequest, CompletionRequest
from tests import tiny
from tests.servers import Server, serving

ENDLESS = "^/telemetry/stream"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openapi")
    flags = ("--max-model-len", "48", "--history", str(folder / "history"))
    with serving(folder, tiny.write(folder / "tiny"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def described(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/openapi.json").json()
    return found


def test_the_document_is_valid(described: dict[str, Any]) -> None:
    validate(described)
    assert described["openapi"].startswith("3.1")


def test_every_name_in_it_is_used(described: dict[str, Any]) -> None:
    text = str(described)
    for name in described["components"]["schemas"]:
        assert f"'#/components/schemas/{name}'" in text, name
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    answered = {str(one["responses"]["200"]) for one in operations}
    assert len(answered) >= len(set(ANSWERS.values()))
    assert sum("requestBody" in one for one in operations) == len(BODIES)


def test_the_document_follows_the_routes() -> None:
    assert document([])["paths"] == {}


def test_what_is_not_built_is_told(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    for name, harmless in HARMLESS.items():
        kinds = [k for k in (ChatRequest, CompletionRequest) if name in k.__struct_fields__]
        assert kinds, name
        for kind in kinds:
            assert schemas[kind.__name__]["properties"][name]["enum"] == list(harmless)


def cases(server: Server, folder: Path, examples: int, phases: str) -> int:
    """Run schemathesis; return how many requests it made. Fails with all it says on a finding."""
    program = Path(sys.executable).parent / "schemathesis"
    command = [str(program), "run", f"{server.url}/openapi.json", "--no-color"]
    command += ["--exclude-path-regex", ENDLESS, "--max-examples", str(examples)]
    command += ["--phases", phases, "--generation-deterministic", "--warnings", "off"]
    # A request may be all the document allows and still ask for more than the context holds.
    command += ["--exclude-checks", "positive_data_acceptance"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated", done.stdout)
    assert found is not None, done.stdout
    return int(found[1])


def test_schemathesis_finds_nothing(server: Server, tmp_path: Path) -> None:
    assert cases(server, tmp_path, 10, "fuzzing") > 80
    server.wait_idle()


@pytest.mark.soak
def test_schemathesis_finds_nothing_in_many(server: Server, tmp_path: Path) -> None:
    assert cases(server, tmp_path, 400, "coverage,fuzzing") > 5000
    server.wait_idle()
