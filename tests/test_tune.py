"""`iterscope tune`: the search finds what is planted, claims nothing else, and runs on a server.

Owns the proof over a made-up machine whose best setting is known, of who was late by what, and one
real run over the tiny model. How good a setting is on a real machine is measured, never asserted.
"""

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.lab.make import Recipe
from bench.lab.tune import (
    Found,
    Measure,
    Setting,
    Trial,
    best_of,
    combined,
    is_better,
    is_possible,
    neighbours,
    proof,
    search,
)
from bench.lab.tune_reasons import binding, in_words, late_of
from bench.lab.tune_runs import Tuning, ground_of
from bench.lab.tune_told import lines, show, told
from bench.lab.workload import Slo
from server.cli import main
from tests import tiny

BASE = Setting(64, 512)
SLO = Slo(500.0, 40.0)
GROUND = {"rate_requests_s": 4.0, "notes": ["a note"]}


def machine(
    best: Setting, *, noise: float = 0.03, seed: int = 1
) -> Callable[[Setting, int], Trial]:
    """Return a made-up machine: each number that is not the best's costs a tenth of the goodput."""
    pick = random.Random(seed)

    def measure(setting: Setting, number: int) -> Trial:
        off = sum(
            getattr(setting, name) != getattr(best, name)
            for name in ("max_num_seqs", "max_num_batched_tokens", "long_prefill_tokens")
        )
        load = 1 + 0.1 * random.Random(number).random()  # what all settings of a round share
        share = min(1.0, max(0.0, 0.9 - 0.1 * off + pick.gauss(0, noise)))
        figures: dict[str, float | None] = {
            "goodput_share": share,
            "goodput_requests_s": 4 * share * load,
            "ttft_p99_ms": 400 + 100 * off,
            "tpot_p99_ms": 35.0,
        }
        late = round(20 * (1 - share))
        causes = {"queue_seqs": 80.0 * off, "own_prefill": 40.0, "neighbour_prefill": 20.0}
        return Trial(figures=figures, late_ttft=late, late_tpot=0, judged=20, causes=causes)

    return measure


def searched(measure: Measure, runs: int = 60) -> Found:
    """Return a search over so many runs; the machine's time is counted in them."""
    done = []

    def counted(setting: Setting, number: int) -> Trial | None:
        done.append(setting)
        return measure(setting, number)

    return search(Found(BASE, SLO), counted, lambda more: len(done) + more <= runs, most=8, seed=3)


def test_the_planted_setting_is_found_and_proved() -> None:
    best = replace(BASE, max_num_seqs=16, max_num_batched_tokens=256)
    found = searched(machine(best))
    assert found.best == best, "each number helps alone, and the search puts them together"
    assert is_better(found)
    against = proof(found)
    assert against.kind == "ratio"
    assert against.low is not None
    assert 1.0 < against.low < 0.9 / 0.7
    result = told(found, GROUND)
    assert json.loads(json.dumps(result)) == result
    assert result["set"] == ["--max-num-seqs", "16", "--max-num-batched-tokens", "256"]
    said = "\n".join(lines(result))
    assert "would set  --max-num-seqs 16 --max-num-batched-tokens 256" in said
    assert "a place in the batch: max_num_seqs is what holds them" in said
    assert "- a note" in said


def test_nothing_is_claimed_where_nothing_is_better() -> None:
    claimed = [
        is_better(searched(machine(BASE, noise=0.05, seed=seed), runs=40)) for seed in range(20)
    ]
    assert sum(claimed) <= 2
    result = told(searched(machine(BASE)), GROUND)
    assert result["set"] == list(BASE.flags)
    assert "is not better beyond chance" in "\n".join(lines(result))


def test_a_machine_that_is_not_quiet_is_told_of() -> None:
    unsteady = "\n".join(lines(told(searched(machine(BASE, noise=0.3)), GROUND)))
    assert "others use this machine" in unsteady
    assert "others use this machine" not in "\n".join(lines(told(searched(machine(BASE)), GROUND)))


def test_without_time_nothing_is_said() -> None:
    found = searched(machine(BASE), runs=0)
    assert found.out_of_time
    assert found.runs() == 0
    said = "\n".join(lines(told(found, GROUND)))
    assert "no search took place" in said
    assert "--minutes" in said
    short = searched(machine(BASE), runs=4)
    assert short.runs() == 4, "the base and as many others as there is time for"
    assert short.out_of_time
    assert "--minutes" in "\n".join(lines(told(short, GROUND)))
    raced = searched(machine(BASE), runs=9)
    assert raced.out_of_time
    assert "no round of proof took place" in "\n".join(lines(told(raced, GROUND)))


@pytest.mark.parametrize("runs", [0, 4, 20, 24])
def test_ctrl_c_ends_it_with_what_has_run(runs: int) -> None:
    left = [runs]
    measure = machine(replace(BASE, max_num_seqs=16))

    def stopped(setting: Setting, number: int) -> Trial | None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return measure(setting, number)

    found = search(Found(BASE, SLO), stopped, lambda _: True, most=8, seed=3)
    assert found.stopped
    assert found.runs() == runs
    said = "\n".join(lines(told(found, GROUND)))
    assert "stopped" in said
    assert "time was out" not in said
    assert (found.best is None) == (runs == 0)


def test_a_setting_that_no_server_takes_leaves_the_race() -> None:
    best = replace(BASE, max_num_seqs=32)
    on_any = machine(best)

    def measure(setting: Setting, number: int) -> Trial | None:
        return None if setting.max_num_seqs == 16 else on_any(setting, number)

    found = searched(measure)
    assert found.best == best
    assert not any(
        setting.max_num_seqs == 16 and rounds for setting, rounds in found.trials.items()
    )


def test_settings_that_are_tried_can_be_served_and_differ_in_one_number() -> None:
    for base in (BASE, Setting(1, 16), Setting(256, 256, 64), Setting(1024, 16384)):
        tried = neighbours(base)
        assert tried
        assert len(set(tried)) == len(tried)
        for one in tried:
            assert is_possible(one)
            assert sum(a != b for a, b in zip(one.flags, base.flags, strict=False)) <= 1
    assert not is_possible(Setting(64, 32))
    assert combined(Found(BASE, SLO)) is None


def test_latencies_decide_where_shares_are_alike() -> None:
    slow, fast = Setting(32, 512), Setting(16, 512)
    trial = machine(BASE, noise=0.0)(BASE, 0)
    figures: dict[str, float | None] = {"goodput_share": 1.0, "tpot_p99_ms": 10.0}
    found = Found(BASE, SLO)
    found.trials[slow] = {0: replace(trial, figures=figures | {"ttft_p99_ms": 450.0})}
    found.trials[fast] = {0: replace(trial, figures=figures | {"ttft_p99_ms": 90.0})}
    assert best_of(found, [slow, fast], 1) == [fast]


def ask(*tokens_ms: float, outcome: str = "finished") -> dict[str, object]:
    return {
        "scheduled_ns": 0,
        "ended_ns": int((tokens_ms[-1] if tokens_ms else 9000.0) * 1e6),
        "tokens_ns": [int(at_ms * 1e6) for at_ms in tokens_ms],
        "outcome": outcome,
        "slo": None,
    }


def test_who_is_late_is_late_by_the_first_token_or_by_a_later_one() -> None:
    load = {
        "asks": [
            ask(100, 130, 160),
            ask(600, 610),
            ask(100, 560),
            ask(outcome="unfinished"),
            ask(100, outcome="unfinished"),
            ask(100, outcome="left"),
        ]
    }
    assert late_of(load, SLO) == (2, 2, 5)


def test_what_binds_is_the_largest_cause_of_the_part_that_is_missed() -> None:
    trial = machine(BASE)(Setting(16, 512), 0)
    causes = {"queue_seqs": 10.0, "neighbour_prefill": 70.0, "neighbour_decode": 90.0}
    later = replace(trial, late_ttft=1, late_tpot=5, judged=20, causes=causes)
    found = binding([later])
    assert (found["slo"], found["cause"]) == ("tpot", "neighbour_decode")
    assert "6 of 20 requests were late, 5 of them by their tokens after the first" in in_words(
        found
    )
    calm = binding([replace(later, late_ttft=0, late_tpot=0)])
    assert (calm["slo"], calm["cause"]) == (None, None)
    assert in_words(calm) == "all 20 requests were in time: nothing binds at this rate"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--slo", "soon"], "--slo"),
        (["--slo", "ttft=1,tpot=1", "--minutes", "0"], "--minutes"),
        (["--slo", "ttft=1,tpot=1", "--rate", "-1"], "--rate"),
        (
            ["--slo", "ttft=1,tpot=1", "--max-num-seqs", "64", "--max-num-batched-tokens", "8"],
            "seqs",
        ),
        (["--slo", "ttft=1,tpot=1", "--workload", "/nowhere"], "/nowhere"),
        (["--slo", "ttft=1,tpot=1", "--context", "3"], "--context"),
        (["--slo", "ttft=1,tpot=1", "--flags", "--max-num-seqs 3"], "--max-num-seqs"),
    ],
)
def test_misuse_is_named(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *flags]) == 2
    assert named in capsys.readouterr().err


def test_a_search_over_the_tiny_model(tmp_path: Path) -> None:
    said: list[str] = []
    tuning = Tuning(
        folder=tmp_path / "runs",
        shared=("--model", str(tiny.write(tmp_path / "tiny")), "--kv-blocks", "256"),
        recipe=Recipe(source="synthetic", context_tokens=64, ids_below=300),
        slo=Slo(2000.0, 500.0),
        seed=5,
        deadline=time.monotonic() + 600,
        seconds=1.0,
        says=said.append,
        rate=12.0,
    )
    base = Setting(8, 64)
    found = search(
        Found(base, tuning.slo), tuning.trial, lambda _: tuning.starts < 2, most=1, seed=5
    )
    assert tuning.starts == found.runs() == 2
    assert not list((tmp_path / "runs").glob("server-*")), "histories are gone with their servers"
    assert len(said) == 2
    result = told(found, ground_of(tuning) | {"notes": []})
    assert result["best"]["max_num_seqs"] == 4
    for row in result["settings"]:
        (trial,) = row["trials"]
        assert trial["judged"] == 12
        assert trial["figures"]["goodput_share"] is not None
        assert trial["causes"]["own_decode"] > 0
    show(result, Console(quiet=True))
    broken = replace(base, max_num_batched_tokens=4)
    assert tuning.trial(broken, 1) is None
    assert str(broken) in tuning.notes[0]
