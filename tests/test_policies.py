"""Each policy's promise and its starvation bound, under a flood that would break a lesser one."""

from collections import Counter

import numpy as np
import pytest

from engine.config import POLICY_NAMES
from engine.policies import DECODE_WEIGHT, LATE_SHARE
from engine.step_model import FIRST_FITS, REFIT_STEPS, StepTimes, fit_non_negative
from tests.simulation import STEP_NS, Simulation


def tokens_by_tenant(simulation: Simulation) -> Counter[str]:
    tenants = {start.request: start.tenant for start in simulation.emitted.starts}
    found: Counter[str] = Counter()
    for record in simulation.emitted.iterations:
        for request, count in zip(record.requests, record.token_counts, strict=True):
            found[tenants[request]] += count
    return found


def admitted_at_step(simulation: Simulation, number: int) -> int:
    return next(
        record.step for record in simulation.emitted.iterations if number in record.admitted
    )


@pytest.mark.parametrize("policy", ["fcfs", "decode_first", "slo", "fair"])
def test_later_arrivals_of_the_same_kind_never_overtake(policy: str) -> None:
    """A flood behind it costs a waiting request nothing."""
    simulation = Simulation(scheduling_policy=policy, max_num_seqs=2, kv_blocks=32)
    for name in "AB":
        simulation.add(name, 8, 20)
    waiting = simulation.add("W", 8, 4)
    for turn in range(60):
        simulation.add(f"f{turn}", 4, 2)
        simulation.step()
    order = [number for record in simulation.emitted.iterations for number in record.admitted]
    assert order.index(waiting) == 2
    assert admitted_at_step(simulation, waiting) <= 21


def test_a_low_level_waits_at_most_its_levels_times_the_age() -> None:
    """priority: a flood of level 0 overtakes level 2 only for twice the age."""
    age_ms = 10
    simulation = Simulation(
        scheduling_policy="priority", max_num_seqs=1, kv_blocks=32, priority_age_ms=age_ms
    )
    simulation.add("A", 4, 2, priority=0)
    low = simulation.add("L", 4, 2, priority=2)
    arrived = simulation.clock.ns
    for turn in range(80):
        simulation.add(f"f{turn}", 4, 2, priority=0)
        simulation.step()
    step = admitted_at_step(simulation, low)
    record = simulation.emitted.iterations[step - 1]
    bound_ns = 2 * age_ms * 1_000_000
    assert record.begin_at_ns - arrived > bound_ns / 2, "the flood never overtook: no test"
    overtakers = [
        start
        for start in simulation.emitted.starts
        if start.request != low and start.arrived_at_ns > arrived + bound_ns
    ]
    early = {n for r in simulation.emitted.iterations[: step - 1] for n in r.admitted}
    assert early.isdisjoint(start.request for start in overtakers)


def test_a_chunk_gets_a_token_beside_as_many_decodes_as_there_are_slots() -> None:
    """decode_first: budget = slots leaves one token a step for the long prompt."""
    simulation = Simulation(max_num_seqs=4, max_num_batched_tokens=4, kv_blocks=32)
    for name in "ABC":
        simulation.add(name, 1, 60)
    simulation.step(3)
    simulation.add("P", 40, 2)
    simulation.step(44)
    (end,) = (end for end in simulation.emitted.ends if end.request_id == "req-P")
    assert end.output_tokens == 2


@pytest.mark.parametrize(("weights", "ratio"), [("", 1.0), ("loud=1,quiet=3", 3.0)])
def test_backlogged_tenants_are_served_by_their_weights(weights: str, ratio: float) -> None:
    """fair: ten times as many requests of one tenant buy it nothing."""
    simulation = Simulation(
        scheduling_policy="fair", max_num_seqs=2, kv_blocks=64, tenant_weights=weights
    )
    for number in range(200):
        simulation.add(f"l{number}", 16, 8, tenant="loud")
    for number in range(80):
        simulation.add(f"q{number}", 16, 8, tenant="quiet")
    simulation.step(300)
    served = tokens_by_tenant(simulation)
    assert served["quiet"] / served["loud"] == pytest.approx(ratio, rel=0.1)


def test_a_tenant_back_from_idle_gets_no_credit_for_its_absence() -> None:
    simulation = Simulation(scheduling_policy="fair", max_num_seqs=1, kv_blocks=64)
    for number in range(40):
        simulation.add(f"a{number}", 16, 8, tenant="a")
    simulation.step(100)
    before = tokens_by_tenant(simulation)["a"]
    for number in range(40):
        simulation.add(f"b{number}", 16, 8, tenant="b")
    simulation.step(150)
    served = tokens_by_tenant(simulation)
    assert served["a"] - before == pytest.approx(served["b"], rel=0.25)


def test_tenants_past_the_bound_share_one_line() -> None:
    simulation = Simulation(scheduling_policy="fair", max_num_seqs=4, kv_blocks=64, tenants_max=3)
    for number in range(30):
        simulation.add(f"t{number}", 4, 2, tenant=f"tenant-{number}")
    groups = {request.group for request in simulation.scheduler.roster.requests.values()}
    assert len(groups) == 4
    simulation.drain()
    assert len(simulation.emitted.ends) == 30


def test_slo_lets_the_urgent_one_pass() -> None:
    """A request with a short objective starts before an earlier one with a long one."""
    simulation = Simulation(scheduling_policy="slo", max_num_seqs=1, kv_blocks=32)
    simulation.add("A", 8, 6)
    patient = simulation.add("P", 8, 2, slo='{"ttft_ms": 10000}')
    urgent = simulation.add("U", 8, 2, slo='{"ttft_ms": 10}')
    simulation.drain()
    assert admitted_at_step(simulation, urgent) < admitted_at_step(simulation, patient)


def test_a_dependency_keeps_its_request_waiting_and_says_so() -> None:
    """The only dependency there is, is a test's own: nothing is admitted before it is ready."""
    ready: set[int] = set()
    simulation = Simulation(is_ready=lambda request: request.number in ready)
    number = simulation.add("A", 8, 2)
    simulation.step(3)
    assert {r.admission_stop for r in simulation.emitted.iterations} == {"dependency"}
    ready.add(number)
    simulation.drain()
    assert [end.finish for end in simulation.emitted.ends] == ["length"]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_policys_state_is_bounded_by_the_live_requests(policy: str) -> None:
    simulation = Simulation(scheduling_policy=policy, kv_blocks=64, tenants_max=8)
    for number in range(300):
        simulation.add(f"r{number}", 3, 2, tenant=f"tenant-{number}")
        simulation.step()
    simulation.drain()
    kept = [
        value
        for name, value in vars(simulation.scheduler.policy).items()
        if isinstance(value, dict) and name != "_weights"
    ]
    assert all(len(value) <= 17 for value in kept)


def test_the_step_model_finds_planted_coefficients() -> None:
    times = StepTimes()
    pick = np.random.default_rng(5)
    fitted = None
    for step in range(REFIT_STEPS * 3):
        prefill, decode = int(pick.integers(0, 300)), int(pick.integers(1, 64))
        context = int(pick.integers(100, 20_000))
        device_ns = round(2e6 + 9_000 * prefill + 40_000 * decode + 12 * context)
        fitted = (
            times.observe(
                step=step, prefill=prefill, decode=decode, context=context, device_ns=device_ns
            )
            or fitted
        )
    assert fitted is not None
    found = (fitted.fixed, fitted.p, fitted.d, fitted.c)
    assert found == pytest.approx((2e6, 9_000, 40_000, 12), rel=1e-3)
    assert fitted.error < 1e-3


def test_a_step_that_was_stopped_for_seconds_bends_no_coefficient() -> None:
    times = StepTimes()
    pick = np.random.default_rng(5)
    fitted = None
    for step in range(REFIT_STEPS * 2):
        prefill, decode = int(pick.integers(0, 300)), int(pick.integers(1, 64))
        device_ns = 2_000_000 + 9_000 * prefill + 40_000 * decode + 12 * 5_000
        if step % 150 == 70:
            device_ns += 7_000_000_000
        seen = times.observe(
            step=step, prefill=prefill, decode=decode, context=5_000, device_ns=device_ns
        )
        fitted = seen or fitted
    assert fitted is not None
    assert (fitted.p, fitted.d) == pytest.approx((9_000, 40_000), rel=1e-3)
    assert fitted.error < 1e-3


def test_steps_that_take_no_time_at_all_are_fitted_too() -> None:
    times = StepTimes()
    found = [
        times.observe(step=step, prefill=1, decode=1, context=9, device_ns=0)
        for step in range(FIRST_FITS[0])
    ]
    assert found[-1] is not None
    assert found[-1].error == 0


def test_no_coefficient_is_negative() -> None:
    """Steps that get cheaper with context must not make the model pay for it."""
    pick = np.random.default_rng(6)
    features = np.ones((500, 4))
    features[:, 1:] = pick.integers(1, 1000, (500, 3))
    targets = 1e6 + 500 * features[:, 1] - 300 * features[:, 3]
    assert fit_non_negative(features, targets).min() >= 0


def test_the_model_is_on_record_each_refit() -> None:
    simulation = Simulation(kv_blocks=64, max_num_seqs=8)
    for number in range(120):
        simulation.add(f"r{number}", 5 + number % 30, 30)
        simulation.step(4)
    simulation.drain()
    steps = sum(bool(record.requests) for record in simulation.emitted.iterations)
    assert len(simulation.emitted.step_models) == len(FIRST_FITS) + steps // REFIT_STEPS > 3
    assert simulation.emitted.step_models[-1].fixed == pytest.approx(STEP_NS, rel=0.05)


def test_slo_lets_the_hopeless_give_way_and_not_for_ever() -> None:
    """H is too late for its objective when its turn comes: one in LATE_SHARE admissions is its."""
    simulation = Simulation(scheduling_policy="slo", max_num_seqs=1, kv_blocks=32, ttft_ms=1000)
    simulation.add("A", 4, 8)
    simulation.step()
    hopeless = simulation.add("H", 4, 2, slo='{"ttft_ms": 2}')
    first = simulation.add("F", 4, 2)
    for turn in range(60):
        simulation.add(f"f{turn}", 4, 2)
        simulation.step()
    order = [number for record in simulation.emitted.iterations for number in record.admitted]
    assert order.index(first) == 1
    assert order.index(hopeless) == LATE_SHARE - 1


def test_slo_is_not_slowed_by_those_that_are_late_already() -> None:
    """A misses its pace whatever comes: B's prompt gets the whole budget, not a sixteenth."""
    simulation = Simulation(
        scheduling_policy="slo", max_num_batched_tokens=96, kv_blocks=64, max_model_len=512
    )
    for number in range(13):
        simulation.add(f"t{number}", 10 + 5 * number, 16)
        simulation.drain()
    late = simulation.add("A", 8, 60, slo='{"ttft_ms": 0.1, "tpot_ms": 0.1}')
    simulation.step(4)
    long = simulation.add("B", 200, 2)
    simulation.step()
    record = simulation.emitted.iterations[-1]
    rows = dict(zip(record.requests, record.token_counts, strict=True))
    assert rows == {late: 1, long: 95}


def test_fair_counts_a_decode_twice() -> None:
    """One tenant's prompt of 24 tokens weighs as much as another's 12 decodes."""
    simulation = Simulation(scheduling_policy="fair", max_num_seqs=2, kv_blocks=32)
    simulation.add("P", 24, 1, tenant="prompts")
    simulation.add("D", 1, 13, tenant="decodes")
    simulation.drain()
    policy = simulation.scheduler.policy
    prompts, decodes = policy.group_ranks(("prompts", "decodes"))
    assert prompts == 24
    assert decodes == 1 + 12 * DECODE_WEIGHT


def test_fair_outlives_lines_whose_tenants_it_has_forgotten() -> None:
    """Aborted ones stay in their heaps until they surface; by then nobody knows their tenant."""
    simulation = Simulation(scheduling_policy="fair", tenants_max=2, max_num_seqs=1, kv_blocks=32)
    simulation.add("running", 4, 40, tenant="busy")
    simulation.step()
    for number in range(12):
        simulation.add(f"gone{number}", 4, 4, tenant=f"tenant-{number}")
        simulation.cancel(f"gone{number}")
    waiting = [simulation.add(name, 4, 4, tenant=name) for name in ("one", "two")]
    simulation.drain()
    ends = {end.request: end.finish for end in simulation.emitted.ends}
    assert [ends[number] for number in waiting] == ["length", "length"]


def test_slo_gives_up_on_nobody_before_its_latest_start_is_past() -> None:
    simulation = Simulation(scheduling_policy="slo", max_num_seqs=1, kv_blocks=32, ttft_ms=5)
    number = simulation.add("A", 4, 2)
    request = simulation.scheduler.roster.requests[number]
    policy, latest_start_ns = simulation.scheduler.policy, request.rank[0]
    assert policy.regroup(request, latest_start_ns) == request.group
    assert policy.regroup(request, latest_start_ns + 1) != request.group


def test_a_prompt_that_fits_whole_is_none_of_the_partial_ones() -> None:
    """partial_prefills_max bounds those that leave tokens for later, not the short ones."""
    simulation = Simulation(
        partial_prefills_max=1, long_prefill_tokens=8, max_num_batched_tokens=32, kv_blocks=32
    )
    long = simulation.add("L", 40, 2)
    short = simulation.add("S", 8, 2)
    simulation.step()
    assert simulation.emitted.iterations[0].admitted == [long, short]
