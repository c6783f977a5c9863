"""Recorded traffic of others: the samples in bench/data as rows of instant, lengths and blocks.

Owns their reading, their licences and the scaling of lengths to a model's context;
bench/lab/make.py picks a stretch of one. Rows say how long requests were, never what they said.
"""

import csv
import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path

from bench.lab.workload import Slo

DATA = Path(__file__).parents[1] / "data"
AZURE_LICENCE = "CC-BY-4.0; cite Patel et al., Splitwise, ISCA 2024"
MOONCAKE_BLOCK_TOKENS = 512
LONGEST_SHARE = 0.99
"""So much of a trace fits the context after scaling; what is longer is cut."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace; `blocks` name the parts of its prompt, equal ones are shared.

    Of a record of ours: `shared_tokens` of its prompt were cached, and who asked how.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    shared_tokens: int = 0
    tenant: str | None = None
    priority: int | None = None
    slo: Slo | None = None
    leaves_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """A sample of a trace, in the order of its instants."""

    source: str
    licence: str
    rows: list[Row]
    block_tokens: int = 0


def azure(kind: str) -> Trace:
    """Return the Azure 2023 sample, `kind` conv or code."""
    with (DATA / f"azure_{kind}_2023.csv").open(newline="") as file:
        rows = [
            Row(
                float(line["arrival_s"]),
                int(line["context_tokens"]),
                int(line["generated_tokens"]),
            )
            for line in csv.DictReader(file)
        ]
    return Trace(f"Azure LLM inference trace 2023, {kind}", AZURE_LICENCE, rows)


def mooncake() -> Trace:
    """Return the Mooncake conversation sample; its hash ids are blocks of 512 tokens."""
    with gzip.open(DATA / "mooncake_conversation.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    rows = [
        Row(
            line["timestamp"] / 1e3,
            line["input_length"],
            line["output_length"],
            tuple(line["hash_ids"]),
        )
        for line in lines
    ]
    return Trace(
        "Mooncake conversation trace, FAST 2025", "Apache-2.0", rows, MOONCAKE_BLOCK_TOKENS
    )


def scale_to(trace: Trace, context_tokens: int) -> float:
    """Return what lengths are multiplied by so that nearly all requests fit; at most 1."""
    whole = sorted(row.prompt_tokens + row.output_tokens for row in trace.rows)
    longest = whole[int(LONGEST_SHARE * (len(whole) - 1))]
    return min(1.0, context_tokens / longest)


def scaled(row: Row, scale: float, context_tokens: int) -> Row:
    """Return a row with lengths scaled, at least 1 each, together within the context.

    Prompt is cut before output is: a cut output would end a request that the trace let run.
    """
    output = max(1, min(round(row.output_tokens * scale), context_tokens // 2))
    prompt = max(1, min(round(row.prompt_tokens * scale), context_tokens - output))
    shared = min(prompt, round(row.shared_tokens * scale))
    return replace(row, prompt_tokens=prompt, output_tokens=output, shared_tokens=shared)
