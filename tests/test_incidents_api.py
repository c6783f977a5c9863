"""Recorded files and comparisons over HTTP: what the page's Post-mortem and Compare ask for.

Owns the proofs of server/incidents_api.py, telemetry/case_files.py and server/diff_api.py on one
real server: a file answers as the history does, names are no paths, strangers' files are refused or
harmless, and a comparison is that of `iterscope diff`.
"""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pytest

from server.cli import main
from tests import tiny
from tests.api import complete, ids
from tests.noisy_runs import noisy_file
from tests.servers import Server, serving

COUNT = "SELECT count(*) FROM request_end"
FILE_MAX = 24 * 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("incidents")
    limits = ("--file-bytes-max", str(FILE_MAX), "--kv-blocks", "64")
    flags = ("--history", str(folder / "history"), *limits)
    with serving(folder, tiny.write(folder / "model"), *flags, parrot=True) as running:
        for number in range(4):
            complete(running, {"prompt": ids(20 + number), "max_tokens": 8})
        yield running


@pytest.fixture(scope="module")
def recorded(server: Server) -> str:
    """Give the name of a file that the server recorded when asked."""
    body = {"last": "5m", "detail": "a test"}
    assert server.post("/telemetry/record", body).status_code == 200
    files = server.get("/telemetry/incidents").json()["data"]
    name: str = next(file["name"] for file in files if file["name"].endswith("-asked.duckdb"))
    return name


def ask(server: Server, name: str, sql: str) -> httpx.Response:
    return server.post(f"/telemetry/incidents/{name}/sql", {"sql": sql})


def send(server: Server, content: bytes) -> httpx.Response:
    return httpx.post(f"{server.url}/telemetry/incidents", content=content, timeout=60)


def sent_folder(server: Server) -> Path:
    return server.log_file.parent / "history" / "incidents" / "sent"


def error(response: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    return found


# ---- recorded files


def test_a_recorded_file_answers_as_the_history_does(server: Server, recorded: str) -> None:
    assert ask(server, recorded, COUNT).json()["rows"] == [[4]]
    why = ask(server, recorded, "SELECT reason, detail FROM file.incident").json()["rows"]
    assert why == [["asked", "a test"]]
    named = server.get(f"/telemetry/incidents/{recorded}/queries/runs")
    assert named.json()["row_count"] == 1
    body = {"sql": COUNT, "format": "csv"}
    csv = server.post(f"/telemetry/incidents/{recorded}/sql", body)
    assert csv.headers["content-type"].startswith("text/csv")
    assert csv.text.endswith("4\r\n")


def test_the_file_itself_comes_whole(server: Server, recorded: str, tmp_path: Path) -> None:
    (tmp_path / "copy.duckdb").write_bytes(server.get(f"/telemetry/incidents/{recorded}").content)
    with duckdb.connect(tmp_path / "copy.duckdb", read_only=True) as connection:
        assert connection.execute(COUNT).fetchall() == [(4,)]


def test_an_error_says_where_and_a_query_cannot_leave_the_file(
    server: Server, recorded: str
) -> None:
    wrong = ask(server, recorded, "SELECT nothing FROM run")
    assert wrong.status_code == 400
    assert error(wrong)["position"] == 7
    for sql in (
        "SELECT * FROM read_text('/etc/passwd')",
        "COPY (SELECT 1) TO '/tmp/iterscope-escape'",
        "ATTACH '/tmp/other.duckdb'",
        "SELECT 1; SELECT 2",
    ):
        refused = ask(server, recorded, sql)
        assert refused.status_code == 400, sql
    assert not Path("/tmp/iterscope-escape").exists()
    assert ask(server, recorded, COUNT).json()["rows"] == [[4]], "the next one is answered"


@pytest.mark.parametrize("name", ["nothing.duckdb", "..%2Fhistory.duckdb", "%2Fetc%2Fpasswd", "."])
def test_a_name_is_no_path(server: Server, name: str) -> None:
    for answer in (
        ask(server, name, "SELECT 1"),
        server.get(f"/telemetry/incidents/{name}/queries/runs"),
    ):
        assert answer.status_code in (404, 405), answer.text
        assert "error" in answer.json()


def test_many_at_once_are_answered_or_told_to_come_again(server: Server, recorded: str) -> None:
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda _: ask(server, recorded, COUNT), range(24)))
    assert {answer.status_code for answer in found} <= {200, 429}
    assert [answer.json()["rows"] for answer in found if answer.is_success].count([[4]]) >= 1
    for busy in (answer for answer in found if answer.status_code == 429):
        assert busy.headers["retry-after"]


# ---- files that people send


def test_a_file_that_is_sent_is_looked_at_like_an_own(server: Server, tmp_path: Path) -> None:
    path = noisy_file(tmp_path / "theirs.duckdb", 3, requests=30)
    kept = send(server, path.read_bytes())
    assert kept.status_code == 200, kept.text
    name = kept.json()["name"]
    assert ask(server, name, COUNT).json()["rows"] == [[30]]
    listed = server.get("/telemetry/incidents").json()["data"]
    assert {"name": name, "bytes": path.stat().st_size, "sent": True} in listed


def test_what_is_no_record_is_refused_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    with duckdb.connect(tmp_path / "other.duckdb") as connection:
        connection.execute("CREATE TABLE run (a INTEGER)")
    real = (tmp_path / "other.duckdb").read_bytes()
    before = server.get("/telemetry/incidents").json()
    theirs = noisy_file(tmp_path / "theirs.duckdb", 9, requests=10).read_bytes()
    cut = [theirs[:place] for place in (4000, 9000, len(theirs) // 2, len(theirs) - 1)]
    for content in (b"", b"SELECT", real, real[:16] + b"\xff" * 20_000, *cut):
        refused = send(server, content)
        assert refused.status_code == 400, refused.text
        assert "/" not in error(refused)["message"].replace("(path)", "")
    assert server.get("/telemetry/incidents").json() == before
    too_large = send(server, real[:4096] * (FILE_MAX // 4096 + 1))
    assert too_large.status_code == 413
    assert "--file-bytes-max" in error(too_large)["message"]
    assert list(sent_folder(server).glob(".*")) == [], "nothing half sent stays"


def test_a_file_larger_than_any_other_body_goes_to_the_disk_as_it_comes(
    server: Server, tmp_path: Path
) -> None:
    path = noisy_file(tmp_path / "large.duckdb", 7, requests=10)
    with duckdb.connect(path) as connection:
        ballast = "SELECT string_agg(md5(i::VARCHAR), '') FROM range(500000) r(i)"
        connection.execute(f"UPDATE run SET config = ({ballast})")
    assert 10 * 2**20 < path.stat().st_size < FILE_MAX

    def parts() -> Iterator[bytes]:  # no length is announced
        with path.open("rb") as file:
            while part := file.read(2**16):
                yield part

    kept = httpx.post(f"{server.url}/telemetry/incidents", content=parts(), timeout=60)
    assert kept.status_code == 200, kept.text
    assert kept.json()["bytes"] == path.stat().st_size
    assert ask(server, kept.json()["name"], COUNT).json()["rows"] == [[10]]
    assert server.get("/telemetry/incidents").json()["bytes_max"] == FILE_MAX


def test_a_sender_who_leaves_leaves_nothing(server: Server, tmp_path: Path) -> None:
    content = noisy_file(tmp_path / "theirs.duckdb", 8, requests=10).read_bytes()
    hasty = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=20)
    head = "POST /telemetry/incidents HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    hasty.sendall(f"{head}Content-Length: {FILE_MAX}\r\n\r\n".encode() + content[:100_000])
    server.wait(lambda: list(sent_folder(server).glob(".*")))
    hasty.close()
    server.wait(lambda: not list(sent_folder(server).glob(".*")))
    assert send(server, content).status_code == 200


def test_only_the_newest_that_were_sent_are_kept(server: Server, tmp_path: Path) -> None:
    content = noisy_file(tmp_path / "theirs.duckdb", 4, requests=10).read_bytes()
    names = [send(server, content).json()["name"] for _ in range(4)]
    listed = server.get("/telemetry/incidents").json()["data"]
    assert [file["name"] for file in listed if file["sent"]] == names[:0:-1]


# ---- comparisons


def test_a_comparison_is_that_of_the_command(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = noisy_file(tmp_path / "calm.duckdb", 5, requests=60)
    other = noisy_file(tmp_path / "other.duckdb", 6, requests=60)
    sent = [send(server, path.read_bytes()).json()["name"] for path in (calm, other)]
    body = server.post("/telemetry/diff", {"a_file": sent[0], "b_file": sent[1]})
    assert body.status_code == 200, body.text
    main(["diff", str(calm), str(other), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert body.json()["diff"] == told["diff"]
    assert body.json()["worse"] == told["worse"]
    assert body.json()["a"]["requests"] == 60


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "a must be a window"),
        ({"a": "last"}, 400, "b must be a window"),
        ({"a": "last", "b": "previous"}, 400, "no 'previous' run"),
        ({"a": "last", "b": "nobody"}, 400, "neither a file nor a run 'nobody'"),
        ({"a": "10m/5h", "b": "last"}, 400, "before it begins"),
        ({"a": "2036-01-01/2036-01-02", "b": "last"}, 400, "newest record"),
        ({"a": "last", "b_file": "../x.duckdb"}, 404, "no recorded file"),
        ({"a": "x" * 300, "b": "last"}, 400, "at most"),
        ({"a": 3, "b": "last"}, 400, "the body must be"),
        ({"a": "last", "c": "last"}, 400, "the body must be"),
    ],
)
def test_a_side_that_cannot_be_is_named(
    server: Server, body: dict[str, Any], status: int, words: str
) -> None:
    refused = server.post("/telemetry/diff", body)
    assert refused.status_code == status, refused.text
    assert words in error(refused)["message"]


def test_one_run_against_itself_is_the_same(server: Server) -> None:
    same = server.post("/telemetry/diff", {"a": "last", "b": "1h/now"})
    assert same.status_code == 200, same.text
    assert not same.json()["worse"]
    assert same.json()["a"]["runs"] == same.json()["b"]["runs"]
