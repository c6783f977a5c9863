"""The comparison with other servers: everybody gets the same work, and what is counted is true."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from bench.crowd import CrowdTime
from bench.drive_http import Server as Client
from bench.drive_http import Stream
from bench.drive_iterscope import Engine
from bench.peer import read
from bench.peer_quality import loss_of
from bench.peer_table import tables
from bench.peers import resolved
from bench.quality import runner
from bench.requantize import requantize
from bench.workload import Life, figures, jobs_of, mix_lengths, percentile, poisson
from tests import tiny
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


def compare(list_of_peers: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.peers", str(list_of_peers), "--side", "http", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def peer(name: str, url: str, side: str = "http", **settings: object) -> str:
    """A server that runs already, as a list names it; ours where its name says so."""
    lines = [f'name = "{name}"', f'side = "{side}"', 'precision = "f32"', 'driver = "http"']
    told = [f"{key} = {json.dumps(value)}" for key, value in ({"url": url} | settings).items()]
    ours = f"ours = {json.dumps('ours' in name)}"
    return "\n".join(["[[peer]]", *lines, ours, "[peer.settings]", *told, ""])


def test_peers_of_a_list_take_turns(demo_server: Server, tmp_path: Path) -> None:
    """One real server, asked as ours and as another's; what ran in process is left out."""
    listed, out = tmp_path / "peers.toml", tmp_path / "peers.json"
    url = demo_server.url
    listed.write_text(peer("ours", url) + peer("other", url) + peer("x", "", side="process"))
    flags = ["--phases", "batch:1", "poisson:20:0.1", "--rounds", "2", "--again", "0"]
    done = compare(listed, *flags, "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "| ours over the best other | | |" in done.stdout.replace("  ", " ")
    assert "Poisson arrivals for 0.1 s, 20 requests a second:" in done.stdout
    report = json.loads(out.read_text())
    assert report["peers"]["ours"]["ours"]
    for by_peer in report["phases"].values():
        assert [len(by_peer[name]) for name in ("ours", "other")] == [2, 2]
        assert all(
            run["tok_s"] > 0 and run["tries"] == 1 for runs in by_peer.values() for run in runs
        )


def test_a_server_that_refuses_ends_the_comparison(demo_server: Server, tmp_path: Path) -> None:
    listed = tmp_path / "peers.toml"
    listed.write_text(peer("it", demo_server.url, model="another"))
    done = compare(listed, "--rounds", "1")
    assert done.returncode != 0
    assert "it: status 404" in done.stderr


def test_a_precision_is_scored_and_who_does_not_tell_is_named(
    demo_server: Server, tmp_path: Path
) -> None:
    """One real server, and one that answers nothing: the same text, over float32's perplexity."""
    listed, out = tmp_path / "peers.toml", tmp_path / "scores.json"
    url = demo_server.url
    listed.write_text(peer("ours", url) + peer("mute", url + "/nowhere", model="x"))
    command = [sys.executable, "-m", "bench.peer_quality", str(listed), "--side", "http"]
    command += ["--texts", "2", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    ours = report["peers"]["ours"]
    assert 100 < ours["tokens"] < 2000
    assert report["float32_nats"] / ours["tokens"] > 1
    assert math.isclose(ours["loss_nats"], report["float32_nats"], rel_tol=0.02)
    assert ours["loss_nats"] != report["float32_nats"]
    assert "| mute | f32 | mute: status 404" in done.stdout


def test_the_scores_of_a_prompt_are_those_of_the_logits(
    demo_server: Server, demo_model: Path
) -> None:
    """In int8, whose whole step is C++: what is told of a prompt is of the same computation."""
    ids = list(range(300, 420))
    loss = loss_of(runner(str(demo_model), "int8"), [ids])
    assert math.isclose(Engine("int8").loss(ids), loss, rel_tol=1e-4)
    assert math.isclose(Client(demo_server.url).loss(ids), loss, rel_tol=1e-4)


def test_the_list_that_is_shipped_can_be_read(tmp_path: Path) -> None:
    peers = read(Path("bench/peers.toml"), {"at": "/others", "model": "m.gguf", "python": "py"})
    assert {one.side for one in peers if one.ours} == {"process", "http"}
    assert all(one.perplexity for one in peers if one.ours)
    assert not any("{at}" in json.dumps(one.settings) for one in peers)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[[peer]]\nname = "a"\nspeed = 3\n')
    with pytest.raises(SystemExit, match=r"wrong\.toml is no list of peers: .*speed"):
        read(wrong, {})
    wrong.write_text(peer("a", "http://x", side="moon"))
    with pytest.raises(SystemExit, match="side is one of process, http"):
        read(wrong, {})


def test_a_load_is_a_share_of_what_the_peer_served_in_the_mix() -> None:
    mixes = [{"requests_s": 8.0}, {"requests_s": 10.0}, {"requests_s": 20.0}]
    assert resolved("load:0.9:60", mixes) == "poisson:9.000:60"
    assert resolved("poisson:4.3:60", []) == "poisson:4.3:60"
    with pytest.raises(SystemExit, match=r"load:0\.9:60: needs the mix before it"):
        resolved("load:0.9:60", [])


def test_what_others_use_of_the_machine_is_told_from_what_a_session_uses() -> None:
    """The same burning seen from its own session and from another's."""
    spin = "import time\nwhile time.process_time() < 0.4: pass"
    with (
        subprocess.Popen(["sleep", "60"], start_new_session=True) as sleeper,
        subprocess.Popen([sys.executable, "-c", spin], start_new_session=True) as burner,
    ):
        with CrowdTime(burner.pid) as own, CrowdTime(sleeper.pid) as other:
            os.waitid(os.P_PID, burner.pid, os.WEXITED | os.WNOWAIT)
        sleeper.kill()
    assert other.share > own.share


def test_an_answer_is_counted_by_what_it_says_of_itself() -> None:
    """Events that merge tokens, in chunks cut anywhere, as the three servers write them."""
    events: list[dict[str, object]] = [
        {"choices": [{"text": "a", "finish_reason": None}]},
        {"choices": [{"text": "bcd", "finish_reason": None}], "usage": {"completion_tokens": 4}},
        {"choices": [{"text": "", "finish_reason": None}], "timings": {"predicted_n": 6}},
        {"choices": [{"text": "", "finish_reason": "length"}], "usage": None},
    ]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
    raw = head + b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in lines) + b"0\r\n\r\n"
    for step in (1, 7, len(raw)):
        stream = Stream(0)
        gained = [stream.take(raw[at : at + step]) for at in range(0, len(raw), step)]
        assert (sum(gained), stream.tokens, stream.over) == (6, 6, True)
        assert step > 7 or [new for new in gained if new] == [1, 3, 2]
    with pytest.raises(ValueError, match="status 429"):
        Stream(0).take(b"HTTP/1.1 429 Too Many Requests\r\n\r\nlater")


def test_tables_hold_medians_and_say_what_was_disturbed() -> None:
    """GIVEN two pieces with our runs and another's, THEN one table, ours over the best."""
    told = {"side": "process", "precision": "int8", "perplexity": 1.0055, "ours": True}
    other = {"side": "process", "precision": "Q4_0", "perplexity": None, "ours": False}
    rates = {"a": [90.0, 120.0, 100.0], "b": [40.0, 50.0, 60.0]}
    latencies = {f"{kind}_p{share}_ms": 10.0 for kind in ("ttft", "itl") for share in (50, 95, 99)}
    runs = {
        name: [{"tok_s": rate, "lost": 0.05 if rate == 60 else 0.01} for rate in some]
        for name, some in rates.items()
    }
    arrived = {"a": [{"tok_s": 200.0, "lost": 0.0, "phase": "poisson:4.3:60"} | latencies]}
    pieces = [
        {"peers": {"a": told, "b": other}, "phases": {"single": runs}},
        {"peers": {"a": told}, "phases": {"poisson:4.3:60": arrived}},
    ]
    assert tables(pieces).splitlines() == [
        "| tokens a second | precision | perplexity | one stream | lost |",
        "|---|---|---|---|---|",
        "| a | int8 | 1.0055 | 100 (90 to 120) | 1.0 % |",
        "| b | Q4_0 |  | 50 (40 to 60) | 5.0 %; 1 of 3 over 4 % |",
        "| ours over the best other |  |  | 2.00 |  |",
        "",
        "Poisson arrivals for 60 s, 4.3 requests a second:",
        "",
        "|  | precision | perplexity | requests/s | TTFT p50 / p95 / p99, ms |"
        " ITL p50 / p95 / p99, ms | output tok/s | lost |",
        "|---|---|---|---|---|---|---|---|",
        "| a | int8 | 1.0055 | 4.30 | 10 / 10 / 10 | 10 / 10 / 10 | 200 | 0.0 % |",
    ]


def test_a_copy_in_another_type_holds_the_same_numbers(tmp_path: Path) -> None:
    source = tiny.write_gguf(tmp_path / "tiny.gguf")
    requantize("bf16", source, tmp_path / "copy.gguf")
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "copy.gguf")
    assert {*before.fields} - {*after.fields} == set()
    for old, new in zip(before.tensors, after.tensors, strict=True):
        kind = (
            gguf.GGMLQuantizationType.F32 if len(old.shape) == 1 else gguf.GGMLQuantizationType.BF16
        )
        assert (new.name, new.tensor_type) == (old.name, kind)
        values = [gguf.quants.dequantize(one.data, one.tensor_type) for one in (old, new)]
        np.testing.assert_allclose(*values, rtol=2**-8)
