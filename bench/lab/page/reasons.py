"""Why requests waited, where their time went, and what a fixed batch cost.

Owns how the closed list of causes is gathered into what a picture can show, and the captions;
bench/lab/report.py puts the section into the page. Every cause of a result is in one part and one
alone, so a bar is as long as a life. Computes no statistic.
"""

from types import MappingProxyType

from bench.lab.page.arms import Result, baseline_of, in_order, rate_in_words
from bench.lab.page.bars import Bar, Part, stacked
from bench.lab.page.figure import Table, Told, figure, figures, key_of_fills, section
from bench.lab.page.markup import Safe, tag
from bench.lab.page.numbers import valued

WAITS = MappingProxyType(
    {
        "no place in the batch": ("w-seqs", ("queue_seqs",)),
        "batch closed": ("w-closed", ("queue_batch_closed",)),
        "token budget": ("w-budget", ("queue_budget", "queue_prefill_cap")),
        "KV full": ("w-kv", ("queue_kv",)),
        "policy": ("w-policy", ("queue_policy", "queue_slo", "queue_dependency")),
        "preempted": ("w-preempted", ("preempted_kv", "preempted_policy", "recompute")),
        "passed over": ("w-passed", ("passed_over",)),
        "held by the batch": ("w-held", ("batch_held",)),
        "next step": ("w-step", ("step_boundary",)),
    }
)
WORK = MappingProxyType(
    {
        "own prefill": ("l-prefill", ("own_prefill",)),
        "own decode": ("l-decode", ("own_decode",)),
        "neighbours' prefill": ("l-neighbour-prefill", ("neighbour_prefill",)),
        "neighbours' decode": ("l-neighbour-decode", ("neighbour_decode", "padding")),
        "waiting": ("l-waiting", tuple(c for _, causes in WAITS.values() for c in causes)),
        "host and network": ("l-host", ("scheduler", "tokenize", "output", "client_stall")),
        "not known": ("l-unknown", ("unexplained",)),
    }
)
LOST = ("idle_row_ms", "batch_held_ms", "batch_closed_ms")
Gathered = MappingProxyType[str, tuple[str, tuple[str, ...]]]


def reasons(result: Result) -> Safe:
    """Return the section."""
    rows = in_order(result, [row for row in result.get("waits") or [] if row["causes"]])
    drawn = []
    if rows:
        drawn = [_waits(result, rows), _life(result, rows)]
    return section("reasons", "Why", figures([*drawn, _lost(result)]) or None)


def _waits(result: Result, rows: list[Result]) -> Safe:
    told = Told(
        name="waits",
        title="Waiting by reason",
        unit="of a mean request",
        caption=(
            "Time in which a mean request computed nothing, by the check that kept it out. Batch "
            "closed is a place in a batch that takes nobody; held by the batch is an answer that "
            "is over and waits for the others."
        ),
    )
    return _bars(result, told, rows, WAITS)


def _life(result: Result, rows: list[Result]) -> Safe:
    told = Told(
        name="life",
        title="Where a mean request's time went",
        unit="of a mean request",
        caption=(
            "The whole life of a mean request, received to last write. Neighbours' time is the "
            "part of shared steps that others' tokens took, by the fitted step model."
        ),
    )
    return _bars(result, told, rows, WORK)


def _bars(result: Result, told: Told, rows: list[Result], gathered: Gathered) -> Safe:
    bars = [
        Bar(
            group=rate_in_words(result, row["fraction"]),
            name=row["arm"],
            parts=[
                Part(fill=fill, name=name, value=sum(row["causes"].get(c) or 0.0 for c in causes))
                for name, (fill, causes) in gathered.items()
            ],
        )
        for row in rows
    ]
    used = {part.name for bar in bars for part in bar.parts if part.value > 0}
    key = key_of_fills((fill, name) for name, (fill, _) in gathered.items() if name in used)
    return figure(
        told,
        [key, stacked(told, bars, "ms", "time of a mean request")],
        _causes_table(result, rows, {c for _, causes in gathered.values() for c in causes}),
        wide=True,
    )


def _causes_table(result: Result, rows: list[Result], of: set[str]) -> Table:
    found = sorted({cause for row in rows for cause, ms in row["causes"].items() if ms} & of)
    cells = [
        [
            rate_in_words(result, row["fraction"]),
            row["arm"],
            str(row["requests"]),
            *(valued(row["causes"].get(cause) or 0.0, "ms") for cause in found),
        ]
        for row in rows
    ]
    return Table(["rate", "arm", "requests", *found], cells, texts=2)


def _lost(result: Result) -> Safe:
    found = result.get("static_lost") or []
    rows = in_order(result, [row for row in found if row["arm"] != baseline_of(result)])
    costly = {row["arm"] for row in found if any(row[name] for name in LOST)}
    if not costly & {row["arm"] for row in rows}:
        return Safe("")  # no arm is a fixed batch
    base = baseline_of(result)
    told = Told(
        name="lost",
        title="Why a fixed batch lost",
        unit="ms",
        caption=(
            "What its rules cost: device time spent on rows of requests that were over, and time "
            "of a mean request outside a closed batch and inside one that was done with it."
            + ("" if base in costly else f" None of it exists with {base}.")
        ),
    )
    heads = ["rate", "arm", "idle rows", "device on idle rows", "waits outside", "held inside"]
    cells = [
        [
            rate_in_words(result, row["fraction"]),
            row["arm"],
            valued(row["idle_rows_share"], "share"),
            valued(row["idle_row_ms"], "ms"),
            valued(row["batch_closed_ms"], "ms"),
            valued(row["batch_held_ms"], "ms"),
        ]
        for row in rows
    ]
    bars = [
        Bar(
            group=rate_in_words(result, row["fraction"]),
            name=row["arm"],
            parts=[
                Part(
                    fill="w-closed",
                    name="outside a closed batch",
                    value=row["batch_closed_ms"] or 0,
                ),
                Part(fill="w-held", name="held by the batch", value=row["batch_held_ms"] or 0),
            ],
        )
        for row in rows
    ]
    key = key_of_fills((("w-closed", "outside a closed batch"), ("w-held", "held by the batch")))
    worst = max(rows, key=lambda row: row["batch_held_ms"] or 0.0)
    says = tag(
        "p",
        f"At {rate_in_words(result, worst['fraction'])} a mean request of {worst['arm']} was over "
        f"and held for {valued(worst['batch_held_ms'], 'ms')}, after "
        f"{valued(worst['batch_closed_ms'], 'ms')} outside a closed batch; "
        f"{valued(worst['idle_rows_share'], 'share')} of all rows, "
        f"{valued(worst['idle_row_ms'], 'ms')} of the device, computed for nobody.",
        class_="finding",
    )
    picture = [says, key, stacked(told, bars, "ms", "time of a mean request")]
    return figure(told, picture, Table(heads, cells, texts=2), wide=True)
