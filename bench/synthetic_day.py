"""A made-up day of the record: 20 steps a second, 32 rows each, 55 million slices, in segments.

Owns the arithmetic that makes it, as SQL over generate_series, so that a day takes a minute to
write. bench/history.py asks questions about it. Each row of the batch serves one request after the
other: a prompt of 128 tokens, then 199 decodes; noise keeps the columns from compressing to
nothing. The files are the most that retention.py lets a day have, in its last minute.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from telemetry.catalog import MEMORY, Part, columns_of, open_catalog, show
from telemetry.records import SCHEMA_VERSION
from telemetry.schema import table_ddl
from telemetry.segments import FOLDER_NAME, Level, segment_path, write_segment

RUN_ID = "day"
ROWS, LIFE_STEPS, STEP_NS, STEPS_AN_HOUR = 32, 200, 50_000_000, 72_000
PROMPT_TOKENS = 128
STRIDE = 20
"""Places in the sequence that one step and what ends and begins with it take."""
CAUSES = (
    *("tokenize", "step_boundary", "queue_seqs", "own_prefill", "own_decode"),
    *("neighbour_decode", "scheduler", "output"),
)

ITERATION = f"""
SELECT '{RUN_ID}' AS run_id, 1 AS generation, s * {STRIDE} + {STRIDE} AS seq, s + 1 AS step,
  s * {STEP_NS} AS begin_at_ns, (s + 1) * {STEP_NS} AS end_at_ns,
  plan_ns, launch_ns, {STEP_NS} - plan_ns - launch_ns - commit_ns - gap_ns AS wait_ns, commit_ns,
  gap_ns, 40000000 + hash(s + 5) % 900000 + 5000000 * len(starting) AS device_ns,
  20000 + hash(s + 6) % 3000 AS emit_ns, {ROWS} AS running, 3 + s // 50 % 9 AS waiting,
  'seqs' AS admission_stop, s // 6 AS admission_blocker, 512 AS token_budget,
  {PROMPT_TOKENS} * len(starting) AS prefill_tokens, {ROWS} - len(starting) AS decode_tokens,
  0 AS padding_tokens, 0 AS idle_rows, {ROWS} AS bucket, false AS graph,
  400 + hash(s + 7) % 40 AS kv_blocks_used, 100 + hash(s + 9) % 9 AS kv_blocks_cached,
  6400 + hash(s + 8) % 500 AS kv_tokens, 440 AS kv_blocks_peak, 0 AS allocation_failures,
  0 AS lost_before, requests, start_positions, token_counts,
  list_transform(start_positions, lambda p: p // 16 + 1) AS kv_block_counts,
  list_transform(starting, lambda r: (s + r * 6) // {LIFE_STEPS} * {ROWS} + r) AS admitted,
  list_transform(starting, lambda r: 0::BIGINT) AS admitted_cached_tokens,
  []::BIGINT[] AS passed_over, []::VARCHAR[] AS passed_over_reasons, []::BIGINT[] AS preempted,
  []::VARCHAR[] AS preempted_causes, []::BIGINT[] AS preempted_blocks,
  []::BIGINT[] AS preempted_lost_tokens, []::BIGINT[] AS preempted_beneficiaries,
  list_transform(starting, lambda r: ((s + r * 6) // {LIFE_STEPS} - 1) * {ROWS} + r) AS finished
FROM (SELECT s, 100000 + hash(s) % 50000 AS plan_ns, 300000 + hash(s + 1) % 50000 AS launch_ns,
  50000 + hash(s + 3) % 9999 AS commit_ns, 10000 + hash(s + 4) % 9999 AS gap_ns,
  list_transform(range({ROWS}), lambda r: (s + r * 6) // {LIFE_STEPS} * {ROWS} + r) AS requests,
  list_transform(range({ROWS}), lambda r: CASE WHEN (s + r * 6) % {LIFE_STEPS} = 0 THEN 0
    ELSE {PROMPT_TOKENS - 1} + (s + r * 6) % {LIFE_STEPS} END) AS start_positions,
  list_transform(range({ROWS}), lambda r: CASE WHEN (s + r * 6) % {LIFE_STEPS} = 0
    THEN {PROMPT_TOKENS} ELSE 1 END) AS token_counts,
  list_filter(range({ROWS}), lambda r: (s + r * 6) % {LIFE_STEPS} = 0) AS starting
  FROM range({{first}}, {{last}}) steps(s))"""

BEGINS = f"""(SELECT s, (s + r * 6) // {LIFE_STEPS} * {ROWS} + r AS request,
    s * {STEP_NS} AS now_ns, (s - {LIFE_STEPS}) * {STEP_NS} AS before_ns
  FROM (SELECT s, ({LIFE_STEPS} - s % {LIFE_STEPS}) % {LIFE_STEPS} // 6 AS r
        FROM range({{first}}, {{last}}) steps(s)
        WHERE ({LIFE_STEPS} - s % {LIFE_STEPS}) % {LIFE_STEPS} % 6 = 0)
  WHERE r < {ROWS})"""
"""Steps in which a request takes a row; the one before it in that row, {ROWS} less, has ended."""

PLACE = f"'{RUN_ID}' AS run_id, 1 AS generation, s * {STRIDE}"
ENDED = f"request - {ROWS} AS request"

SELECTS = {
    "iteration": ITERATION,
    "request_start": f"""
SELECT {PLACE} + 15 AS seq, request, 'req-' || request AS request_id, NULL AS external_id,
  NULL AS parent_id, 'tenant-' || request % 7 AS tenant, now_ns - 3000000 AS arrived_at_ns,
  {PROMPT_TOKENS} AS prompt_tokens, {LIFE_STEPS} AS max_tokens, 0 AS priority, NULL AS slo,
  true AS stream FROM {BEGINS}""",
    "request_end": f"""
SELECT {PLACE} + 1 AS seq, {ENDED}, 'req-' || request - {ROWS} AS request_id, NULL AS external_id,
  NULL AS parent_id, 'tenant-' || request % 7 AS tenant, before_ns - 5000000 AS received_at_ns,
  before_ns - 3000000 AS arrived_at_ns, before_ns + 100000 AS admitted_at_ns,
  before_ns AS first_scheduled_at_ns, before_ns + {STEP_NS} AS prefill_finished_at_ns,
  before_ns + {STEP_NS} AS first_token_at_ns, NULL AS cancel_requested_at_ns,
  now_ns - 50000 AS decided_at_ns, now_ns - 40000 AS freed_at_ns, now_ns AS released_at_ns,
  {PROMPT_TOKENS} AS prompt_tokens, 0 AS cached_tokens, {LIFE_STEPS} AS output_tokens,
  0 AS recomputed_tokens, 0 AS dropped_tokens, 0 AS wasted_tokens, 0 AS preemptions,
  {LIFE_STEPS} AS iterations, 'length' AS finish, NULL AS cancel_cause, NULL AS error
FROM {BEGINS} WHERE request >= {ROWS}""",
    "delivery": f"""
SELECT {PLACE} + 2 AS seq, {ENDED}, before_ns - 5000000 AS received_at_ns,
  before_ns - 4000000 AS tokenized_at_ns, before_ns - 3500000 AS submitted_at_ns,
  before_ns + {STEP_NS} + 400000 AS first_write_at_ns,
  now_ns + hash(s) % 900000 AS last_write_at_ns,
  0 AS stall_ns, hash(s) % 5 AS merged_deltas, 9000 + hash(s) % 999 AS bytes
FROM {BEGINS} WHERE request >= {ROWS}""",
    "request_cause": f"""
SELECT {PLACE} + 3 + place AS seq, {ENDED}, cause, 1000000 + hash(s + place) % 900000000 AS ns,
  'fitted' AS rule
FROM {BEGINS}, (SELECT unnest({list(CAUSES)}) AS cause, unnest(range({len(CAUSES)})) AS place)
WHERE request >= {ROWS}""",
    "request_share": f"""
SELECT {PLACE} + 14 AS seq, {ENDED}, 300000000 + hash(s) % 9999999 AS device_ns,
  90000000000 + hash(s) % 999999999 AS kv_block_ns, 'fitted' AS rule
FROM {BEGINS} WHERE request >= {ROWS}""",
    "step_model": f"""
SELECT {PLACE} + 16 AS seq, s AS step, 2e6 + hash(s) % 99999 AS fixed, 4e4 AS p, 1.1e6 AS d,
  20.5 AS c, 0.04 AS error
FROM range({{first}}, {{last}}) steps(s) WHERE s % {LIFE_STEPS} = 7""",
}


@dataclass(frozen=True, kw_only=True)
class Day:
    """What was written: whole requests are 32 to `requests`."""

    steps: int
    slices: int
    requests: int
    bytes: int
    files: int


def write_day(folder: Path, started_unix_us: int, *, hours: int = 24) -> Day:
    """Write the segments of a history folder whose run began then."""
    (folder / FOLDER_NAME).mkdir(parents=True)
    connection = open_catalog()
    connection.execute("ATTACH ':memory:' AS made")
    connection.execute("USE made")
    for statement in table_ddl():
        connection.execute(statement)
    connection.execute(f"INSERT INTO run BY NAME {_run(started_unix_us)}")
    connection.execute(f"USE {MEMORY}")
    columns = columns_of(connection, ["made"])["made"]
    show(connection, [Part(alias="made", columns=columns)], first=True)
    spans = list(_ladder(hours * 60))
    size = 0
    for level, first, last in spans:
        contents = [
            (table, f"BY NAME {select.format(first=first, last=last)}")
            for table, select in SELECTS.items()
        ]
        if first == 0:
            contents.append(("run", f"BY NAME {_run(started_unix_us)}"))
        path = segment_path(folder, level)
        size += write_segment(connection, path, level=level, contents=contents).bytes
    connection.close()
    steps = hours * STEPS_AN_HOUR
    return Day(
        steps=steps,
        slices=steps * ROWS,
        requests=(steps // LIFE_STEPS - 2) * ROWS,
        bytes=size,
        files=len(spans),
    )


def _ladder(minutes: int) -> Iterator[tuple[Level, int, int]]:
    """Yield level, first and last step of each file: parts of a day, hours, parts, minutes."""
    done = 0
    lengths: tuple[tuple[Level, int], ...] = (
        ("day", 480),
        ("hour", 60),
        ("hour", 10),
        ("minute", 1),
    )
    for level, length in lengths:
        while done + length < minutes:
            yield level, done * STEPS_AN_HOUR // 60, (done + length) * STEPS_AN_HOUR // 60
            done += length
    yield "minute", done * STEPS_AN_HOUR // 60, minutes * STEPS_AN_HOUR // 60


def _run(started_unix_us: int) -> str:
    config = json.dumps({"made": "up"})
    return f"""
SELECT '{RUN_ID}' AS run_id, 1 AS generation, 1 AS seq, 'bench' AS replica,
  {SCHEMA_VERSION} AS schema_version, {started_unix_us} AS started_unix_us, 'made-up' AS model,
  1000 AS parameters, 'f32' AS dtype, 'none' AS device, 'none' AS backend,
  '{{}}' AS backend_refusals, 'fcfs' AS policy, 'continuous' AS batching, 1000 AS kv_blocks_total,
  16 AS block_tokens, 512 AS batch_tokens_max, {ROWS} AS seqs_max, 1024 AS model_len_max,
  []::BIGINT[] AS buckets, '{config}' AS config, 'none' AS revision"""
