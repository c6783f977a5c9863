"""The schema follows from the record: documents current, tables as declared, bodies as promised.

Owns the proofs of telemetry/schema.py and the rules that every field of a record keeps.
"""

import logging
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import msgspec
import pytest
from jsonschema import Draft202012Validator

from telemetry import schema
from telemetry.bus import KIND_NAMES, Bus
from telemetry.database import last_place
from telemetry.lost_ends import LOST_END
from telemetry.records import KINDS, Column, Record, RequestCause, RequestShare, columns
from telemetry.store import Store
from tests import samples

ROOT = Path(__file__).resolve().parent.parent

EVERY_KIND: tuple[Record, ...] = (
    samples.run(buckets=[1, 2, 4]),
    samples.start(1, external_id='it\'s "mine"\n', slo='{"ttft_ms": 5}'),
    samples.iteration(
        1,
        [1, 2, 3],
        admission_stop="kv",
        admission_blocker=4,
        admitted=[1],
        admitted_cached_tokens=[0],
        passed_over=[2],
        passed_over_reasons=["budget"],
        preempted=[5],
        preempted_causes=["kv"],
        preempted_blocks=[1],
        preempted_lost_tokens=[9],
        preempted_beneficiaries=[1],
    ),
    samples.end(1, finish="cancelled", cancel_cause="client"),
    samples.step_model(),
    samples.delivery(1, first_write_at_ns=None),
    RequestCause(request=1, cause="own_decode", ns=5, rule="counted"),
    RequestShare(request=1, device_ns=5, kv_block_ns=7, rule="fitted"),
    samples.rejection(retry_after_s=1.5),
    samples.fault(traceback="a\nb"),
)


def every_column() -> list[tuple[str, Column]]:
    return [(name, column) for name, _, items in schema.tables() for column in items]


@pytest.fixture
def database() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for statement in schema.ddl():
        connection.execute(statement)
    return connection


def test_schema_document_is_current() -> None:
    command = [sys.executable, "-m", "telemetry.schema"]
    printed = subprocess.check_output(command, cwd=ROOT, text=True, timeout=60)
    assert (ROOT / "SCHEMA.md").read_text(encoding="utf-8") == printed, (
        "run: python -m telemetry.schema > SCHEMA.md"
    )


def test_every_kind_has_a_sample() -> None:
    assert [KIND_NAMES[type(record)] for record in EVERY_KIND] == list(KINDS)


def test_names_say_their_unit() -> None:
    for table, column in every_column():
        place = f"{table}.{column.name}"
        assert column.doc.text, place
        for ending, unit in (("_ns", "ns"), ("_us", "us"), ("_s", "s"), ("_bytes", "bytes")):
            if column.name.endswith(ending):
                assert unit in column.doc.unit, place


def test_names_that_sql_reserves_are_known(database: duckdb.DuckDBPyConnection) -> None:
    reserved = database.execute(
        "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category = 'reserved'"
    ).fetchall()
    names = {column.name for _, column in every_column()}
    assert names & {word for (word,) in reserved} == schema.RESERVED


def test_tables_carry_types_nulls_and_comments(database: duckdb.DuckDBPyConnection) -> None:
    found = {
        (table, column): (kind, nullable, comment)
        for table, column, kind, nullable, comment in database.execute(
            "SELECT table_name, column_name, data_type, is_nullable, comment FROM duckdb_columns()"
            " WHERE NOT internal"
        ).fetchall()
    }
    for table, column in every_column():
        kind, nullable, comment = found[table, column.name]
        of = schema.shape(column.type)
        assert (kind, nullable) == (of.sql, of.nullable)
        assert comment.startswith(column.doc.text)
    assert all(comment for _, _, comment in found.values()), "the view's columns too"
    for name in KINDS:
        row = database.execute(f"SELECT * FROM {name}").description
        assert [column[0] for column in row or ()][:3] == ["run_id", "generation", "seq"]


def test_the_ddl_may_run_twice(database: duckdb.DuckDBPyConnection) -> None:
    for statement in schema.ddl():
        database.execute(statement)


def stored(tmp_path: Path) -> Store:
    bus = Bus(run_id="r", capacity=100)
    for record in EVERY_KIND:
        bus.publish(record)
    store = Store(tmp_path, "r", logging.getLogger("test"))
    store.append(bus.reader(0).take(100))
    return store


def test_every_kind_comes_back_from_its_table(tmp_path: Path) -> None:
    store = stored(tmp_path)
    for seq, record in enumerate(EVERY_KIND, 1):
        name = KIND_NAMES[type(record)]
        (row,) = store.cursor().execute(f"SELECT * FROM {name}").fetchall()
        fields = [getattr(record, column.name) for column in columns(type(record))]
        assert list(row) == ["r", 1, seq, *fields]
    assert last_place(store.cursor(), "r") == (1, len(EVERY_KIND))
    store.close()


def test_the_slice_view_has_one_row_for_each_batch_row(tmp_path: Path) -> None:
    store = stored(tmp_path)
    rows = store.cursor().execute(
        "SELECT request, row, start_position, token_count, kv_block_count, step FROM slice"
        " ORDER BY seq, row"
    )
    assert rows.fetchall() == [(1, 0, 9, 1, 1, 1), (2, 1, 9, 1, 1, 1), (3, 2, 9, 1, 1, 1)]
    store.close()


def test_the_document_turns_an_instant_into_wall_clock(tmp_path: Path) -> None:
    text = (ROOT / "SCHEMA.md").read_text(encoding="utf-8")
    (sql,) = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    store = stored(tmp_path)
    (row,) = store.cursor().execute(sql).fetchall()
    assert row[0] == "req-1"
    assert row[1].isoformat() == "2026-11-30T00:53:20.000001"
    store.close()


def test_the_end_that_a_lost_server_gets_names_every_column() -> None:
    wanted = [column.name for column in (*schema.PREFIX, *columns(KINDS["request_end"]))]
    assert list(LOST_END) == wanted


# ---- event bodies


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(schema.event_schemas()[name])


@pytest.mark.parametrize("name", [*KINDS, "hello", "lost"])
def test_each_event_schema_is_valid_and_explains_itself(name: str) -> None:
    rule = schema.event_schemas()[name]
    Draft202012Validator.check_schema(rule)
    assert rule["title"] == name
    assert len(rule["description"]) > 10
    if name in KINDS:
        assert list(rule["properties"]) == [column.name for column in columns(KINDS[name])]
        assert all(len(one["description"]) > 2 for one in rule["properties"].values())


@pytest.mark.parametrize("record", EVERY_KIND, ids=lambda record: KIND_NAMES[type(record)])
def test_bodies_fit_their_schema(record: Record) -> None:
    rule = validator(KIND_NAMES[type(record)])
    body = msgspec.json.decode(msgspec.json.encode(record))
    rule.validate(body)
    assert not {"run_id", "generation", "seq"} & body.keys()
    assert not rule.is_valid({**body, "more": 1})
    body.pop(next(iter(body)))
    assert not rule.is_valid(body)


def test_the_schema_for_programs_names_tables_views_and_events() -> None:
    facts = msgspec.json.decode(msgspec.json.encode(schema.describe()))
    assert facts["tables"].keys() == {*KINDS, "telemetry_lost"}
    assert facts["events"].keys() == {*KINDS, "hello", "lost"}
    assert [column["name"] for column in facts["views"]["slice"]["columns"]][6:8] == [
        "row",
        "request",
    ]
    where = next(c for c in facts["tables"]["iteration"]["columns"] if c["name"] == "device_ns")
    assert where["unit"] == "ns"
    assert where["type"] == "BIGINT"
