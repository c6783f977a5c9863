"""One side of a comparison: what a run or a window did, summed by block of time.

Owns the SELECTs that fold a range into blocks: requests, tokens, steps, causes, and histograms of
latencies. diff.py compares two sides. Answers stay small however long the range is: the sums are
made where the rows are. A request counts in the block in which it ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from telemetry.bootstrap import BUCKET, Floats, Histogram
from telemetry.reading import read_records
from telemetry.records import CAUSES
from telemetry.spans import LIES_IN, Ask, Span, parameters
from telemetry.untold import FOLDED, causes_of

BLOCKS = 20
LATENCIES = ("ttft", "itl", "e2e", "queue")
FACTS = (
    "model",
    "dtype",
    "device",
    "backend",
    "policy",
    "batching",
    "kv_blocks_total",
    "block_tokens",
    "batch_tokens_max",
    "seqs_max",
    "model_len_max",
    "revision",
)
"""Columns of `run` that say how an engine was set, beside its configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Sums by block, each array [K] but where said.

    Of the requests that ended there: `requests`; `explained`, those with causes, and of these
    `prompts` and `outputs`, their tokens, and `causes` [K, number of causes] in ns, in CAUSES'
    order. Of the steps: `work` [K, 4], which a step model's coefficients weigh (steps, prefill,
    decode and context tokens), `device_ns`, `busy_ns`. `model` is the mean of the fits in force.
    `settings` holds each engine's facts and its resolved configuration as JSON.
    """

    seconds: Floats
    requests: Floats
    explained: Floats
    prompts: Floats
    outputs: Floats
    causes: Floats
    work: Floats
    device_ns: Floats
    busy_ns: Floats
    histograms: dict[str, Histogram]
    model: Floats | None
    settings: list[dict[str, Any]]

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""
        return len(self.seconds)


def read_side(ask: Ask, spans: Sequence[Span]) -> Side:
    """Fold a range into about BLOCKS blocks, each a piece of one run."""
    whole_ns = sum(span.to_ns - span.from_ns for span in spans) or 1
    parts = []
    for span in spans:
        share = (span.to_ns - span.from_ns) / whole_ns
        parts.append(_read_span(ask, span, max(1, round(BLOCKS * share))))
    sums = np.concatenate([part.sums for part in parts])
    return Side(
        seconds=sums[:, 0],
        requests=sums[:, 1],
        explained=sums[:, 2],
        prompts=sums[:, 3],
        outputs=sums[:, 4],
        work=sums[:, 5:9],
        device_ns=sums[:, 9],
        busy_ns=sums[:, 10],
        causes=np.concatenate([part.causes for part in parts]),
        histograms={
            name: _histogram([block for part in parts for block in part.latencies[name]])
            for name in LATENCIES
        },
        model=_model(ask, spans),
        settings=_settings(ask, spans),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One span: sums [K, 11], causes [K, C]; for each latency K pairs of buckets and counts."""

    sums: Floats
    causes: Floats
    latencies: dict[str, list[tuple[list[int], list[int]]]]


def _read_span(ask: Ask, span: Span, blocks: int) -> _Part:
    given = [span.run_id, span.from_ns, span.to_ns, blocks]
    sums, causes = np.zeros((blocks, 11)), np.zeros((blocks, len(CAUSES)))
    sums[:, 0] = (span.to_ns - span.from_ns) / blocks / 1e9
    for block, *values in ask(REQUESTS, given).rows:
        sums[block, 1:5] = values
    for block, *values in ask(STEPS, given).rows:
        sums[block, 5:] = values
    for block, cause, ns in ask(CAUSE_SUMS, given).rows:
        causes[block, CAUSES.index(cause)] = ns
    if sums[:, 1].sum() > sums[:, 2].sum():
        _add_untold(ask, span, sums, causes)
    part = _Part(sums, causes, {name: [([], [])] * blocks for name in LATENCIES})
    for sql in (LATENCY_HISTOGRAMS, GAP_HISTOGRAM):
        for name, block, buckets, counts in ask(sql, given).rows:
            part.latencies[name][block] = (buckets, counts)
    return part


def _add_untold(ask: Ask, span: Span, sums: Floats, causes: Floats) -> None:
    """Add the causes of requests that have none on record, folded from the steps themselves."""
    untold: dict[int, tuple[int, int, int]] = {}
    added: set[int] = set()
    after, given = -1, [span.run_id, span.from_ns, span.to_ns, len(sums)]
    while rows := ask(UNTOLD, [*given, after]).rows:
        untold |= {request: (block, prompt, output) for request, block, prompt, output in rows}
        after = rows[-1][0]
    for record in causes_of(read_records(ask, [span], FOLDED)):
        if record.request not in untold:
            continue
        block, prompt, output = untold[record.request]
        causes[block, CAUSES.index(record.cause)] += record.ns
        if record.request not in added:
            added.add(record.request)
            sums[block, 2:5] += 1, prompt, output


def _histogram(listed: list[tuple[list[int], list[int]]]) -> Histogram:
    """Return the lists of buckets and counts of each block as one array; bucket -1 took none."""
    seen = [bucket for buckets, _ in listed for bucket in buckets if bucket >= 0]
    first, last = (min(seen), max(seen)) if seen else (0, 0)
    counts = np.zeros((len(listed), last - first + 2))
    for block, (buckets, found) in enumerate(listed):
        places = [0 if bucket < 0 else bucket - first + 1 for bucket in buckets]
        counts[block, places] = found
    return Histogram(counts, first)


def _model(ask: Ask, spans: Sequence[Span]) -> Floats | None:
    """Return the mean of the fits in a range, [fixed, p, d, c] in ns; None without any."""
    fits = [row for span in spans for row in ask(FITS, parameters(span)).rows]
    return np.mean(np.array(fits, dtype=np.float64), axis=0) if fits else None


def _settings(ask: Ask, spans: Sequence[Span]) -> list[dict[str, Any]]:
    found = []
    for span in spans:
        rows = ask(
            f"SELECT {', '.join(FACTS)}, config FROM run WHERE run_id = $1 ORDER BY seq",
            [span.run_id],
        ).rows
        found += [dict(zip((*FACTS, "config"), row, strict=True)) for row in rows]
    return found


_BLOCK = "least($4 - 1, ({at} - $2) * $4 // greatest(1, $3 - $2))"
_BUCKET = f"CASE WHEN ns < 1 THEN -1 ELSE floor(ln(ns) / {BUCKET!r})::BIGINT END"

_ENDED = f"""WITH ended AS (
  SELECT request, received_at_ns, arrived_at_ns, admitted_at_ns, first_token_at_ns, released_at_ns,
    prompt_tokens, output_tokens, {_BLOCK.format(at="released_at_ns")} AS block
  FROM request_end
  WHERE run_id = $1 AND released_at_ns BETWEEN $2 AND $3 AND finish IN ('stop', 'length')
), sent AS (
  SELECT request, any_value(first_write_at_ns) AS first_write_at_ns,
    any_value(last_write_at_ns) AS last_write_at_ns
  FROM delivery WHERE run_id = $1 GROUP BY request
)"""

REQUESTS = f"""{_ENDED}, told AS (
  SELECT DISTINCT request, 1 AS one FROM request_cause WHERE run_id = $1
)
SELECT block, count(*), count(one), coalesce(sum(one * prompt_tokens), 0)::BIGINT,
  coalesce(sum(one * output_tokens), 0)::BIGINT
FROM ended LEFT JOIN told USING (request) GROUP BY block"""

UNTOLD = f"""{_ENDED}
SELECT request, block, prompt_tokens, output_tokens FROM ended
WHERE request > $5 AND request NOT IN (SELECT request FROM request_cause WHERE run_id = $1)
ORDER BY request LIMIT 5000"""

STEPS = f"""
SELECT {_BLOCK.format(at="greatest(end_at_ns, $2)")} AS block, count(*),
  sum(prefill_tokens)::BIGINT, sum(decode_tokens + padding_tokens + idle_rows)::BIGINT,
  sum(list_sum(start_positions) + list_sum(token_counts))::BIGINT,
  sum(device_ns)::BIGINT, sum(end_at_ns - begin_at_ns)::BIGINT
FROM iteration
WHERE run_id = $1 AND end_at_ns BETWEEN $2 AND $3 AND len(requests) > 0 GROUP BY block"""

FITS = f"SELECT fixed, p, d, c FROM step_model WHERE run_id = $1 AND {LIES_IN['step_model']}"

CAUSE_SUMS = f"""{_ENDED}
SELECT block, cause, sum(ns)::BIGINT FROM request_cause JOIN ended USING (request)
WHERE run_id = $1 GROUP BY block, cause"""

LATENCY_HISTOGRAMS = f"""{_ENDED}, latency AS (
  SELECT 'ttft' AS name, block,
    coalesce(first_write_at_ns, first_token_at_ns) - received_at_ns AS ns
  FROM ended LEFT JOIN sent USING (request)
  UNION ALL SELECT 'e2e', block, coalesce(last_write_at_ns, released_at_ns) - received_at_ns
  FROM ended LEFT JOIN sent USING (request)
  UNION ALL SELECT 'queue', block, admitted_at_ns - arrived_at_ns FROM ended
), counted AS (
  SELECT name, block, {_BUCKET} AS bucket, count(*) AS n
  FROM latency WHERE ns IS NOT NULL GROUP BY ALL
)
SELECT name, block, list(bucket), list(n) FROM counted GROUP BY name, block"""

GAP_HISTOGRAM = f"""WITH row_of AS (
  SELECT request, end_at_ns, start_position + token_count AS reached,
    max(start_position + token_count) OVER past AS before
  FROM slice WHERE run_id = $1 AND end_at_ns BETWEEN $2 AND $3
  WINDOW past AS (PARTITION BY request ORDER BY end_at_ns ROWS BETWEEN UNBOUNDED PRECEDING
    AND 1 PRECEDING)
), token AS (
  SELECT request, end_at_ns, lag(end_at_ns) OVER (PARTITION BY request ORDER BY end_at_ns) AS last
  FROM row_of JOIN (SELECT request, prompt_tokens FROM request_start WHERE run_id = $1)
    USING (request)
  WHERE reached >= prompt_tokens AND (before IS NULL OR reached > before)
), counted AS (
  SELECT {_BLOCK.format(at="end_at_ns")} AS block,
    floor(ln(greatest(1, end_at_ns - last)) / {BUCKET!r})::BIGINT AS bucket, count(*) AS n
  FROM token WHERE last IS NOT NULL GROUP BY ALL
)
SELECT 'itl', block, list(bucket), list(n) FROM counted GROUP BY block"""
"""Gaps between the commits of a request's tokens: a row that reaches further than any before."""
