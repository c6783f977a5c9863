"""Everything that follows from the record's fields: tables, views, event schemas, SCHEMA.md.

Owns the DuckDB DDL with its comments, the long view `slice`, the JSON schema of the event bodies
and the text of SCHEMA.md. history.py runs the DDL, server/telemetry_api.py serves the schema, and
`python -m telemetry.schema` prints SCHEMA.md. Must never know a field by itself: what is wrong
here is corrected in records.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import getdoc
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from telemetry.causes import RULES, cause_table
from telemetry.records import KINDS, SCHEMA_VERSION, Column, Doc, Record, columns

SQL_TYPES: dict[object, str] = {
    int: "BIGINT",
    str: "VARCHAR",
    bool: "BOOLEAN",
    float: "DOUBLE",
}
JSON_TYPES: dict[object, str] = {
    int: "integer",
    str: "string",
    bool: "boolean",
    float: "number",
}
RESERVED = frozenset({"where"})
"""Columns that SQL needs in double quotes; a test holds this against DuckDB's own list."""

DIALECT = "https://json-schema.org/draft/2020-12/schema"

PREFIX = (
    Column("run_id", str, Doc("one life of the server")),
    Column("generation", int, Doc("which of its engines, from 1; 0 before the first was ready")),
    Column("seq", int, Doc("place in the run's sequence of records, from 1")),
)
"""Columns that the server puts before a record's own."""

LOST_TABLE = "telemetry_lost"
LOST_COLUMNS = (
    PREFIX[0],
    Column("generation", int, Doc("engine in force before the loss")),
    Column("from_seq", int, Doc("first record that did not reach this history")),
    Column("to_seq", int, Doc("last record that did not reach this history")),
    Column("lost", int, Doc("how many, to_seq - from_seq + 1")),
)
LOST_DOC = "Records that were published but never reached this history, exactly."

SLICE_VIEW = "slice"
SLICE_DOC = "The batch in its long form: one row for each request of each iteration."


@dataclass(frozen=True, slots=True)
class Shape:
    """What a Python annotation amounts to: element type, list or not, null or not, choices."""

    element: object
    is_list: bool
    nullable: bool
    choices: tuple[str, ...]

    @property
    def sql(self) -> str:
        """Return the DuckDB type."""
        return SQL_TYPES[self.element] + ("[]" if self.is_list else "")


def shape(annotation: object) -> Shape:
    """Return the shape of a field's annotation, e.g. of `list[int]` or `str | None`."""
    members = get_args(annotation)
    nullable = NoneType in members and get_origin(annotation) is not list
    if nullable:
        (annotation,) = (member for member in members if member is not NoneType)
    is_list = get_origin(annotation) is list
    if is_list:
        (annotation,) = get_args(annotation)
    choices: tuple[str, ...] = ()
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        annotation = str
    assert annotation in SQL_TYPES, annotation
    return Shape(annotation, is_list, nullable, choices)


def tables() -> Iterator[tuple[str, str, list[Column]]]:
    """Yield (name, what a row is, columns) of every table, in order."""
    for name, kind in KINDS.items():
        yield name, _summary(kind), [*PREFIX, *columns(kind)]
    yield LOST_TABLE, LOST_DOC, list(LOST_COLUMNS)


def slice_columns() -> list[tuple[Column, str]]:
    """Return the columns of the view `slice` with the expression that each stands for."""
    iteration = {column.name: column for column in columns(KINDS["iteration"])}
    kept = [(column, column.name) for column in PREFIX]
    kept += [(iteration[name], name) for name in ("step", "begin_at_ns", "end_at_ns")]
    kept.append((Column("row", int, Doc("batch row, from 0")), "unnest(range(len(requests)))"))
    for name, aligned in (
        ("request", "requests"),
        ("start_position", "start_positions"),
        ("token_count", "token_counts"),
        ("kv_block_count", "kv_block_counts"),
    ):
        column = Column(name, int, iteration[aligned].doc)
        kept.append((column, f"unnest({aligned})"))
    return kept


def quoted(name: str) -> str:
    """Return a name as SQL needs it."""
    return f'"{name}"' if name in RESERVED else name


def ddl() -> list[str]:
    """Return the statements that make an empty database one of ours, each safe to repeat."""
    return table_ddl() + view_ddl()


def table_ddl() -> list[str]:
    """Return the part of `ddl` that makes the tables."""
    statements = []
    for name, summary, items in tables():
        lines = [
            f"  {quoted(item.name)} {shape(item.type).sql}"
            + ("" if shape(item.type).nullable else " NOT NULL")
            for item in items
        ]
        statements.append(f"CREATE TABLE IF NOT EXISTS {name} (\n" + ",\n".join(lines) + "\n)")
        statements.append(f"COMMENT ON TABLE {name} IS {_literal(summary)}")
        statements += [
            f"COMMENT ON COLUMN {name}.{quoted(item.name)} IS {_literal(_described(item))}"
            for item in items
        ]
    return statements


def view_ddl() -> list[str]:
    """Return the part of `ddl` that makes the views, over tables of these names."""
    parts = [f"{expression} AS {column.name}" for column, expression in slice_columns()]
    statements = [
        f"CREATE OR REPLACE VIEW {SLICE_VIEW} AS SELECT {', '.join(parts)} FROM iteration",
        f"COMMENT ON VIEW {SLICE_VIEW} IS {_literal(SLICE_DOC)}",
    ]
    statements += [
        f"COMMENT ON COLUMN {SLICE_VIEW}.{column.name} IS {_literal(_described(column))}"
        for column, _ in slice_columns()
    ]
    return statements


def event_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each event body of /telemetry/stream, by event name."""
    bodies = {name: _object_schema(_summary(kind), columns(kind)) for name, kind in KINDS.items()}
    integer = {"type": "integer"}
    hello = {
        "schema_version": {**integer, "description": "version of the record schema"},
        "run_id": {"type": "string", "description": "one life of the server"},
        "generation": {**integer, "description": "engine in force; each later `run` adds one"},
        "run": {"anyOf": [bodies["run"], {"type": "null"}]},
        "live": {"type": "array", "items": bodies["request_start"]},
        "lost": {"enum": [0, "unknown"], "description": "what this hello itself skips"},
    }
    lost = {
        "from": {**integer, "description": "seq of the first record that is lost"},
        "to": {**integer, "description": "seq of the last record that is lost"},
        "count": {**integer, "description": "exact, before filters"},
        "by_kind": {
            "anyOf": [{"type": "object", "additionalProperties": integer}, {"type": "null"}]
        },
    }
    for name, text, properties in (
        ("hello", "State at the place in the stream that its id names.", hello),
        ("lost", "Records that this reader was too slow for, or away for.", lost),
    ):
        bodies[name] = _closed(text, properties)
    return {name: {"$schema": DIALECT, "title": name, **body} for name, body in bodies.items()}


def describe() -> dict[str, Any]:
    """Return the whole schema for programs: tables, views, events."""
    described = {
        name: {"doc": summary, "columns": [_column_facts(item) for item in items]}
        for name, summary, items in tables()
    }
    view = [_column_facts(column) for column, _ in slice_columns()]
    return {
        "schema_version": SCHEMA_VERSION,
        "tables": described,
        "views": {SLICE_VIEW: {"doc": SLICE_DOC, "columns": view}},
        "events": event_schemas(),
    }


def schema_document() -> str:
    """Return the text of SCHEMA.md."""
    parts = [_PREAMBLE.format(version=SCHEMA_VERSION)]
    for name, summary, items in tables():
        parts.append(f"### `{name}`\n\n{summary}\n\n{_table(items)}")
    view = [column for column, _ in slice_columns()]
    parts.append(f"## View\n\n### `{SLICE_VIEW}`\n\n{SLICE_DOC}\n\n{_table(view)}")
    parts.append(f"## Every millisecond accounted\n\n{RULES}\n\n{cause_table()}")
    parts.append(_EVENTS)
    return "\n\n".join(parts) + "\n"


def _summary(kind: type[Record]) -> str:
    return " ".join((getdoc(kind) or "").split())


def _described(column: Column) -> str:
    unit = f" [{column.doc.unit}]" if column.doc.unit else ""
    choices = shape(column.type).choices
    values = f"; one of {', '.join(choices)}" if choices else ""
    return column.doc.text + unit + values


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _object_schema(text: str, items: Iterator[Column]) -> dict[str, Any]:
    return _closed(text, {item.name: _json_schema(item) for item in items})


def _closed(text: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": text,
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _json_schema(column: Column) -> dict[str, Any]:
    of = shape(column.type)
    schema: dict[str, Any] = {"type": JSON_TYPES[of.element]}
    if of.choices:
        schema["enum"] = list(of.choices)
    if of.is_list:
        schema = {"type": "array", "items": schema}
    if of.nullable:
        schema = {"anyOf": [schema, {"type": "null"}]}
    schema["description"] = column.doc.text
    if column.doc.unit:
        schema["unit"] = column.doc.unit
    return schema


def _column_facts(column: Column) -> dict[str, Any]:
    of = shape(column.type)
    return {
        "name": column.name,
        "type": of.sql,
        "nullable": of.nullable,
        "unit": column.doc.unit,
        "doc": column.doc.text,
        "values": list(of.choices),
    }


def _table(items: list[Column]) -> str:
    lines = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    for item in items:
        of = shape(item.type)
        kind = of.sql + (", may be null" if of.nullable else "")
        values = f" One of `{'`, `'.join(of.choices)}`." if of.choices else ""
        text = item.doc.text + ("." if values else "") + values
        lines.append(f"| `{quoted(item.name)}` | {kind} | {item.doc.unit} | {text} |")
    return "\n".join(lines)


_PREAMBLE = """\
# The record

Generated from telemetry/records.py by `python -m telemetry.schema > SCHEMA.md`; a test keeps it \
current. Schema version {version}.

## Words

- An *iteration* is one record of one model step, *step* its number, *tile* the wall time it \
owns, *slice* one request's entry in its lists.
- An iteration owns the time from the previous commit (or, if the engine slept, from its wake-up) \
to its own `end_at_ns`: `plan_ns + launch_ns + wait_ns + commit_ns + gap_ns` is exactly \
`end_at_ns - begin_at_ns`.
- The lists of an iteration are aligned: entry i of `requests`, `start_positions`, \
`token_counts` and `kv_block_counts` is batch row i. So are the lists inside each of the \
`admitted`, `passed_over` and `preempted` groups.
- In lists a request is a small integer, unique in a run; its names stand in `request_start` and \
`request_end`. Join on `(run_id, request)`.
- `run_id` is one life of the server; `generation` counts its engines; `seq` orders all records \
of a run.

## Time

Instants end in `_at_ns`, durations in `_ns`; both are nanoseconds. Instants count from the \
server's start on one monotonic clock, so differences are always right. Wall clock is in `run` \
alone; join it to show an instant to a person:

```sql
SELECT s.request_id, make_timestamp(r.started_unix_us + s.arrived_at_ns // 1000) AS arrived_utc
FROM request_start s JOIN run r USING (run_id, generation)
```

## Files

A history folder has a live file, `history.duckdb`, which one process may open at a time, and \
closed segments, `segments/*.duckdb`, which any DuckDB from 1.4 on reads, also while a server \
runs. A segment has all tables and views below and two of its own. `segment` has one row for \
each run in it: `schema_version`, `level` (minute, hour or day), `run_id`, `first_seq`, \
`last_seq`, `first_unix_us`, `last_unix_us`, `rows` (of all tables) and `slices`. \
`segment_source` names the files that were merged into it. A row is in one file only; columns \
that an older version did not know are null, or zero and empty where they may not be null.

A start without an end is a request that runs, or one whose end is among the records that \
`telemetry_lost` counts: nothing is invented for those.

## Tables"""

_EVENTS = """\
## Events

`GET /telemetry/stream` sends server-sent events, named as the tables. `id:` is `<run_id>.<seq>`; \
the JSON body carries the record's own fields alone. `generation` stands in `hello`, and each \
later `run` event adds one.

- `hello` comes first: `schema_version`, `run_id`, `generation`, `run` (null until an engine was \
ready), `live` (a `request_start` body for each request that has not ended), `lost` (0, or \
"unknown" when nobody can say what was missed). Its id is the place of that state; records follow \
from the next seq on.
- A client that comes back with `Last-Event-ID` (or `?last_event_id=`) goes on without a hello \
while the server still holds the next record.
- `lost`: `from`, `to`, `count` (exact, before filters), `by_kind` (null where unknown). Its id is \
the last lost seq, and a hello with the state at that place always follows.
- An id of another run, of a record that does not exist, or garbage: a fresh hello with \
`lost: "unknown"`.
- A frame of `id:` alone is the heartbeat; it moves a filtered stream's place on.
- `?kinds=iteration,request_end` filters, `?hz=` (1 to 60) sets how many times a second the \
server sends. Nothing is thinned. `?past=N` begins without a place up to N records ago, as far as \
the ring goes, and not with now.

The JSON schema of each body is at `GET /telemetry/schema`."""


if __name__ == "__main__":
    sys.stdout.write(schema_document())
