"""A window costs what lies in it: queries skip what lies outside before they look into it.

Owns the proof by what DuckDB reads from the disk of a long record, which no busy machine can blur.
How fast post-mortems are on a day of records is measured elsewhere.
"""

import json
from pathlib import Path

import duckdb
import pytest

from telemetry.named import Bound, catalogue
from telemetry.schema import ddl
from tests import samples
from tests.sick_runs import DAY_US, FIRST_STARTED_UNIX_US

STEPS = 36_000
STEP_NS = 50_000_000
ROWS_A_GROUP = 2048
SHARE_MAX = 0.4
"""Of the bytes of all slices. Each query reads one column of every row to know where time ends."""

LISTS = ("requests", "start_positions", "token_counts", "kv_block_counts")


@pytest.fixture(scope="module")
def long_record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half an hour of steps in each of two lives of a server, with lists that do not pack."""
    path = tmp_path_factory.mktemp("long") / "long.duckdb"
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH '{path}' AS long (ROW_GROUP_SIZE {ROWS_A_GROUP})")
        connection.execute("USE long")
        for statement in ddl():
            connection.execute(statement)
        for day, run_id in enumerate(("earlier", "later")):
            run = samples.run(started_unix_us=FIRST_STARTED_UNIX_US + day * DAY_US)
            fields = [run_id, 1, 1, *(getattr(run, name) for name in run.__slots__)]
            places = ", ".join(["?"] * len(fields))
            connection.execute(f"INSERT INTO run VALUES ({places})", fields)
            connection.execute(
                f"INSERT INTO iteration SELECT '{run_id}', 1, i + 2, {', '.join(step_values())} "
                f"FROM range({STEPS}) t(i)"
            )
        connection.execute("CHECKPOINT")
    return path


def step_values() -> list[str]:
    """Return the columns of iteration i as SQL, twenty steps a second."""
    sample = samples.iteration(1, [1])
    chosen = {
        "step": "i + 1",
        "begin_at_ns": f"i * {STEP_NS}",
        "end_at_ns": f"(i + 1) * {STEP_NS}",
        **dict.fromkeys(LISTS, "[hash(i * 8 + j) % 1000000 for j in range(8)]"),
    }
    values = []
    for name in sample.__slots__:
        value = getattr(sample, name)
        plain = "NULL" if value is None else f"'{value}'" if isinstance(value, str) else value
        values.append(str(chosen.get(name, plain)))
    return values


def bytes_read(path: Path, bound: Bound) -> int:
    """Return what a query reads from the disk, asked of a file that nobody has read yet."""
    with duckdb.connect(path, read_only=True) as connection:
        asked = "EXPLAIN (ANALYZE, FORMAT json) " + bound.sql
        row = connection.execute(asked, bound.parameters).fetchone()
    assert row is not None
    read: int = json.loads(row[1])["io"]["total_bytes_read"]
    return read


@pytest.fixture(scope="module")
def all_slices(long_record: Path) -> int:
    sums = " + ".join(f"sum(list_sum({name}))" for name in LISTS)
    return bytes_read(long_record, Bound(sql=f"SELECT {sums} FROM iteration", parameters=[]))


@pytest.mark.parametrize("name", [query.name for query in catalogue().values() if query.windowed])
def test_a_query_does_not_read_what_lies_outside_its_window(
    long_record: Path, all_slices: int, name: str
) -> None:
    bound = catalogue()[name].bind({"last_s": 30})
    assert bytes_read(long_record, bound) < SHARE_MAX * all_slices


def test_the_measure_can_tell(long_record: Path, all_slices: int) -> None:
    whole = catalogue()["who_held_the_kv"].bind({"from_unix_us": 0})
    assert bytes_read(long_record, whole) > all_slices / 2 > 2**20
