"""`iterscope lint`, and named queries of `iterscope sql`: what is printed, and the exit codes.

Owns the proofs of server/lint_command.py and server/named_flags.py on a history, a file and a
running server. What lints find is proved in test_lints.py.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.lint_command import add_lint_flags, run_lint_command
from server.sql_command import add_sql_flags, run_sql_command
from telemetry.named import catalogue, of_kind
from tests import sick_runs
from tests.recordings import placed, write_file
from tests.telemetry_server import Running, running, wait_for

HEALTHY, WRONG, MISUSE = 0, 1, 2
EVERY = [query.name for query in of_kind("lint", "law")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    runs = {"healthy": sick_runs.healthy(), "slow": sick_runs.slow_host(), "empty": []}
    return {
        name: write_file(folder / f"{name}.duckdb", placed(records, name))
        for name, records in runs.items()
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(folder=tmp_path_factory.mktemp("history"), ring=2000) as server:
        wait_for(lambda: server.parts.history.status().kept)
        server.publish(*sick_runs.slow_host())
        yield server


def lint(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_lint_flags(parser)
    return run_lint_command(parser.parse_args([str(argument) for argument in arguments]))


def lint_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code = lint(*arguments, "--json")
    return code, json.loads(capsys.readouterr().out)


def test_a_healthy_record_is_0(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert lint("--file", files["healthy"]) == HEALTHY
    out = capsys.readouterr().out
    assert out == f"{files['healthy']}: nothing wrong in {len(EVERY)} checks\n"
    code, told = lint_json(capsys, "--file", files["healthy"])
    assert (code, told["healthy"], told["findings"]) == (HEALTHY, True, [])
    assert told["checked"] == EVERY


def test_what_is_wrong_is_1_with_its_rows_and_meaning(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert lint("--file", files["slow"]) == WRONG
    out = capsys.readouterr().out
    assert "slow_host: Slow host" in out
    assert "the device waits for the host" in out
    assert "0.3723" in out
    assert f"1 of {len(EVERY)} found something wrong" in out
    code, told = lint_json(capsys, "--file", files["slow"])
    assert (code, told["healthy"]) == (WRONG, False)
    (finding,) = told["findings"]
    assert (finding["name"], finding["kind"], len(finding["rows"])) == ("slow_host", "lint", 1)
    assert finding["columns"][0] == {"name": "run_id", "type": "VARCHAR"}


def test_only_the_named_ones_run_and_thresholds_reach_them(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, told = lint_json(capsys, "starvation", "no_step_missing", "--file", files["slow"])
    assert told["checked"] == ["starvation", "no_step_missing"]
    assert lint("slow_host", "-p", "host_share_max=0.4", "--file", files["slow"]) == HEALTHY
    assert lint("slow_host", "-p", "host_share_max=0.3", "--file", files["slow"]) == WRONG


def test_a_range_limits_what_is_looked_at(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty steps of 32 ms lie in the last 640 ms; fewer say nothing."""
    assert lint("slow_host", "--last", "700ms", "--file", files["slow"]) == WRONG
    assert lint("slow_host", "--last", "500ms", "--file", files["slow"]) == HEALTHY
    assert lint("slow_host", "--run", "slow", "--file", files["slow"]) == WRONG
    capsys.readouterr()
    assert lint("--run", "other", "--file", files["slow"]) == WRONG
    assert "has no record of other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slow"], "slow: there is no such lint; there are engine_deaths"),
        (["why_waiting"], "why_waiting: there is no such lint"),
        (["-p", "host_share_max"], "host_share_max: is not KEY=VALUE"),
        (["-p", "host_share_max=most"], "host_share_max: must be a number"),
        (["-p", "host_share_max=2"], "host_share_max: must be at most 1"),
        (["-p", "steps_min=1", "-p", "steps_min=2"], "steps_min: is given twice"),
        (["-p", "colour=red"], "colour: no chosen lint takes it"),
        (["starvation", "-p", "host_share_max=0.3"], "host_share_max: no chosen lint takes it"),
        (["-p", "last_s=3"], "last_s: no chosen lint takes it"),
        (["--last", "5 parsecs"], "5 parsecs"),
        (["--last", "5m", "--from", "2026-11-30"], "exclude each other"),
    ],
)
def test_misuse_is_2_and_says_what(
    files: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert lint(*arguments, "--file", files["slow"]) == MISUSE
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_what_cannot_be_read_is_never_called_healthy(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert lint("--file", tmp_path / "nothing.duckdb") == WRONG
    assert lint("--history", tmp_path) == WRONG
    assert lint("--url", "http://127.0.0.1:9") == WRONG
    assert lint("--file", files["empty"]) == WRONG
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "has no record of any run" in captured.err
    assert len(captured.err.splitlines()) == 4


def test_a_closed_history_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sick_runs.write(tmp_path, {"slow": sick_runs.slow_host()})
    code, told = lint_json(capsys, "slow_host", "starvation", "--history", tmp_path)
    assert code == WRONG
    assert [finding["rows"][0][0] for finding in told["findings"]] == ["slow"]


def test_a_running_server_is_asked(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = lint_json(capsys, "--url", server.url)
    assert code == WRONG
    assert [finding["name"] for finding in told["findings"]] == ["slow_host"]
    assert told["source"] == server.url


# ---- named queries of `iterscope sql`


def sql(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_sql_flags(parser)
    return run_sql_command(parser.parse_args([str(argument) for argument in arguments]))


def test_a_named_query_is_asked_with_its_parameters(
    files: dict[str, Path], server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ("--query", "throughput", "-p", "points=3", "-p", "last_s=0.9", "--json")
    assert sql(*named, "--file", files["slow"]) == HEALTHY
    of_file = json.loads(capsys.readouterr().out)
    assert of_file["columns"][0]["name"] == "at_unix_us"
    assert of_file["row_count"] == 3
    assert sql(*named, "--url", server.url) == HEALTHY
    assert json.loads(capsys.readouterr().out)["rows"] == of_file["rows"]


def test_people_read_instants_and_programs_numbers(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    named = ("--query", "throughput", "-p", "points=1", "--file", files["slow"])
    assert sql(*named) == HEALTHY
    head, _, row = capsys.readouterr().out.splitlines()[:3]
    assert head.split()[0] == "at_utc"
    assert row.startswith("2026-11-30 00:53:20.000")
    assert sql(*named, "--csv") == HEALTHY
    assert capsys.readouterr().out.startswith("at_unix_us,")


def test_the_list_names_them_all_and_asks_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert sql("--list", "--url", "http://127.0.0.1:9") == HEALTHY
    out = capsys.readouterr().out
    for query in catalogue().values():
        assert query.name in out
        assert query.meaning in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--query", "nothing"], "nothing: there is no such query; --list names them"),
        (["--query", "throughput", "SELECT 1"], "--query: takes no SELECT beside it"),
        (["--query", "request_timeline"], "request: is missing: id of the sequence"),
        (["--query", "throughput", "-p", "points=0"], "points: must be at least 1"),
        (["-p", "points=3", "SELECT 1"], "-p: is for a named query"),
        ([], "the query is empty"),
    ],
)
def test_misuse_of_a_named_query_is_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert sql(*arguments, "--url", "http://127.0.0.1:9") == MISUSE
    assert message in capsys.readouterr().err


def test_a_range_without_a_record_is_not_healthy(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert lint("--from", "2090-01-01", "--file", files["healthy"]) == WRONG
    captured = capsys.readouterr()
    assert "nothing on record" in captured.err
    assert captured.out == ""
