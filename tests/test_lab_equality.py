"""Where answers of two arms part, and what is known of it.

Owns the tests of bench/lab/equality.py that need no server; test_lab.py compares real arms.
"""

from typing import Any, cast

from bench.lab.equality import differences, judged
from bench.lab.serving import Served
from bench.lab.workload import Ask, Workload


def load(*answers: list[int]) -> dict[str, Any]:
    return {"asks": [{"number": at, "ids": ids} for at, ids in enumerate(answers)]}


def test_answers_part_at_the_first_token_that_differs() -> None:
    ours = load([1, 2, 3], [1, 9, 3], [], [4])
    compared, parted = differences(ours, load([1, 2, 3], [1, 2, 3], [7], [4, 5]))
    assert compared == 3
    assert parted == [{"request": 1, "at_token": 1, "tokens": [9, 2], "before": [1]}]


def test_what_nobody_asked_about_is_neither_allowed_nor_forbidden() -> None:
    _, parted = differences(load([1, 9]), load([1, 2]))
    asks = [Ask(prompt="a text has no token ids to go on from", max_tokens=2)]
    workload = Workload(
        name="w", source="s", licence="l", arrivals="closed", seed=1, seconds=1.0, asks=asks
    )
    (told,) = judged(cast(Served, None), workload, parted, "int8")
    assert (told["gap"], told["allowed"], told["tolerance"]) == (None, None, 1.0)
