"""A few hundred bodies of the seeded fuzz; `python -m tests.fuzz` sends as many as one likes."""

from collections.abc import Iterator

import pytest

from tests import tiny
from tests.fuzz import FLAGS, fuzz
from tests.fuzz_bodies import Bodies
from tests.servers import Server, serving

GROWTH_MIB = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzz")
    with serving(folder, tiny.write(folder / "tiny"), *FLAGS) as running:
        yield running


def test_the_same_seed_draws_the_same_bodies() -> None:
    first, second = Bodies(7), Bodies(7)
    assert [first.next() for _ in range(50)] == [second.next() for _ in range(50)]


@pytest.mark.parametrize("count", [600, pytest.param(100_000, marks=pytest.mark.soak)])
def test_nothing_breaks_leaks_or_disturbs_a_neighbour(server: Server, count: int) -> None:
    found = fuzz(server, count, seed=20261130)
    assert found["wrong"] == []
    assert found["valid_share_answered"] >= 0.3
    assert found["healthy_streams"] > 0
    assert found["after"]["rss_mib"] - found["before"]["rss_mib"] < GROWTH_MIB
