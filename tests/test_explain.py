"""Every nanosecond of every request has a cause: each is planted once, and all lives sum exactly.

Owns the proof that the fold and the walk through the iterations come to the same figures, in every
mode, policy and loop depth, with cancels, failing steps, preemptions and lost iterations.
"""

import random
from collections import Counter

import pytest

from engine.config import BATCHING_MODES
from engine.messages import Abort
from telemetry.causes import MEANINGS
from telemetry.records import CAUSES, RequestEnd
from tests.lives import OUTPUT_NS, TOKENIZE_NS, TRAVEL_NS, Published, Told, published, walked
from tests.planted import PLANTS
from tests.simulation import Simulation
from tests.traffic import arrive, random_settings


def life_ns(emit: Published, end: RequestEnd) -> int:
    """Return how long a life was, from the server's own stamps."""
    delivery = emit.deliveries[end.request]
    assert delivery.last_write_at_ns is not None
    last = delivery.last_write_at_ns
    if end.finish in ("cancelled", "error"):
        last = max(last, end.freed_at_ns or 0)
    return last - delivery.received_at_ns


def assert_divided(emit: Published, told: Told) -> Counter[str]:
    """Hold every ended life to its length, and both ways of dividing it to each other."""
    seen: Counter[str] = Counter()
    for request, end in emit.ends.items():
        _, walk = walked(emit.bus, end.request_id)
        causes = walk.totals()
        assert told.causes[request] == causes, end.request_id
        assert sum(causes.values()) == life_ns(emit, end), end.request_id
        assert min(causes.values()) > 0, end.request_id
        seen.update(causes)
    assert told.fold.lives == 0
    return seen


def test_plants_and_meanings_are_the_closed_list() -> None:
    assert tuple(PLANTS) == CAUSES
    assert tuple(MEANINGS) == CAUSES


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named(cause: str) -> None:
    plant = PLANTS[cause]()
    case, walk = walked(plant.emit.bus, plant.request_id)
    told = Told(plant.emit.bus).advance()
    assert told.causes[case.start.request][cause] == walk.totals()[cause] > 0
    if plant.behind is not None:
        named = {case.names[request] for request in walk.named[cause]}
        assert plant.behind in named
    if cause != "unexplained":
        assert "unexplained" not in walk.totals()
    assert_divided(plant.emit, told)


def test_a_lone_life_in_figures() -> None:
    """One prefill of 8 tokens and two decodes on the fake device: 1 ms and 10 us a token."""
    emit = PLANTS["own_decode"]().emit
    _, walk = walked(emit.bus, "req-A")
    assert walk.totals() == {
        "tokenize": TOKENIZE_NS,
        "step_boundary": TRAVEL_NS,
        "own_prefill": 1_080_000,
        "own_decode": 2 * 1_010_000,
        "output": OUTPUT_NS,
    }
    assert len(walk.commits) == 3


def test_lost_iterations_are_unexplained_to_the_nanosecond() -> None:
    emit = PLANTS["unexplained"]().emit
    lost = [one for one in emit.iterations if one.step in (4, 5)]
    _, walk = walked(emit.bus, "req-A")
    gone = sum(one.end_at_ns - one.begin_at_ns for one in lost)
    assert walk.totals()["unexplained"] == gone


def traffic(seed: int, *, loss: float = 0.0, turns: int = 40) -> tuple[Published, Told]:
    """Drive a random engine through random traffic, its news on a bus."""
    pick = random.Random(seed)
    simulation, emit = published(**random_settings(pick))
    if loss:
        emit.loses = lambda iteration: pick.random() < loss
    told = Told(emit.bus)
    for _ in range(turns):
        one_turn(simulation, pick)
        if pick.random() < 0.1:
            told.advance()
    simulation.drain(limit=200_000)
    return emit, told.advance()


def one_turn(simulation: Simulation, pick: random.Random) -> None:
    for _ in range(pick.choice((0, 0, 1, 3))):
        arrive(simulation, pick)
    if pick.random() < 0.1 and simulation.names:
        number = pick.randrange(1, len(simulation.names) + 1)
        finish = pick.choice(("cancelled", "stop"))
        simulation.core.abort(Abort(request=number, finish=finish, delivered_tokens=1))
    simulation.clock.ns += pick.randrange(0, 3000)
    if pick.random() < 0.01:
        simulation.runner.fails = lambda plan: RuntimeError("planted")
    if simulation.core.has_work:
        simulation.step()
    simulation.runner.fails = lambda plan: None


def test_random_lives_sum_exactly_and_shares_are_the_device_time() -> None:
    seen: Counter[str] = Counter()
    modes: Counter[str] = Counter()
    for seed in range(10):
        emit, told = traffic(seed)
        seen.update(assert_divided(emit, told))
        modes.update(str(one.admission_stop) for one in emit.iterations)
        device_ns = sum(one.device_ns for one in emit.iterations)
        assert sum(share.device_ns for share in told.shares.values()) == device_ns
        assert all(share.kv_block_ns >= 0 for share in told.shares.values())
    assert "unexplained" not in seen
    assert {"batch_held", "recompute", "preempted_kv", "passed_over", "queue_kv"} <= seen.keys()


def test_random_lives_with_losses_sum_exactly_too() -> None:
    unexplained = 0
    for seed in range(4):
        emit, told = traffic(seed, loss=0.05)
        unexplained += assert_divided(emit, told)["unexplained"]
    assert unexplained


def test_a_fold_that_falls_behind_the_ring_tells_no_guess() -> None:
    """GIVEN a ring that is overwritten between turns, THEN what is told still sums exactly."""
    pick = random.Random(5)
    emit = Published(capacity=60)
    simulation = Simulation(emit=emit, max_num_seqs=6, kv_blocks=64, max_model_len=512)
    told = Told(emit.bus)
    for turn in range(400):
        if turn % 5 == 0:
            simulation.add(f"r{turn}", pick.randrange(1, 60), pick.randrange(5, 60))
        simulation.step()
        if turn % 31 == 0:
            told.advance()
    simulation.drain()
    told.advance()
    assert emit.bus.losses()["explain"] > 0
    assert told.fold.lives == 0
    unexplained = 0
    for request, causes in told.causes.items():
        assert sum(causes.values()) == life_ns(emit, emit.ends[request])
        assert min(causes.values()) > 0
        unexplained += causes.get("unexplained", 0)
    assert 0 < len(told.causes) < len(emit.ends)
    assert unexplained


def test_the_first_in_line_waits_for_those_that_run() -> None:
    """Nobody stands before it: the slots it lacks are A's and B's, named in equal parts."""
    simulation, emit = published(kv_blocks=32, max_num_seqs=2)
    for name in "AB":
        simulation.add(name, 8, 12)
    simulation.step()
    simulation.add("W", 8, 2)
    simulation.drain()
    case, life = walked(emit.bus, "req-W")
    held = life.named["queue_seqs"]
    assert {case.names[request] for request in held} == {"req-A", "req-B"}
    first, second = (one.ns for one in held.values())
    assert first == second == life.totals()["queue_seqs"] / 2


def test_a_client_that_leaves_long_before_its_answer_ends_lives_as_long_as_that() -> None:
    """Nobody aborted in time: its last write lies more steps back than the fold remembers."""
    simulation, emit = published(kv_blocks=32)
    emit.deliver = False
    simulation.add("A", 8, 40)
    simulation.drain()
    (end,) = emit.ends.values()
    third = emit.iterations[2].end_at_ns
    emit.publish_delivery(end, first_write_at_ns=third - 10, last_write_at_ns=third)
    told = Told(emit.bus).advance().causes[end.request]
    _, walk = walked(emit.bus, end.request_id)
    assert told == walk.totals()
    assert min(told.values()) > 0
    assert sum(told.values()) == (end.freed_at_ns or 0) - emit.deliveries[1].received_at_ns


@pytest.mark.parametrize("batching", BATCHING_MODES)
def test_loop_depth_2_in_every_mode(batching: str) -> None:
    simulation, emit = published(depth=2, batching=batching, kv_blocks=16)
    for number in range(9):
        simulation.add(f"r{number}", 8 + number, 3 + number % 4)
        simulation.step()
    simulation.drain()
    told = Told(emit.bus).advance()
    seen = assert_divided(emit, told)
    assert "unexplained" not in seen
    device_ns = sum(one.device_ns for one in emit.iterations)
    assert sum(share.device_ns for share in told.shares.values()) == device_ns


@pytest.mark.soak
def test_many_random_lives() -> None:
    lives = 0
    for seed in range(1000, 1120):
        emit, told = traffic(seed, loss=random.Random(seed).choice((0.0, 0.0, 0.03)), turns=120)
        assert_divided(emit, told)
        lives += len(emit.ends)
    assert lives > 10_000
