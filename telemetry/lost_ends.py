"""Ends for requests whose server died: what the record itself still tells of their lives.

Owns the rule of who gets such an end, and its columns. store.py calls `close_open_requests` when it
opens a history. Must never invent: where records were lost after the last sign of a request's life,
its end may be among them, and it gets none; `telemetry_lost` says how many are missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import duckdb

from telemetry.catalog import LIVE, literal
from telemetry.schema import LOST_TABLE, tables
from telemetry.segments import INSTANTS


@dataclass(frozen=True, slots=True)
class Closed:
    """How many requests of earlier runs got an end, and of how many the end is unknown."""

    lost: int
    unknown: int


def close_open_requests(cursor: duckdb.DuckDBPyConnection, run_id: str) -> Closed:
    """Give starts of earlier runs that have no end their end: `error`, "server lost".

    Instants after the arrival are the last that the run had on record: nothing later is known.
    `cursor` reads the catalog's views; the ends go to the live file. Raises duckdb.Error.
    """
    found = cursor.execute(OPEN_RUNS, [run_id]).fetchall()
    if not found:
        return Closed(0, 0)
    since_ns = min(arrived for _, arrived in found)
    sql = _selects([run for run, _ in found], since_ns)
    ((lost, unknown),) = cursor.execute(
        f"WITH {sql} SELECT count(*) FILTER (NOT hidden), count(*) FILTER (hidden) FROM fate"
    ).fetchall()
    if lost:
        names, values = ", ".join(LOST_END), ", ".join(LOST_END.values())
        cursor.execute(
            f"INSERT INTO {LIVE}.main.request_end ({names}) WITH {sql} SELECT {values} "
            "FROM open_start s JOIN fate USING (run_id, request) JOIN place USING (run_id) "
            "LEFT JOIN work USING (run_id, request) LEFT JOIN receipt USING (run_id, request) "
            "WHERE NOT hidden"
        )
    return Closed(lost, unknown)


OPEN_RUNS = """SELECT run_id, min(arrived_at_ns) FROM request_start s
WHERE run_id <> $1 AND NOT EXISTS (
  FROM request_end e WHERE e.run_id = s.run_id AND e.request = s.request)
GROUP BY run_id"""


def _selects(run_ids: Sequence[str], since_ns: int) -> str:
    """Return the WITH list of what is known of open starts.

    Runs and time stand in it as literals, so that segments without any of it are not read.
    """
    runs = f"run_id IN ({', '.join(map(literal, run_ids))})"
    known = " UNION ALL ".join(
        f"SELECT run_id, {'to_seq' if table == LOST_TABLE else 'seq'} AS seq, "
        f"{INSTANTS.get(table, 'NULL')}::BIGINT AS at_ns FROM {table} WHERE {runs}"
        for table, _, _ in tables()
    )
    return f"""open_start AS (
  SELECT * FROM request_start s WHERE {runs} AND NOT EXISTS (
    FROM request_end e WHERE e.run_id = s.run_id AND e.request = s.request)
), known AS ({known}
), place AS (
  SELECT run_id, max(seq) AS last_seq, coalesce(max(at_ns), 0) AS last_at_ns
  FROM known GROUP BY run_id
), work AS (
  SELECT run_id, request, max(seq) AS last_seq, count(*) AS iterations,
    min(begin_at_ns) AS first_scheduled_at_ns,
    max(start_position + token_count) AS computed_tokens
  FROM slice SEMI JOIN open_start USING (run_id, request)
  WHERE {runs} AND end_at_ns >= {since_ns} GROUP BY run_id, request
), receipt AS (
  SELECT run_id, request, min(received_at_ns) AS received_at_ns
  FROM delivery SEMI JOIN open_start USING (run_id, request)
  WHERE {runs} GROUP BY run_id, request
), loss AS (
  SELECT run_id, max(to_seq) AS to_seq FROM {LOST_TABLE} WHERE {runs} GROUP BY run_id
), fate AS (
  SELECT run_id, request, coalesce(loss.to_seq > greatest(s.seq, work.last_seq), false) AS hidden
  FROM open_start s LEFT JOIN work USING (run_id, request) LEFT JOIN loss USING (run_id)
)"""


LOST_END = {
    "run_id": "s.run_id",
    "generation": "s.generation",
    "seq": "place.last_seq + row_number() OVER (PARTITION BY s.run_id ORDER BY s.seq)",
    "request": "s.request",
    "request_id": "s.request_id",
    "external_id": "s.external_id",
    "parent_id": "s.parent_id",
    "tenant": "s.tenant",
    "received_at_ns": "coalesce(receipt.received_at_ns, s.arrived_at_ns)",
    "arrived_at_ns": "s.arrived_at_ns",
    "admitted_at_ns": "NULL",
    "first_scheduled_at_ns": "work.first_scheduled_at_ns",
    "prefill_finished_at_ns": "NULL",
    "first_token_at_ns": "NULL",
    "cancel_requested_at_ns": "NULL",
    "decided_at_ns": "last_at_ns",
    "freed_at_ns": "NULL",
    "released_at_ns": "last_at_ns",
    "prompt_tokens": "s.prompt_tokens",
    "cached_tokens": "0",
    "output_tokens": "greatest(0, coalesce(work.computed_tokens, 0) - s.prompt_tokens + 1)",
    "recomputed_tokens": "0",
    "dropped_tokens": "0",
    "wasted_tokens": "0",
    "preemptions": "0",
    "iterations": "coalesce(work.iterations, 0)",
    "finish": "'error'",
    "cancel_cause": "NULL",
    "error": "'server lost'",
}
"""Column of request_end to its expression; a test holds the names against the record."""
