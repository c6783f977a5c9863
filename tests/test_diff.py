"""A comparison finds what changed and nothing else: A against A is quiet, what is planted is named.

Owns the proofs of telemetry/bootstrap.py, sides.py and diff.py and of `iterscope diff`, on runs of
the real core with a noisy device (tests/noisy_runs.py). The proof over 20 seeds is marked soak.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.cli import main
from telemetry.bootstrap import BUCKET, Histogram, estimate, half_width, ratio, students_t
from telemetry.diff import Diff, compare
from telemetry.records import Delivery, Iteration, Record, RequestCause, RequestEnd, RequestStart
from telemetry.sides import Side, read_side
from telemetry.spans import TimeRange, spans_of
from tests import samples
from tests.noisy_runs import Costs, noisy_run
from tests.recordings import asking, placed, write_file

Make = Callable[..., tuple[list[Record], Side]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a maker of noisy runs, each made once."""
    folder = tmp_path_factory.mktemp("runs")
    known: dict[str, tuple[list[Record], Side]] = {}

    def make(seed: int, **options: Any) -> tuple[list[Record], Side]:
        key = f"{seed} {options}"
        if key not in known:
            records = noisy_run(seed, **({"requests": 400} | options))
            path = write_file(folder / f"{len(known)}.duckdb", placed(records, f"run-{seed}"))
            ask = asking(path)
            known[key] = records, read_side(ask, spans_of(ask, TimeRange()))
        return known[key]

    return make


# ---- figures


def test_student_s_t_is_that_of_the_tables() -> None:
    for probability, freedom, value in (
        (0.975, 19, 2.0930),
        (0.999, 19, 3.5794),
        (0.9995, 9, 4.7809),
        (0.9995, 7, 5.4079),
        (0.999, 3, 10.2145),
        (0.975, 2, 4.3027),
    ):
        assert students_t(probability, freedom) == pytest.approx(value, rel=0.003)


def test_the_error_of_a_mean_is_that_of_the_textbook() -> None:
    values = np.random.default_rng(1).normal(10, 2, size=40)
    found = estimate(ratio(values, np.ones(40)), 40)
    assert found.value == pytest.approx(values.mean())
    textbook = values.std(ddof=1) / math.sqrt(40)
    assert 0.92 * textbook < found.error < 1.3 * textbook, "nothing ties these blocks together"
    assert half_width(found, found, confidence=0.95, comparisons=1) == pytest.approx(
        students_t(0.975, 39) * found.error * math.sqrt(2)
    )


def test_blocks_that_resemble_their_neighbours_tell_less() -> None:
    pick = np.random.default_rng(3)
    shaken = pick.normal(10, 1, size=20)
    drifting = 10 + np.sort(pick.normal(0, 1, size=20))
    alone, drift = (estimate(ratio(values, np.ones(20)), 20) for values in (shaken, drifting))
    assert alone.error < 1.4 * shaken.std() / math.sqrt(20)
    assert drift.error > 1.6 * drifting.std() / math.sqrt(20)


def test_quantiles_of_a_histogram_are_within_a_bucket_s_width() -> None:
    values = np.random.default_rng(2).lognormal(16, 1, size=5000)
    values[:100] = 0
    buckets = np.floor(np.log(np.maximum(values, 1)) / BUCKET).astype(int)
    first = buckets[values > 0].min()
    counts = np.zeros((1, buckets.max() - first + 2))
    for value, bucket in zip(values, buckets, strict=True):
        counts[0, bucket - first + 1 if value else 0] += 1
    histogram = Histogram(counts, int(first))
    for probability in (0.01, 0.5, 0.9, 0.99):
        found = histogram.quantile(probability)(np.ones((1, 1)))[0]
        assert found == pytest.approx(np.quantile(values, probability), rel=0.006)
    assert np.isnan(Histogram(np.zeros((1, 2)), 0).quantile(0.5)(np.ones((1, 1)))[0])


def gaps_of(records: list[Record]) -> list[int]:
    """Compute the gaps between a request's tokens by walking through its steps."""
    prompts = {r.request: r.prompt_tokens for r in records if isinstance(r, RequestStart)}
    reached: dict[int, int] = {}
    last: dict[int, int] = {}
    gaps = []
    for step in (r for r in records if isinstance(r, Iteration)):
        for request, start, count in zip(
            step.requests, step.start_positions, step.token_counts, strict=True
        ):
            if start + count >= prompts[request] and start + count > reached.get(request, 0):
                if request in last:
                    gaps.append(step.end_at_ns - last[request])
                last[request] = step.end_at_ns
            reached[request] = max(reached.get(request, 0), start + count)
    return gaps


def test_a_side_says_what_its_records_say(made: Make) -> None:
    records, side = made(4, kv_blocks=90)
    ends = [r for r in records if isinstance(r, RequestEnd)]
    steps = [r for r in records if isinstance(r, Iteration) and r.requests]
    writes = {r.request: r for r in records if isinstance(r, Delivery)}
    assert any(step.preempted for step in steps), "the run is to have some"
    assert side.requests.sum() == side.explained.sum() == len(ends)
    assert side.outputs.sum() == sum(end.output_tokens for end in ends)
    assert side.device_ns.sum() == sum(step.device_ns for step in steps)
    assert side.work[:, 2].sum() == sum(step.decode_tokens for step in steps)
    assert side.causes.sum() == sum(r.ns for r in records if isinstance(r, RequestCause))
    gaps = gaps_of(records)
    assert side.histograms["itl"].total == len(gaps)
    for name, values in (
        ("itl", gaps),
        ("ttft", [(writes[e.request].first_write_at_ns or 0) - e.received_at_ns for e in ends]),
        ("e2e", [(writes[e.request].last_write_at_ns or 0) - e.received_at_ns for e in ends]),
        ("queue", [(e.admitted_at_ns or 0) - e.arrived_at_ns for e in ends]),
    ):
        histogram = side.histograms[name]
        for probability in (0.5, 0.9):
            found = histogram.quantile(probability)(np.ones((1, side.blocks)))[0]
            assert found == pytest.approx(np.quantile(values, probability), rel=0.02, abs=1), name


def test_causes_that_are_not_on_record_are_folded_from_the_steps(
    made: Make, tmp_path: Path
) -> None:
    records, side = made(1)
    without = [r for r in records if not isinstance(r, RequestCause) or r.request > 100]
    ask = asking(write_file(tmp_path / "old.duckdb", placed(without, "run-1")), rows_max=500)
    old = read_side(ask, spans_of(ask, TimeRange()))
    assert np.array_equal(old.explained, side.explained)
    assert np.array_equal(old.outputs, side.outputs)
    assert np.array_equal(old.causes, side.causes)


# ---- verdicts


def changed(diff: Diff) -> dict[str, str]:
    every = (*diff.figures, *diff.causes)
    return {c.name: c.verdict for c in every if c.verdict in ("better", "worse")}


def test_a_run_against_itself_is_the_same_to_the_last_figure(made: Make) -> None:
    _, side = made(1)
    diff = compare(side, side)
    assert not diff.significant
    assert {change.delta for change in (*diff.figures, diff.request, *diff.causes)} == {0.0}
    assert diff.settings == []


def test_a_against_a_finds_nothing(made: Make) -> None:
    assert changed(compare(made(1)[1], made(2)[1])) == {}


def test_the_waterfall_sums_to_the_whole_change(made: Make) -> None:
    diff = compare(made(1)[1], made(3, costs=Costs(decode=4e5), kv_blocks=90)[1])
    parts = (*diff.causes, diff.workload)
    assert sum(change.delta for change in parts) == pytest.approx(diff.request.delta)
    assert sum(change.a for change in parts) == pytest.approx(diff.request.a)
    assert sum(change.b for change in parts) == pytest.approx(diff.request.b)


PLANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "a slower device": ("own_decode", {"costs": Costs(fixed=Costs.fixed * 1.3)}),
    "a slower host": ("scheduler", {"costs": Costs(host=Costs.host + 2e6)}),
    "too few slots": ("queue_seqs", {"max_num_seqs": 10}),
    "too little memory": ("queue_kv", {"kv_blocks": 90}),
    "long prompts beside": ("neighbour_prefill", {"costs": Costs(prefill=Costs.prefill * 3)}),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_was_planted_is_found_and_named_first(made: Make, what: str) -> None:
    cause, options = PLANTED[what]
    diff = compare(made(1)[1], made(4, **options)[1])
    assert diff.worse
    assert diff.causes[0].name == cause, changed(diff)
    assert diff.causes[0].verdict == "worse"


def test_what_got_better_is_not_worse(made: Make) -> None:
    back = compare(made(4, max_num_seqs=10)[1], made(1)[1])
    assert back.significant
    assert not back.worse


def test_settings_that_differ_are_told_and_no_others(made: Make) -> None:
    diff = compare(made(1)[1], made(4, max_num_seqs=10)[1])
    assert [(s.name, s.a, s.b) for s in diff.settings] == [("config.max_num_seqs", [48], [10])]


def test_too_little_is_not_judged(made: Make) -> None:
    _, side = made(5, requests=12)
    diff = compare(side, side)
    percentiles = [change for change in diff.figures if " p" in change.name]
    assert {c.verdict for c in percentiles if c.name != "itl p50"} == {"unknown"}


# ---- the command


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a history's file of three runs, the last of them slower."""
    slow = Costs(fixed=Costs.fixed * 1.5)
    runs = [
        placed(
            noisy_run(seed, requests=200, **({"costs": slow} if seed == 3 else {})), f"run-{seed}"
        )
        for seed in (1, 2, 3)
    ]
    hours = (0, 1, 2)
    for hour, run in zip(hours, runs, strict=True):
        moved = samples.run(started_unix_us=1_796_000_000_000_000 + hour * 3_600_000_000)
        run[0] = placed([moved], run[0].run_id)[0]
    return write_file(tmp_path_factory.mktemp("diff") / "three.duckdb", *runs)


def test_the_command_compares_runs_windows_and_files(file: Path, capsys: Any) -> None:
    at = ("--file", str(file))
    window = "2026-11-30T00:53:20/2026-11-30T01:00:00"
    for a, b, code in (
        ("previous", "last", 1),
        ("run-2", "run-3", 1),
        ("run-3", "run-2", 0),
        (window, "1h/now", 1),
        (str(file), str(file), 0),
    ):
        assert main(["diff", a, b, *at]) == code, (a, b)
        told = capsys.readouterr().out
        assert ("B is worse than A" in told) == (code == 1)
        assert "own_decode" in told
    assert main(["diff", "run-2", "run-3", *at, "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["worse"] is True
    assert body["diff"]["causes"][0]["name"] == "own_decode"
    assert "run-3 from 2026-11-30 02:53:20.000Z" in body["b"]


def test_the_command_refuses_what_is_not_there(file: Path, capsys: Any) -> None:
    for code, expected, a in (
        (2, "several runs begin with 'run'", "run"),
        (2, "neither a file nor a run 'x'", "x"),
        (2, "no instant", "yesterday/now"),
        (2, "before it begins", "1h/2h"),
        (2, "newest record", "2036-01-01/2036-01-02"),
    ):
        assert main(["diff", a, "last", "--file", str(file)]) == code
        assert expected in capsys.readouterr().err
    assert main(["diff", "last", "last", "--file", "nowhere.duckdb"]) == 1


def test_one_run_has_no_previous(tmp_path: Path, capsys: Any) -> None:
    path = write_file(tmp_path / "one.duckdb", placed(noisy_run(1, requests=5), "run-1"))
    assert main(["diff", "previous", "last", "--file", str(path)]) == 2
    assert "there is no 'previous' run; on record is only run-1" in capsys.readouterr().err


# ---- the long proof


@pytest.mark.soak
def test_twenty_runs_against_their_like_and_twenty_planted(made: Make, capsys: Any) -> None:
    """At most 3 of 20 A against A, at least 18 of 20 slowdowns of 10 %, the right cause first."""
    slow = {"costs": Costs(fixed=Costs.fixed * 1.13)}
    false, found, named, slower = 0, 0, 0, list[float]()
    for seed in range(0, 2000, 100):
        before = made(seed, requests=1800)[1]
        false += compare(before, made(seed + 1, requests=1800)[1]).significant
        diff = compare(before, made(seed + 2, requests=1800, traffic=seed, **slow)[1])
        found += diff.worse
        named += diff.worse and diff.causes[0].name == "own_decode"
        slower.append(diff.request.delta / diff.request.a)
    with capsys.disabled():
        told = f"A against A: {false} of 20 significant; planted: {found} found, {named} named"
        sys.stdout.write(f"\n{told}; a request took {np.mean(slower):.1%} longer\n")
    assert false <= 3
    assert found >= 18
    assert named >= 18
    assert 0.08 < np.mean(slower) < 0.13
