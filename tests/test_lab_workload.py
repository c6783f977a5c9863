"""Workloads: the same seed the same file, exact counts, shared beginnings, and a record replayed.

GIVEN a recipe, WHEN a workload is made twice, written and read, THEN it is the same bit for bit;
and each source and arrival process keeps what it promises.
"""

import gzip
import json
from math import inf, nan
from pathlib import Path
from statistics import fmean, pvariance

import pytest

from bench.lab import arrivals
from bench.lab.make import TRACES, Recipe, make
from bench.lab.workload import Ask, Slo, Workload, WorkloadError, check, encode, read, write
from telemetry.records import Record
from tests import recordings, samples

SOURCES = ("synthetic", *TRACES, "gsm8k", "mt_bench")


@pytest.mark.parametrize("source", SOURCES)
def test_a_seed_makes_one_file(source: str, tmp_path: Path) -> None:
    recipe = Recipe(source=source, tenants=3, cancelled_share=0.5)
    made = [make(recipe, rate=4.0, seconds=10.0, seed=seed) for seed in (1, 1, 2)]
    assert encode(made[0]) == encode(made[1]) != encode(made[2])
    write(made[0], tmp_path / "w.json.gz")
    assert read(tmp_path / "w.json.gz") == made[0]
    check(made[0])
    assert len(made[0].asks) == 40
    assert made[0].asks[-1].at_s is not None
    assert made[0].asks[-1].at_s <= 10.0


@pytest.mark.parametrize("source", TRACES)
def test_lengths_of_a_trace_fit_the_context(source: str) -> None:
    made = make(Recipe(source=source, context_tokens=128), rate=20.0, seconds=10.0, seed=5)
    whole = [len(ask.prompt) + ask.max_tokens for ask in made.asks]
    assert max(whole) <= 128
    assert all(ask.prompt_tokens == len(ask.prompt) for ask in made.asks)
    assert made.scale < 1
    assert made.licence


def test_a_closed_loop_draws_from_all_of_a_sample() -> None:
    """Stretches of a trace differ; what a closed loop sends first must stand for the whole."""
    recipe = Recipe(source="azure-conv")
    whole = make(recipe, rate=None, seconds=1.0, seed=1)
    mean = fmean(ask.max_tokens for ask in whole.asks)
    for seed in range(3):
        made = make(recipe, rate=20.0, seconds=20.0, seed=seed, concurrency=4)
        assert {ask.at_s for ask in made.asks} == {None}
        assert fmean(ask.max_tokens for ask in made.asks) == pytest.approx(mean, rel=0.15)


def test_hash_ids_become_shared_beginnings() -> None:
    made = make(Recipe(source="mooncake", context_tokens=8192), rate=10.0, seconds=10.0, seed=1)
    prompts = [ask.prompt for ask in made.asks]
    heads = [tuple(prompt[:16]) for prompt in prompts]
    assert max(heads.count(head) for head in heads) > len(heads) / 2
    assert len({tuple(prompt) for prompt in prompts}) > len(prompts) / 2
    other = make(Recipe(source="synthetic"), rate=10.0, seconds=10.0, seed=1)
    assert len({tuple(ask.prompt[:8]) for ask in other.asks}) == len(other.asks)


def test_arrivals_keep_their_counts_and_their_kind() -> None:
    count, seconds = 400, 100.0
    chance = arrivals.poisson(count, seconds, 1)
    bursts = arrivals.bursts(count, seconds, 1)
    day = arrivals.diurnal(count, seconds, 1)
    for instants in (chance, bursts, day):
        assert len(instants) == count
        assert instants == sorted(instants)
        assert 0 <= instants[0] <= instants[-1] <= seconds

    def spread(instants: list[float]) -> float:
        """Return variance over mean of counts by second: 1 where chance alone reigns."""
        seen = [sum(int(at) == second for at in instants) for second in range(int(seconds))]
        return pvariance(seen) / (count / seconds)

    assert 0.6 < spread(chance) < 1.5
    assert spread(bursts) > 4
    noon = sum(seconds / 4 <= at < 3 * seconds / 4 for at in day)
    assert noon / count == pytest.approx(0.5 + 0.75 / 3.14159, abs=0.06)
    assert arrivals.replayed([5.0, 6.0, 9.0], 12.0) == [0.0, 2.0, 8.0]


def test_tenants_objectives_and_leaving_move_nothing_else() -> None:
    plain = make(Recipe(), rate=10.0, seconds=20.0, seed=1)
    fast, slow = Slo(100.0, 20.0), Slo(5000.0, 500.0)
    recipe = Recipe(tenants=2, classes=((0.25, fast), (0.5, slow)), cancelled_share=0.3)
    full = make(recipe, rate=10.0, seconds=20.0, seed=1)
    assert [ask.prompt for ask in full.asks] == [ask.prompt for ask in plain.asks]
    assert [ask.at_s for ask in full.asks] == [ask.at_s for ask in plain.asks]
    slos = [ask.slo for ask in full.asks]
    assert 25 < slos.count(fast) < 80
    assert 70 < slos.count(slow) < 130
    assert {ask.tenant for ask in full.asks} == {"tenant-1", "tenant-2"}
    assert 40 < sum(ask.leaves_after_s is not None for ask in full.asks) < 80


def record(folder: Path) -> Path:
    """Write a recording of three requests: one with a class, one cached in part, one that left."""
    records: list[Record] = [samples.run()]
    for number, prompt, cached, cause in (
        (1, 20, 0, None),
        (2, 30, 16, None),
        (3, 10, 0, "client"),
    ):
        at_ns = number * 1_000_000_000
        slo = '{"ttft_ms":300.0,"tpot_ms":30.0}' if number == 1 else None
        shared = {"prompt_tokens": prompt, "tenant": f"t-{number}", "parent_id": None}
        life = {"received_at_ns": at_ns, "cached_tokens": cached, "output_tokens": 8}
        leaving = {"cancel_cause": cause, "cancel_requested_at_ns": at_ns + 250_000_000}
        records.append(samples.start(number, arrived_at_ns=at_ns, max_tokens=40, slo=slo, **shared))
        records.append(samples.end(number, **life, **shared, **(leaving if cause else {})))
    return recordings.write_file(folder / "incident.iterscope", recordings.placed(records))


def test_an_incident_of_ours_is_lived_through_again(tmp_path: Path) -> None:
    recipe = Recipe(source=f"recorded:{record(tmp_path)}", context_tokens=1024)
    made = make(recipe, rate=1.0, seconds=3.0, seed=0)
    by_tenant = {ask.tenant: ask for ask in made.asks}
    assert set(by_tenant) == {"t-1", "t-2", "t-3"}
    first, second, third = (by_tenant[f"t-{number}"] for number in (1, 2, 3))
    assert (first.slo, first.prompt_tokens, first.max_tokens) == (Slo(300.0, 30.0), 20, 8)
    assert (second.prompt_tokens, second.slo) == (30, None)
    # Who left after a quarter of a second leaves so again, from an answer as long as it asked for.
    assert (third.leaves_after_s, third.max_tokens) == (0.25, 40)
    as_it_was = make(recipe, rate=None, seconds=1.0, seed=0)
    assert [ask.at_s for ask in as_it_was.asks] == [0.0, 1.0, 2.0]
    assert as_it_was.seconds == 3.0
    with pytest.raises(WorkloadError, match="rate"):
        make(Recipe(), rate=None, seconds=1.0, seed=0)


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (Recipe(source="nothing"), "workload"),
        (Recipe(arrivals="never"), "arrivals"),
        (Recipe(source="recorded:/nowhere"), "/nowhere"),
        (Recipe(arrivals="closed"), "concurrency"),
        (Recipe(context_tokens=15), "context"),
        (Recipe(context_tokens=10**9), "context"),
        (Recipe(ids_below=0), "ids-below"),
        (Recipe(tenants=0), "tenants"),
        (Recipe(tenants=10**9), "tenants"),
        (Recipe(cancelled_share=2.0), "cancelled"),
        (Recipe(cancelled_share=nan), "cancelled"),
        (Recipe(patience_s=0.0), "patience-s"),
        (Recipe(patience_s=inf), "patience-s"),
        (Recipe(classes=((0.7, Slo(1, 1)), (0.7, Slo(1, 1)))), "class"),
    ],
)
def test_what_cannot_be_made_is_named(recipe: Recipe, names: str) -> None:
    with pytest.raises(WorkloadError, match=names):
        make(recipe, rate=1.0, seconds=2.0, seed=1)


@pytest.mark.parametrize("rate", [0.0, -1.0, nan, inf, 1e9])
def test_no_rate_makes_more_than_a_file_holds(rate: float) -> None:
    with pytest.raises(WorkloadError, match="rate"):
        make(Recipe(), rate=rate, seconds=2.0, seed=1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, nan, inf, 1e6])
def test_seconds_are_within_a_day(seconds: float) -> None:
    with pytest.raises(WorkloadError, match="seconds"):
        make(Recipe(), rate=1.0, seconds=seconds, seed=1)


def test_a_bad_file_names_its_field(tmp_path: Path) -> None:
    good = Workload(
        name="w", source="s", licence="l", arrivals="a", seed=1, seconds=1.0,
        asks=[Ask(prompt=[1], max_tokens=1, at_s=0.5), Ask(prompt=[1], max_tokens=1, at_s=0.2)],
    )  # fmt: skip
    path = tmp_path / "w.json.gz"
    write(good, path)
    with pytest.raises(WorkloadError, match=r"asks\[1\]\.at_s"):
        read(path)
    content = json.loads(gzip.decompress(encode(good)))
    ask = content["asks"][0]
    for change, names in (
        ({"form": "other"}, "form"),
        ({"seconds": "long"}, "seconds"),
        ({"asks": []}, "asks"),
        ({"concurrency": 1, "think_s": -3.0}, "think_s"),
        ({"asks": [ask | {"prompt": []}]}, "prompt"),
        ({"asks": [ask | {"at_s": 500.0}]}, "at_s"),
        ({"asks": [ask | {"max_tokens": 10**30}]}, "max_tokens"),
        ({"asks": [ask | {"priority": 10**30}]}, "priority"),
        ({"asks": [ask | {"leaves_after_s": -1.0}]}, "leaves_after_s"),
        ({"asks": [ask | {"tenant": "a\r\nX-Other: b"}]}, "tenant"),
        ({"asks": [ask | {"slo": {"ttft_ms": -1, "tpot_ms": 1}}]}, "slo"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(WorkloadError, match=names):
            read(path)
    whole = encode(good)
    for broken in (b"\x1f\x8bbroken", whole[:-6] + b"\0" * 6, whole[:10] + b"\7" * 30, b""):
        path.write_bytes(broken)
        with pytest.raises(WorkloadError, match="no workload"):
            read(path)
