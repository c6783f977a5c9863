"""The lab from end to end: servers, runs, a result; killed, stopped and gone on with.

GIVEN a small experiment, WHEN its process is killed in the middle and started again, THEN what was
done is kept and the rest is done; and its result says what the engine's own record says.
"""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from bench.lab import files, markdown, summary
from bench.lab.experiment import Bench, agree, cells, perform
from bench.lab.figures import FIGURES
from bench.lab.plan import quick
from bench.lab.progress import Shown
from bench.lab.record import CAUSES
from bench.lab.recorded import RecordReader
from bench.lab.result import collect, notes
from bench.lab.workload import WorkloadError
from server.cli import build_parser, main
from tests import lab_bench, tiny
from tests.servers import wait

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("lab") / "tiny")


def start(out: Path, model: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.lab_bench", str(out), str(model)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **quiet)


def runs_in(out: Path) -> list[Path]:
    return sorted((out / "runs").glob("*.json.gz"))


def servers_of(pid: int) -> list[int]:
    """Return the servers that a lab has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    lines = {int(one): Path(f"/proc/{one}/cmdline").read_bytes() for one in children}
    return [one for one, line in lines.items() if b"\0serve\0" in line]


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_killed_or_stopped_it_goes_on_from_there(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = start(out, model)
    wait(lambda: runs_in(out), 60)
    left_behind = servers_of(first.pid)
    assert len(left_behind) == 1
    first.kill()
    first.communicate(timeout=10)
    done = {path: path.read_bytes() for path in runs_in(out)}
    # What a killed lab leaves would otherwise share the machine with the next one's runs.
    wait(lambda: all(map(gone, left_behind)), 20)
    second = start(out, model)
    wait(lambda: len(runs_in(out)) > len(done) or second.poll() is not None, 60)
    assert second.poll() is None, second.communicate()[1].decode()
    os.killpg(second.pid, signal.SIGINT)  # as Ctrl-C does
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 130, errors.decode()
    assert b"goes on from here" in errors
    assert all(path.read_bytes() == content for path, content in done.items())
    partial = json.loads((out / "result.json").read_text())
    assert partial["complete"] is False
    assert len(done) < partial["runs_done"] < 4
    assert any("of 4 runs" in note for note in partial["notes"])
    assert (out / "report.html").exists()
    with pytest.raises(WorkloadError, match="seed"):
        perform(_seeded(lab_bench.bench(out, model)), quiet=True)


def test_a_plan_of_which_nothing_was_measured_gives_way(tmp_path: Path) -> None:
    bench = lab_bench.bench(tmp_path, Path("model"))
    (tmp_path / "runs").mkdir()
    agree(bench)
    agree(_seeded(bench))
    assert files.read_json(tmp_path / "plan.json")["seed"] == 2
    (tmp_path / "capacity.json").write_text("{}")
    with pytest.raises(WorkloadError, match="seed"):
        agree(bench)


def _seeded(bench: Bench) -> Bench:
    return replace(bench, plan=replace(bench.plan, seed=2))


def _check_form(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    for run in result["runs"]:
        assert set(run["figures"]) <= set(FIGURES)
        assert run["clock"]["error_ns"] < 50e6
        assert 0 <= run["stolen_share"] <= 1
    for curve in result["curves"]:
        assert all(math.isfinite(one["mean"]) for one in curve["figures"].values())
    assert {row["arm"] for row in result["comparisons"]} == {"static"}
    assert result["generator"]["top_rate_requests_s"] > 0


def test_what_the_engine_recorded_is_what_clients_saw(model: Path, tmp_path: Path) -> None:
    """The real engine in f32: equal answers, and each picture from its own record."""
    bench = lab_bench.real_bench(tmp_path, model)
    perform(bench, quiet=True)
    result = collect(bench, "iterscope lab small")
    assert (result["complete"], result["runs_done"]) == (True, 2)
    assert len({run["workload_digest"] for run in result["runs"]}) == 1
    _check_form(result)
    equal = result["equality"]
    assert equal["checked"] > 0
    assert equal["same"] == equal["checked"], equal["differing"]
    runs = {run["arm"]: run for run in result["runs"]}
    for cell in cells(bench.plan):
        whole = files.read_json(bench.run_file(cell))
        steps, load = whole["steps"], whole["load"]
        clients = sum(len(ask["tokens_ns"]) for ask in load["asks"])
        prefills = sum(1 for ask in load["asks"] if ask["tokens_ns"])
        # A prompt's last chunk brings a token too, and decodes bring all the others.
        assert sum(steps["decode_tokens"]) >= clients - prefills
        # On the client's clock no step that brought a token ends after it was read.
        zero_ns = load["zero_monotonic_ns"] - whole["run"]["clock"]["offset_ns"]
        first_ns = min(ask["tokens_ns"][0] for ask in load["asks"] if ask["tokens_ns"])
        slack_ns = whole["run"]["clock"]["error_ns"] + 1_000_000
        assert steps["end_at_ns"][0] - zero_ns <= first_ns + slack_ns
        # Nobody's causes are missing, also not those of who was cut off at the very end.
        reader = RecordReader(bench.out / whole["run"]["history"])
        told = reader.ask(CAUSES, [whole["run"]["engine"]["run_id"], whole["run"]["name"] + "-%"])
        reader.close()
        assert whole["causes"] == pytest.approx(dict(told.rows))
    assert runs["continuous"]["figures"]["useful_rows_share"] == 1.0
    waits = {row["arm"]: row["causes"] for row in result["waits"]}
    assert waits["static"]["batch_held"] > 0
    assert "batch_held" not in waits["continuous"]
    lost = {row["arm"]: row for row in result["static_lost"]}
    assert lost["static"]["idle_rows_share"] > lost["continuous"]["idle_rows_share"] == 0
    rounds = {row["arm"]: row for row in result["rounds"]}
    assert len(rounds["continuous"]["steps"]) >= 6
    assert any(step["idle_rows"] for step in rounds["static"]["steps"])
    evidence = [found for one in result["hypotheses"] for found in one["evidence"]]
    assert evidence
    assert all(found["columns"] and found["rows"] for found in evidence)
    _reasked(evidence[0])
    assert main(["lab", "report", str(tmp_path), "--json", str(tmp_path / "again.json")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["curves"] == json.loads(json.dumps(result["curves"]))
    assert (tmp_path / "report.html").stat().st_size > 1000


def _reasked(found: dict[str, Any]) -> None:
    """The command that a report shows gives the rows that it shows."""
    program = shlex.quote(str(Path(sys.executable).parent / "iterscope"))
    told = subprocess.run(
        ["bash", "-c", found["command"].replace("iterscope", program, 1) + " --json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(told.stdout)["rows"] == found["rows"]


LOAD = ("load", "nowhere", "--url", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["quick", "--rates", "fast"], "--rates"),
        (["quick", "--rates", "0.5,0.5"], "--rates"),
        (["quick", "--rates", "0.5,0.5001"], "--rates"),
        (["quick", "--rates", "0.0001"], "--rates"),
        (["quick", "--slo", "ttft=1"], "--slo"),
        (["quick", "--arm", "a"], "--arm"),
        (["quick", "--arm", "a=--batching static"], "--arm"),
        (["quick", "--arm", "a b=", "--arm", "a-b=--batching static"], "--arm"),
        (["quick", "--arm", "a=", "--arm", "b=--port 1"], "--port"),
        (["quick", "--flags=--history=x"], "--history"),
        (["quick", "--flags", "--max-num-seqs 3"], "--max-num-seqs"),
        (["quick", "--arrivals", "closed"], "--arrivals"),
        (["quick", "--workload", "nothing"], "workload"),
        (["quick", "--workload", "recorded:/nowhere"], "/nowhere"),
        (["quick", "--seconds", "nan"], "--seconds"),
        (["quick", "--json", "/nowhere/x"], "--json"),
        (["quick", "--repeats", "0"], "--repeats"),
        (["quick", "--context", "2"], "--context"),
        (["quick", "--class", "x:ttft=1,tpot=1"], "--class"),
        (["workload", "--workload", "nothing", "--out", "x"], "workload"),
        (["workload", "--rate", "1", "--seconds", "2", "--out", "/nowhere/x"], "--out"),
        (["report", "nowhere"], "nowhere"),
        (["report", "nowhere", "--markdown", "/nowhere/x"], "--markdown"),
        ([*LOAD, "--out", "x"], "nowhere"),
        ([*LOAD, "--out", "/nowhere/x"], "--out"),
        ([*LOAD, "--out", "x", "--cut-off-s", "nan"], "--cut-off-s"),
        ([*LOAD, "--out", "x", "--body", "[1]"], "--body"),
        ([*LOAD, "--out", "x", "--name", "a\r\nX-Other: b"], "--name"),
    ],
)
def test_misuse_is_one_line_that_names_the_flag(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *arguments]) == 2
    told = capsys.readouterr().err
    assert names in told
    assert len(told.splitlines()) == 1


def test_every_part_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("quick", "full", "load", "workload", "report"):
        with pytest.raises(SystemExit) as ended:
            build_parser("lab").parse_args(["lab", part, "--help"])
        assert ended.value.code == 0
    assert "iterscope" in capsys.readouterr().out


def test_the_time_left_is_that_of_runs_alone() -> None:
    now = [0.0]
    shown = Shown(18, 6.0, quiet=True, clock=lambda: now[0])
    now[0] += 60  # servers start, capacity is measured
    for run in range(3):
        for second in range(8):
            shown.ticks(second)
            now[0] += 1
        shown.ran("done", 8.0)
        assert shown.left_s == (17 - run) * 8
    now[0] += 5
    assert shown.left_s == 15 * 8 - 5
    now[0] += 60  # a run that takes long leaves those after it as they are
    assert shown.left_s == 14 * 8


def test_a_run_whose_engine_failed_is_told_of() -> None:
    result = files.read_json(ROOT / "docs/lab-full.json")
    plan, equal = replace(quick("demo", 300), repeats=9), {"allowed": True, "not_known": 0}
    calm = list(notes(plan, result["runs"], equal))
    result["runs"][0]["faults"] = 1
    told = set(notes(plan, result["runs"], equal)) - set(calm)
    assert told == {"In 1 run the engine failed (table `fault`): figures hold what that cost."}


def test_who_kept_the_objective_at_every_rate_is_in_no_ratio() -> None:
    result = files.read_json(ROOT / "docs/lab-full.json")
    row = result["at_slo"][0]
    assert "mean ratio 0.55 (" in summary.at_slo_in_words(result, row)
    for point in result["operating_points"]:
        point["interpolated"] = point["arm"] != "continuous"
    told = summary.at_slo_in_words(result, row)
    assert "static 5.66 requests/s, continuous at least 10.25: no ratio" in told
    assert "continuous at least 10.25 requests/s, static 5.66: no ratio" in "\n".join(
        markdown.page(result)
    )


def test_a_name_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    result = files.read_json(ROOT / "docs/lab-full.json")
    told = msgspec.json.encode(result).replace(b"static", b"[/]")
    summary.show(msgspec.json.decode(told), Console(width=70))
    assert "[/]" in capsys.readouterr().out


def test_a_name_breaks_no_table_and_no_section_is_empty() -> None:
    result = files.read_json(ROOT / "docs/lab-full.json")
    named = msgspec.json.decode(msgspec.json.encode(result).replace(b"static", b"a | <b>"))
    lines = list(markdown.page(named))
    assert len(lines) == len(list(markdown.page(result)))
    assert any(line.startswith("| 0.1 | 1.07 | a \\| \\<b> | ") for line in lines)
    for line, plain in zip(lines, markdown.page(result), strict=True):
        # A cell begins at each bar that is not written as a character.
        assert len(re.findall(r"(?<!\\)\|", line)) == plain.count("|")
    alone = list(markdown.page(result | {"hypotheses": [], "comparisons": [], "at_slo": []}))
    assert [line for line in alone if line.startswith("## ")] == ["## What it stands on"]


def test_a_workload_is_written_for_any_server(tmp_path: Path) -> None:
    path = tmp_path / "w.json.gz"
    asked = [
        "workload",
        "--workload",
        "mooncake",
        "--rate",
        "5",
        "--seconds",
        "4",
        "--tenants",
        "2",
    ]
    assert main(["lab", *asked, "--class", "0.5:ttft=100,tpot=10", "--out", str(path)]) == 0
    content = files.read_json(path)
    assert len(content["asks"]) == 20
