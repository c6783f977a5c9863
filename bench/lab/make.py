"""Workloads by name: a source of lengths, an arrival process, tenants, objectives, who leaves.

Owns Recipe, what a workload is made from, and the making. The experiment makes one for each rate
and repeat, `iterscope lab workload` writes one to a file. The same recipe, rate, seconds and seed
give the same file. Must never read the clock.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.lab import arrivals, prompts, traces
from bench.lab.recorded import recorded
from bench.lab.traces import Row, Trace
from bench.lab.workload import ASKS_MAX, SECONDS_MAX, Ask, Slo, Workload, WorkloadError

TRACES: dict[str, Callable[[], Trace]] = {
    "azure-conv": lambda: traces.azure("conv"),
    "azure-code": lambda: traces.azure("code"),
    "mooncake": traces.mooncake,
}
TEXTS = {"gsm8k": "MIT, (c) 2021 OpenAI", "mt_bench": "Apache-2.0", "vicuna_bench": "Apache-2.0"}
SYNTHETIC = "synthetic"
RECORDED = "recorded:"
SOURCES = (SYNTHETIC, *TRACES, *TEXTS, f"{RECORDED}PATH")
ARRIVALS = ("trace", "poisson", "bursts", "diurnal", "closed")
SYNTHETIC_PROMPT, SYNTHETIC_OUTPUT = (16, 256), (8, 96)
TEXT_OUTPUT = 96
CONTEXT_TOKENS_MAX = 2**20
TENANTS_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a workload is made from.

    `arrivals` of "trace" are those of the source; a source without instants comes by chance.
    `classes` are objectives with the share of requests that have each. `cancelled_share` of the
    clients leave, each after a patience drawn around `patience_s`.
    """

    source: str = SYNTHETIC
    arrivals: str = "trace"
    context_tokens: int = 512
    ids_below: int = prompts.IDS_BELOW
    tenants: int = 1
    classes: tuple[tuple[float, Slo], ...] = ()
    cancelled_share: float = 0.0
    patience_s: float = 2.0


def make(
    recipe: Recipe,
    *,
    rate: float | None,
    seconds: float,
    seed: int,
    concurrency: int | None = None,
) -> Workload:
    """Return the workload: rate x seconds requests, a stretch of the source that the seed picks.

    In a closed loop `rate` only says how many there are to take from. Without a rate the source is
    sent whole, at its own instants, as long as it took. Raises WorkloadError.
    """
    check_recipe(recipe)
    count = _count(rate, seconds)
    closed = recipe.arrivals == "closed" or concurrency is not None
    if closed and concurrency is None:
        raise WorkloadError("concurrency: needed where arrivals are closed")
    if closed and rate is None:
        raise WorkloadError("rate: needed; in a closed loop rate x seconds is how many there are")
    trace = _trace(recipe, count, seed)
    at_s: list[float] | list[None]
    if rate is None:
        rows, scale, at_s, seconds = _whole(trace, recipe)
        count = len(rows)
    else:
        rows, scale = _stretch(_shuffled(trace, seed) if closed else trace, recipe, count, seed)
        at_s = [None] * count if closed else _instants(recipe, rows, seconds, seed)
    pick = random.Random(f"people-{seed}")
    asks = [
        _ask(recipe, row, at, pick, (trace, scale, f"{seed}-{number}"))
        for number, (row, at) in enumerate(zip(rows, at_s, strict=True))
    ]
    return Workload(
        name=recipe.source,
        source=trace.source,
        licence=trace.licence,
        arrivals="closed" if closed else _arrivals(recipe, trace),
        seed=seed,
        seconds=seconds,
        asks=asks,
        rate=None if closed else count / seconds,
        concurrency=concurrency if closed else None,
        scale=scale,
        context_tokens=recipe.context_tokens,
    )


def check_recipe(recipe: Recipe) -> None:
    """Raise WorkloadError, which names the field, for a recipe that nothing can be made from."""
    if recipe.arrivals not in ARRIVALS:
        raise WorkloadError(f"arrivals: {recipe.arrivals!r} is none of {', '.join(ARRIVALS)}")
    if not 16 <= recipe.context_tokens <= CONTEXT_TOKENS_MAX:
        raise WorkloadError(f"context: must lie within 16 and {CONTEXT_TOKENS_MAX}")
    if not 16 <= recipe.ids_below < 2**31:
        raise WorkloadError("ids-below: must lie within 16 and 2147483647")
    if not 1 <= recipe.tenants <= TENANTS_MAX:
        raise WorkloadError(f"tenants: must lie within 1 and {TENANTS_MAX}")
    if not 0 <= recipe.cancelled_share <= 1:
        raise WorkloadError("cancelled: a share lies within 0 and 1")
    if not 0 < recipe.patience_s <= SECONDS_MAX:
        raise WorkloadError(f"patience-s: must be above 0 and at most {SECONDS_MAX}")
    if sum(share for share, _ in recipe.classes) > 1 + 1e-9:
        raise WorkloadError("class: the shares add up to more than 1")


def _count(rate: float | None, seconds: float) -> int:
    if not 0 < seconds <= SECONDS_MAX:
        raise WorkloadError(f"seconds: must be above 0 and at most {SECONDS_MAX}")
    if rate is None:
        return 2
    if not 0 < rate * seconds <= ASKS_MAX:
        raise WorkloadError(f"rate: {rate:g} for {seconds:g} s is not 1 to {ASKS_MAX} requests")
    return max(2, round(rate * seconds))


def _whole(trace: Trace, recipe: Recipe) -> tuple[list[Row], float, list[float], float]:
    """Return all rows with their scale, their own instants, and the seconds they took."""
    if not _timed(trace) or recipe.arrivals != "trace":
        raise WorkloadError("rate: needed where arrivals are not the source's own")
    scale = traces.scale_to(trace, recipe.context_tokens)
    rows = [traces.scaled(row, scale, recipe.context_tokens) for row in trace.rows]
    at_s = [row.at_s - rows[0].at_s for row in rows]
    return rows, scale, at_s, at_s[-1] * len(rows) / (len(rows) - 1)


def _trace(recipe: Recipe, count: int, seed: int) -> Trace:
    name = recipe.source
    if name in TRACES:
        return TRACES[name]()
    if name.startswith(RECORDED):
        return recorded(Path(name.removeprefix(RECORDED)).expanduser())
    pick = random.Random(f"lengths-{seed}")
    if name in TEXTS:
        rows = [Row(0.0, 0, TEXT_OUTPUT) for _ in range(count)]
        return Trace(name, TEXTS[name], rows)
    if name != SYNTHETIC:
        raise WorkloadError(f"workload: {name!r} is none of {', '.join(SOURCES)}")

    def length(low: int, high: int) -> int:
        return round(math.exp(pick.uniform(math.log(low), math.log(high))))

    rows = [Row(0.0, length(*SYNTHETIC_PROMPT), length(*SYNTHETIC_OUTPUT)) for _ in range(count)]
    return Trace("log-uniform lengths", "none needed", rows)


def _stretch(trace: Trace, recipe: Recipe, count: int, seed: int) -> tuple[list[Row], float]:
    """Return consecutive rows from a place that the seed picks, and what lengths were scaled by.

    A sample that is too short goes on at its beginning, later by its span.
    """
    scale = traces.scale_to(trace, recipe.context_tokens)
    rows = trace.rows
    begin = random.Random(f"stretch-{seed}").randrange(len(rows)) if _timed(trace) else 0
    span = rows[-1].at_s - rows[0].at_s + 1e-3
    found = []
    for number in range(begin, begin + count):
        turn, place = divmod(number, len(rows))
        row = traces.scaled(rows[place], scale, recipe.context_tokens)
        found.append(replace(row, at_s=row.at_s + turn * span))
    return found, scale


def _shuffled(trace: Trace, seed: int) -> Trace:
    """Return a trace in random order, without instants.

    In a closed loop it is not known how many will be sent: whoever is, stands for the whole sample.
    """
    rows = random.Random(f"shuffled-{seed}").sample(trace.rows, len(trace.rows))
    return replace(trace, rows=[replace(row, at_s=0.0) for row in rows])


def _timed(trace: Trace) -> bool:
    return trace.rows[-1].at_s > trace.rows[0].at_s


def _arrivals(recipe: Recipe, trace: Trace) -> str:
    return "poisson" if recipe.arrivals == "trace" and not _timed(trace) else recipe.arrivals


def _instants(recipe: Recipe, rows: list[Row], seconds: float, seed: int) -> list[float]:
    count = len(rows)
    if recipe.arrivals == "trace" and rows[-1].at_s > rows[0].at_s:
        return arrivals.replayed([row.at_s for row in rows], seconds)
    if recipe.arrivals == "bursts":
        return arrivals.bursts(count, seconds, seed)
    if recipe.arrivals == "diurnal":
        return arrivals.diurnal(count, seconds, seed)
    return arrivals.poisson(count, seconds, seed)


def _ask(
    recipe: Recipe,
    row: Row,
    at_s: float | None,
    pick: random.Random,
    made_of: tuple[Trace, float, str],
) -> Ask:
    trace, scale, salt = made_of
    prompt = _prompt(recipe, row, trace, scale, salt)
    # Draws come in the same order whatever the recipe asks for: what one turns on moves no other.
    shares, leaves, patience = pick.random(), pick.random(), pick.expovariate(1.0)
    tenant_draw, priority = pick.random(), row.priority
    leaves_after_s = row.leaves_after_s
    if leaves_after_s is None and leaves < recipe.cancelled_share:
        leaves_after_s = round(patience * recipe.patience_s, 3)
    return Ask(
        prompt=prompt,
        max_tokens=row.output_tokens,
        at_s=None if at_s is None else round(at_s, 6),
        prompt_tokens=None if isinstance(prompt, str) else len(prompt),
        ignore_eos=not isinstance(prompt, str),
        tenant=row.tenant or _tenant(recipe.tenants, tenant_draw),
        priority=priority,
        slo=row.slo or _class(recipe.classes, shares),
        leaves_after_s=leaves_after_s,
    )


def _prompt(recipe: Recipe, row: Row, trace: Trace, scale: float, salt: str) -> list[int] | str:
    if trace.source in TEXTS:
        texts = prompts.texts(trace.source)
        return random.Random(f"text-{salt}").choice(texts)
    if row.blocks:
        block_tokens = max(1, round(trace.block_tokens * scale))
        return prompts.shared(row.blocks, block_tokens, row.prompt_tokens, recipe.ids_below)
    common = prompts.ids(row.shared_tokens, "common", recipe.ids_below)
    own = row.prompt_tokens - row.shared_tokens
    return common + prompts.ids(own, salt, recipe.ids_below)


def _tenant(tenants: int, draw: float) -> str | None:
    """Return one of so many tenants; the k-th sends in proportion to 1 / k."""
    if tenants <= 1:
        return None
    weights = [1 / rank for rank in range(1, tenants + 1)]
    rest = draw * sum(weights)
    for rank, weight in enumerate(weights, 1):
        rest -= weight
        if rest < 0:
            return f"tenant-{rank}"
    return f"tenant-{tenants}"


def _class(classes: tuple[tuple[float, Slo], ...], draw: float) -> Slo | None:
    for share, slo in classes:
        draw -= share
        if draw < 0:
            return slo
    return None
