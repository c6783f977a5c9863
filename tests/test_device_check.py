"""The device check runs where there is no device: every part, and it fails when a kernel is wrong.

GIVEN a CPU, Triton's interpreter and random weights, WHEN the script runs as it would on a GPU,
THEN each part stands in its table, and a scale that is planted wrong ends it with 1.
"""

import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench.device import sweep
from bench.device.check import check as run_parts
from bench.device.check import driver
from bench.device.table import Bench, Row
from bench.device_check import PARTS
from kernels.triton import launch

ROOT = Path(__file__).resolve().parent.parent


def check(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.device_check", *flags]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )


def rows_of(text: str) -> list[list[str]]:
    """Return the table's lines as their part and their last word."""
    table = text.split("\n\n")[1].splitlines()[2:]
    return [[line.split("  ")[0], line.split()[-1]] for line in table]


def test_every_part_runs_and_nothing_is_wrong(tmp_path: Path) -> None:
    ran = check("--device", "cpu", "--tiny", "--out", str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = rows_of(ran.stdout)
    assert {part for part, _ in rows} == set(PARTS)
    assert {verdict for _, verdict in rows} <= {"ok", "told", "skipped"}
    assert "no figure here says anything of a GPU" in ran.stdout
    assert (tmp_path / "device_check.txt").read_text() == ran.stdout
    sound = {part for part, verdict in rows if verdict == "ok"}
    assert sound >= {"attention", "ops", "memory", "engine"}
    if find_spec("triton") is not None:
        assert "triton: decodes, float32" in ran.stdout
        assert "tiny on triton, replay = eager" in ran.stdout
        assert "graphs" in sound


def here(device: str, *parts: str, wrong_scale: bool = False) -> int:
    """Run parts in this process, where Triton is not interpreted; return the exit code."""
    threads = torch.get_num_threads()
    until_s = time.monotonic() + 60
    bench = Bench(device=device, tiny=True, wrong_scale=wrong_scale, until_s=until_s)
    try:
        return run_parts(bench, parts)
    finally:
        torch.set_num_threads(threads)


def test_a_wrong_scale_fails_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert here("cpu", "attention", "ops") == 0
    capsys.readouterr()
    assert here("cpu", "attention", "ops", wrong_scale=True) == 1
    rows = rows_of(capsys.readouterr().out)
    compared = [verdict for _, verdict in rows if verdict != "skipped"]
    assert compared.count("ok") <= 2, "draws alone are as they were"
    assert compared.count("bad") > 8, "every backend and op is held to the reference"


def test_a_part_that_raises_is_bad_and_hides_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(bench: Bench) -> list[Row]:
        raise ValueError("planted")

    monkeypatch.setattr(
        "bench.device.check.PARTS", (("broken", broken, 1.0), ("driver", driver, 1.0))
    )
    assert here("cpu", "broken", "driver") == 1
    rows = rows_of(capsys.readouterr().out)
    assert {part for part, _ in rows} == {"broken", "driver"}
    assert rows[0][1] == "bad"


@pytest.mark.parametrize("writable", [True, False])
def test_tiles_are_kept_in_out_and_in_the_package_where_it_may_be_written(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    if writable:
        package.mkdir()
    else:
        package.write_text("no folder can be made in a file, not even by root")
    monkeypatch.setattr(launch, "TUNING", package / "tuning")
    best = {"decode-d64-g4-b2-t16": launch.Tiles(block_m=16, tile=32, warps=2, stages=4)}
    written, installed = sweep.keep(tmp_path / "out", "A GPU", best)
    kept = tmp_path / "out" / "a-gpu.json"
    assert written.figure == str(kept)
    if writable:
        assert launch.tuning_file("A GPU").read_text() == kept.read_text()
    else:
        assert installed.verdict == "skipped"
        assert f"copy {kept} there" in installed.figure
        (alone,) = sweep.keep(None, "A GPU", best)
        assert "--out FOLDER keeps the tiles" in alone.figure


def test_an_unknown_part_is_said_in_one_line() -> None:
    ran = check("--device", "cpu", "--only", "speed")
    assert ran.returncode == 2
    assert "--only: no part 'speed'" in ran.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert here("cuda", "driver") == 2
    assert capsys.readouterr().out.startswith("PyTorch finds no CUDA device here")
