"""The counters of a batch's rows: C++ and numpy agree on any batch, and either serves an engine."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import rows as engine_rows
from engine.rows import COLUMNS, IDS, NAMEABLE, NativeRows, NumpyRows, Rows, address_of
from engine.table import Table
from kernels import native
from kernels.native import NativeError
from tests.simulation import Simulation

BLOCK_TOKENS = 4
IDS_MAX = 40


def counters(pick: random.Random, slots: int) -> np.ndarray:
    """Return made-up counters whose relations are those of live sequences, or almost."""
    values = np.zeros((slots, len(COLUMNS)), dtype=np.int64)
    for slot in range(slots):
        prompt = pick.randint(1, 12)
        known = prompt + pick.randint(0, 9)
        planned = pick.randint(0, known)
        computed = pick.randint(0, planned)
        values[slot] = (
            *(pick.randint(0, 2), known, known - pick.randint(0, 1), planned, computed),
            *(pick.randint(computed, known), pick.choice((0, known - 1, known + 5)), prompt),
            *(pick.randint(0, 6) * BLOCK_TOKENS, pick.choice((2**62, 4, 8)), pick.randint(0, 99)),
            *(pick.randint(0, 1), pick.randint(0, 2), pick.randint(0, 50), 0),
        )
    return values


def passes(rows: Rows, values: np.ndarray, seed: int) -> list[object]:
    """Drive one batch through all three; return everything that was told and left behind."""
    pick = random.Random(seed)
    ids = np.full((len(values), IDS_MAX), -7, dtype=np.int32)
    values[:, IDS] = [address_of(row) for row in ids]
    slots = np.array(pick.sample(range(len(values)), pick.randint(1, len(values))))
    told: list[object] = [
        [part if isinstance(part, int) else part.tolist() for part in rows.outlook(values, slots)]
    ]
    counts = None
    if pick.random() < 0.6:
        counts = np.array([pick.randint(1, 5) for _ in slots])
    step = rows.reserve(values, slots, counts, BLOCK_TOKENS)
    told.append((step.columns.tolist(), step.samples.tolist(), step.sampled, step.decode_tokens))
    for slot in slots[: len(slots) // 3]:  # meanwhile some were preempted, or ended
        values[slot, pick.choice((0, 11))] += 1
    tokens = [pick.randint(0, 9) for _ in range(step.sampled)]
    landing = rows.land(
        values, step, tokens, np.array([3, 5][: pick.randint(0, 2)], dtype=np.int64)
    )
    told.append([part if isinstance(part, int) else part.tolist() for part in landing])
    return [*told, values[:, :IDS].tolist(), ids.tolist()]


@given(seed=st.integers(0, 2**32), slots=st.integers(1, 70))
@settings(max_examples=300, deadline=None)
def test_cpp_and_numpy_do_the_same(seed: int, slots: int) -> None:
    values = counters(random.Random(seed), slots)
    assert passes(NativeRows(native.library()), values.copy(), seed) == passes(
        NumpyRows(), values.copy(), seed
    )


def test_an_empty_batch_and_no_stops_are_nothing() -> None:
    for rows in (NativeRows(native.library()), NumpyRows()):
        values, none = counters(random.Random(1), 3), np.zeros(0, dtype=np.int64)
        before = values.copy()
        assert rows.outlook(values, none).chunks == 0
        step = rows.reserve(values, none, None, BLOCK_TOKENS)
        assert rows.land(values, step, [], none).computed == 0
        assert (values == before).all()


def test_numpy_serves_where_nothing_can_be_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same load ends with the same records, without a compiler."""
    records = []
    for compilers in (native.COMPILERS, ("no-such-compiler",)):
        native.library.cache_clear()
        monkeypatch.setattr(native, "COMPILERS", compilers)
        if compilers == ("no-such-compiler",):
            monkeypatch.setattr(native, "_folders", lambda: (tmp_path / "none",))
        simulation = Simulation(max_num_seqs=4, kv_blocks=24, max_num_batched_tokens=16)
        kind = type(simulation.scheduler.roster.table._rows)
        assert kind is (NumpyRows if "no-such-compiler" in compilers else NativeRows)
        for number in range(12):
            simulation.add(f"r{number}", 3 + 5 * number % 23, 2 + number % 7)
        simulation.drain()
        records.append(simulation.emitted.iterations)
    native.library.cache_clear()
    assert [one.requests for one in records[0]] == [one.requests for one in records[1]]
    assert [one.token_counts for one in records[0]] == [one.token_counts for one in records[1]]


def test_what_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = tmp_path / "cpu"
    shutil.copytree(native.SOURCES, sources, ignore=shutil.ignore_patterns("build"))
    (sources / "broken.cpp").write_text("int main( {")
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setattr(native, "_folders", lambda: (tmp_path / "build",))
    native.library.cache_clear()
    with pytest.raises(NativeError, match=r"broken\.cpp"):
        native.library()
    assert list((tmp_path / "build").iterdir()) == [], "a failed build leaves nothing behind"
    (tmp_path / "build").chmod(0o700)
    (sources / "broken.cpp").unlink()
    (tmp_path / "build" / "iterscope-old.so").write_bytes(b"")
    native.library()
    left = [path.name for path in (tmp_path / "build").iterdir()]
    assert len(left) == 1, "older builds go"
    assert left != ["iterscope-old.so"]
    native.library.cache_clear()


def test_a_damaged_library_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "_folders", lambda: (tmp_path,))
    native.library.cache_clear()
    native.library()
    (built,) = tmp_path.iterdir()
    damaged = tmp_path / "other"
    damaged.mkdir()
    (damaged / built.name).write_bytes(b"not a library")
    monkeypatch.setattr(native, "_folders", lambda: (damaged,))
    native.library.cache_clear()
    assert isinstance(engine_rows.fastest(), NumpyRows)
    native.library.cache_clear()


def test_a_table_grows_and_keeps_what_it_holds() -> None:
    table = Table(BLOCK_TOKENS)
    slots = [table.take(prompt=number + 1, limit=9, last=number) for number in range(200)]
    assert table.slots_used == 200
    assert [table.cells["prompt"][slot] for slot in slots] == list(range(1, 201))
    assert table.cells["nameable"][slots[7]] > 2**60 > NAMEABLE
