"""The line of those who wait: order by group and rank, and leaving it without being its head.

What the scheduler decides about the line is in test_scheduler.py and test_policies.py; here is the
structure alone: against the sorted list that it stands for, and over the real core's requests.
"""

import random
from types import SimpleNamespace
from typing import cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request
from engine.waiting import GAP_MAX, Ranks, WaitingLine
from tests.simulation import Simulation

GROUPS = ("a", "b", "c")


def waiting(number: int, group: str, rank: int) -> Request:
    """Return what the line reads of a sequence."""
    return cast(Request, SimpleNamespace(number=number, group=group, rank=(rank,)))


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(GROUPS), st.integers(0, 9))))
def test_the_head_is_the_least_by_group_rank_and_number(
    moves: list[tuple[int, str, int]],
) -> None:
    """After each arrival, departure of a head and departure from the middle."""
    line, present = WaitingLine(), dict[int, Request]()
    places = {"a": 2.0, "b": 1.0, "c": 1.0}

    def ranks(groups: tuple[str, ...]) -> Ranks:
        return np.array([places[group] for group in groups])

    for number, (kind, group, rank) in enumerate(moves):
        if kind < 3 or not present:
            present[number] = waiting(number, group, rank)
            line.push(present[number])
        elif kind == 3:
            line.remove(present.pop(sorted(present)[rank % len(present)]))
        else:
            head = line.head(ranks, {"b"}) or line.head(ranks)
            assert head is not None
            line.remove(present.pop(head.number))
        for skip in ((), ("a",), ("b", "c")):
            inside = [each for each in present.values() if each.group not in skip]
            least = min(
                inside, key=lambda each: (places[each.group], each.rank, each.number), default=None
            )
            assert line.head(ranks, skip) is least
        assert line.head() is min(
            present.values(), key=lambda each: (each.rank, each.number), default=None
        )
        assert len(line) == len(present)
        assert {each.number for each in line.requests()} == present.keys()


def test_those_who_went_are_not_kept() -> None:
    """Whether they leave from the front, the middle or the end, and a line of nobody is gone."""
    line = WaitingLine()
    present = [waiting(number, "a", number) for number in range(1000)]
    for request in present:
        line.push(request)
    pick = random.Random(1)
    while present:
        place = 0 if pick.random() < 0.7 else pick.randrange(len(present))
        line.remove(present.pop(place))
        for one in line._lines.values():
            assert len(one._entries) <= 2 * len(present) + GAP_MAX + 1
            assert [entry[2] for entry in one._entries[one._first :]] == present
            assert all(entry[2] is None for entry in one._entries[: one._first])
    assert not line._lines


def test_the_line_is_true_when_sequences_are_cancelled_in_it() -> None:
    """Over the real core: cancelled in any order, each is out at once."""
    simulation = Simulation(max_num_seqs=1, kv_blocks=64)
    simulation.add("A", 4, 100)
    simulation.step()
    numbers = [simulation.add(f"w{turn}", 4, 2) for turn in range(400)]
    line = simulation.scheduler.roster.waiting
    random.Random(1).shuffle(numbers)
    for left, number in enumerate(reversed(numbers[1:]), start=1):
        simulation.cancel(simulation.names[number])
        assert len(line) == len(numbers) - left == len(line.requests())
    simulation.drain()
    assert len(line) == 0
