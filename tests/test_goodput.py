"""Tokens against their deadlines, sequences against their objectives, gaps, tokens computed anew.

Owns the proofs of telemetry/objective.py, fold_objectives.py and fold_tokens.py: real histories of
the core, with preemptions, cancels and passed over rows, are counted here token by token, the slow
way, and must come to the same.
"""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.bus import Bus
from telemetry.metrics import Metrics
from telemetry.objective import Due, due_of
from telemetry.records import Iteration, Record, RequestEnd, RequestStart
from tests import samples
from tests.recordings import published
from tests.simulation import Simulation
from tests.test_metrics import Scrape

MS = 1_000_000
OBJECTIVE = Due(30 * MS, 3 * MS)


def scraped(records: list[Record], *, objective: Due = OBJECTIVE, each: bool = False) -> Scrape:
    """Fold records, at once or with a scrape between any two, and return the last scrape."""
    bus = Bus(run_id="r", capacity=10_000)
    metrics = Metrics(bus=bus, model_name="tiny", objective=objective, vllm_aliases=False)
    for record in records:
        bus.publish(record)
        if each:
            metrics.exposition()
    return Scrape(metrics)


@dataclass
class Counted:
    """A history, gone through token by token."""

    gaps_ns: list[int] = field(default_factory=list)
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    recomputed: int = 0


def counted(records: list[Record]) -> Counted:
    found = Counted()
    starts: dict[int, RequestStart] = {}
    at_ns: dict[int, list[int]] = defaultdict(list)
    highest: Counter[int] = Counter()
    for record in records:
        if isinstance(record, RequestStart):
            starts[record.request] = record
        elif isinstance(record, Iteration):
            for request, first, count in zip(
                record.requests, record.start_positions, record.token_counts, strict=True
            ):
                found.recomputed += max(0, min(first + count, highest[request]) - first)
                if first + count > highest[request]:
                    highest[request] = first + count
                    if first + count >= starts[request].prompt_tokens:
                        at_ns[request].append(record.end_at_ns)
        elif isinstance(record, RequestEnd):
            judge(found, starts[record.request], record, at_ns[record.request])
    for instants in at_ns.values():
        found.gaps_ns += [b - a for a, b in pairwise(instants)]
    return found


def judge(found: Counted, start: RequestStart, end: RequestEnd, at_ns: list[int]) -> None:
    due = due_of(start, OBJECTIVE)
    late = False
    for index, instant in enumerate(at_ns):
        missed = instant > start.arrived_at_ns + due.ttft_ns + index * due.tpot_ns
        found.tokens[due.of_class, "missed" if missed else "met"] += 1
        late |= missed
    overdue = (
        end.decided_at_ns > start.arrived_at_ns + due.ttft_ns + end.output_tokens * due.tpot_ns
    )
    if end.finish in ("stop", "length"):
        found.requests[due.of_class, "missed" if late else "met"] += 1
    elif end.cancel_cause not in ("client", "api"):
        found.requests[due.of_class, "dropped"] += 1
    elif late or overdue:
        found.requests[due.of_class, "missed"] += 1


SLOS = (None, None, None, '{"ttft_ms": 5}', '{"tpot_ms": 50}', '{"ttft_ms": 900, "tpot_ms": 1}')


def played(seed: int, depth: int) -> list[Record]:
    """Return the records of a run with pressure, cancels and objectives of all classes."""
    play = random.Random(seed)
    own = play.random() < 0.5
    simulated = Simulation(depth=depth, kv_blocks=play.choice((5, 8, 16)), max_num_seqs=4)
    for number in range(14):
        simulated.add(
            chr(97 + number),
            play.randint(1, 40),
            play.randint(1, 30),
            slo=play.choice(SLOS) if own else None,
        )
        if play.random() < 0.7:
            simulated.step(play.randint(0, 12))
        if play.random() < 0.15:
            live = {chr(96 + one) for one in range(1, number + 2)}
            simulated.cancel(play.choice(sorted(live)))
    simulated.drain()
    return published(simulated.emitted)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([1, 2]), each=st.booleans())
def test_what_is_folded_is_what_token_by_token_comes_to(seed: int, depth: int, each: bool) -> None:
    records = played(seed, depth)
    truth, scrape = counted(records), scraped(records, each=each)
    name = "iterscope_inter_token_latency_seconds"
    assert scrape(f"{name}_count") == len(truth.gaps_ns)
    assert scrape(f"{name}_sum") == pytest.approx(sum(truth.gaps_ns) / 1e9)
    assert scrape("iterscope_recomputed_tokens_total") == truth.recomputed
    for of_class in ("default", "tighter", "looser"):
        for outcome in ("met", "missed", "dropped"):
            labels = {"class": of_class, "outcome": outcome}
            found = scrape("iterscope_slo_requests_total", **labels)
            assert found == truth.requests[of_class, outcome], labels
            if outcome != "dropped":
                found = scrape("iterscope_slo_tokens_total", **labels)
                assert found == truth.tokens[of_class, outcome], labels


def test_the_histories_have_what_the_rule_is_about() -> None:
    """Late tokens, tokens in time, recomputation and all outcomes occur in what is played."""
    truths = [counted(played(seed, depth=1)) for seed in range(6)]
    requests: Counter[tuple[str, str]] = sum((truth.requests for truth in truths), Counter())
    tokens: Counter[tuple[str, str]] = sum((truth.tokens for truth in truths), Counter())
    for of_class in ("default", "tighter", "looser"):
        assert requests[of_class, "met"]
        assert requests[of_class, "missed"]
        assert tokens[of_class, "missed"]
    assert sum(truth.recomputed for truth in truths) > 20


def test_recomputed_tokens_are_those_that_ends_tell() -> None:
    simulated = Simulation(kv_blocks=5)
    for name in "abcd":
        simulated.add(name, 20, 30)
    simulated.drain()
    lost = sum(end.recomputed_tokens for end in simulated.emitted.ends)
    assert lost
    assert scraped(published(simulated.emitted))("iterscope_recomputed_tokens_total") == lost


def ended(request: int, **changed: Any) -> list[Record]:
    """Return a sequence that arrived at 0 and got its tokens at 10, 20, 30 ms."""
    steps: list[Record] = [
        samples.iteration(
            index + 1,
            [request],
            start_positions=[0 if index == 0 else 7 + index],
            token_counts=[8 if index == 0 else 1],
            prefill_tokens=8 * (index == 0),
            decode_tokens=int(index > 0),
            admitted=[request] if index == 0 else [],
            begin_at_ns=10 * index * MS,
            end_at_ns=10 * (index + 1) * MS,
        )
        for index in range(3)
    ]
    times = {"arrived_at_ns": 0, "first_token_at_ns": 10 * MS, "decided_at_ns": 30 * MS}
    end = samples.end(request, **({**times, "output_tokens": 3} | changed))
    return [samples.run(), samples.start(request, arrived_at_ns=0), *steps, end]


@pytest.mark.parametrize(
    ("objective", "changed", "outcome", "met"),
    [
        (Due(10 * MS, 10 * MS), {}, "met", 3),
        (Due(9 * MS, 100 * MS), {}, "missed", 2),
        (Due(15 * MS, 5 * MS), {}, "missed", 2),
        (Due(10 * MS, 10 * MS), {"finish": "error"}, "dropped", 3),
        (Due(10 * MS, 10 * MS), {"finish": "cancelled", "cancel_cause": "stall"}, "dropped", 3),
        (Due(10 * MS, 10 * MS), {"finish": "cancelled", "cancel_cause": "deadline"}, "dropped", 3),
        (Due(10 * MS, 10 * MS), {"finish": "cancelled", "cancel_cause": "client"}, None, 3),
        (
            Due(10 * MS, 10 * MS),
            {"finish": "cancelled", "cancel_cause": "client", "decided_at_ns": 41 * MS},
            "missed",
            3,
        ),
        (Due(9 * MS, 9 * MS), {"finish": "cancelled", "cancel_cause": "api"}, "missed", 0),
    ],
)
def test_a_deadline_a_token_and_drops_are_misses(
    objective: Due, changed: dict[str, Any], outcome: str | None, met: int
) -> None:
    scrape = scraped(ended(1, **changed), objective=objective)
    assert scrape("iterscope_slo_tokens_total", outcome="met") == met
    assert scrape("iterscope_slo_tokens_total") == 3
    judged = {one: scrape("iterscope_slo_requests_total", outcome=one) for one in OUTCOMES}
    assert judged == {one: float(one == outcome) for one in OUTCOMES}


OUTCOMES = ("met", "missed", "dropped")


def test_refusals_by_overload_are_drops_and_others_are_not() -> None:
    reasons = ("queue_full", "engine_down", "tenant_limit", "draining")
    scrape = scraped([samples.rejection(reason=reason) for reason in reasons])
    assert scrape("iterscope_slo_requests_total", outcome="dropped") == 2


def test_an_objective_of_its_own_has_its_class() -> None:
    default = Due(100 * MS, 10 * MS)
    for slo, of_class, ttft_ms in (
        (None, "default", 100),
        ('{"ttft_ms": 50}', "tighter", 50),
        ('{"ttft_ms": 500, "tpot_ms": 9.5}', "tighter", 500),
        ('{"ttft_ms": 500}', "looser", 500),
        ("{broken", "default", 100),
    ):
        due = due_of(samples.start(1, slo=slo), default)
        assert (due.of_class, due.ttft_ns) == (of_class, ttft_ms * MS)
