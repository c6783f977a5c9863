"""The comparison with other servers: everybody gets the same work, and what is counted is true."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.workload import Life, figures, jobs_of, mix_lengths, percentile, poisson
from tests.servers import Server, serving


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("demo"), demo_model) as server:
        yield server


def test_the_mix_is_the_one_that_others_were_measured_with() -> None:
    lengths = mix_lengths()
    assert (len(lengths), sum(p for p, _ in lengths), sum(a for _, a in lengths)) == (
        *(64, 7613),
        4572,
    )
    assert jobs_of("mix", "a")[3].ids != jobs_of("mix", "b")[3].ids, "no prefix cache helps"
    assert jobs_of("mix", "a") == jobs_of("mix", "a")
    with pytest.raises(ValueError, match="no such phase: soup"):
        jobs_of("soup", "a")


def test_arrivals_come_at_their_rate() -> None:
    arrivals = poisson(50.0, 100.0)
    assert abs(len(arrivals) - 5000) < 300
    assert arrivals == sorted(arrivals)


def test_figures_are_of_the_time_in_which_all_decode() -> None:
    """Two lives of 1 token each 0.1 s, the second half a second late; together 0.5 s to 1.0 s."""
    lives = [
        Life(0.0, 11, [number / 10 for number in range(11)]),
        Life(0.5, 11, [0.5 + number / 10 for number in range(11)]),
    ]
    assert math.isclose(figures("batch:2", lives)["tok_s"], 20.0)
    mixed = figures("mix", lives)
    assert math.isclose(mixed["tok_s"], 22 / 1.5)
    assert math.isclose(mixed["itl_p99_ms"], 100.0)
    assert math.isclose(figures("prefill", [Life(1.0, 1, [1.25])])["tok_s"], 512 * 4)
    with pytest.raises(ValueError, match="1 of 2 requests"):
        figures("mix", [lives[0], Life(0.0, 3, [1.0])])
    assert math.isnan(percentile([], 0.5))
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5


def test_an_engine_and_a_server_take_turns(demo_server: Server, tmp_path: Path) -> None:
    """The real engine in process beside a real server over HTTP."""
    out = tmp_path / "peers.json"
    model = demo_server.get("/v1/models").json()["data"][0]["id"]
    http = json.dumps({"url": demo_server.url, "model": model})
    command = [sys.executable, "-m", "bench.peers", "engine=iterscope:", f"server=http:{http}"]
    flags = ["--phases", "batch:2", "--rounds", "2", "--json", str(out)]
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| batch:2 | tok_s |" in done.stdout
    runs = json.loads(out.read_text())["phases"]["batch:2"]
    assert [len(runs[name]) for name in ("engine", "server")] == [2, 2]
    assert all(run["tok_s"] > 0 for name in runs for run in runs[name])


def test_a_server_that_refuses_ends_the_comparison(demo_server: Server) -> None:
    http = json.dumps({"url": demo_server.url, "model": "another"})
    command = [sys.executable, "-m", "bench.peers", f"server=http:{http}", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "a request failed: status 404" in done.stderr
