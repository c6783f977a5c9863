"""What the figures stand on: the requests, the settings, the machine, each run, and its limits.

Owns the sections that let a reader judge whether to believe the rest; bench/lab/report.py puts them
into the page. Says it aloud where the generator or the host was the limit, or where outputs
differed. Computes no statistic.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from bench.lab.page.arms import Result, rate_in_words
from bench.lab.page.figure import Table, section, table
from bench.lab.page.markup import Safe, join, tag
from bench.lab.page.numbers import NOTHING, TIMES, plain, sentence, valued

DIFFERING_MAX = 40


def equality(result: Result) -> Safe:
    """Return whether all arms gave the same answers."""
    found = result.get("equality") or {}
    if not found:
        return Safe("")
    checked, same = found["checked"], found["same"]
    differing = found.get("differing") or []
    forbidden = [row for row in differing if row["allowed"] is False]
    if not checked:
        says, mark = "No outputs were compared.", "unknown"
    elif same == checked:
        says, mark = f"All {plain(checked)} outputs are the same, token for token.", "holds"
    else:
        says = f"{plain(same)} of {plain(checked)} outputs are the same, token for token. "
        says += (
            f"{plain(len(forbidden))} differ where the two best were far apart: that is wrong."
            if forbidden
            else "The others part where the two best tokens are closer than the tolerance."
        )
        mark = "fails" if forbidden else "mixed"
    cells = [
        [
            str(row["arm"]),
            str(row["request"]),
            str(row["at_token"]),
            _known(row["gap"]),
            _known(row["tolerance"]),
            {True: "allowed", False: "not allowed", None: "not known"}[row["allowed"]],
        ]
        for row in sorted(differing, key=lambda row: row["allowed"] is not False)[:DIFFERING_MAX]
    ]
    heads = ["arm", "request", "first differs at token", "gap of the two best", "tolerance", ""]
    return section(
        "equality",
        "Are the answers the same?",
        tag("p", says, class_=f"finding {mark}"),
        tag("p", sentence(str(found["how"])), class_="what") if found.get("how") else None,
        table(Table(heads, cells, texts=2)) if cells else None,
        tag("p", f"and {len(differing) - len(cells)} more", class_="faint")
        if len(differing) > len(cells)
        else None,
    )


def _known(value: Any) -> str:
    return NOTHING if value is None else plain(float(f"{value:.3g}"))


def ground(result: Result) -> Safe:
    """Return requests, settings, machine, generator and notes."""
    return section(
        "ground",
        "What this stands on",
        tag(
            "div",
            _facts("Requests", _workload(result)),
            _facts("Settings", _settings(result)),
            _facts("Machine", _machine(result)),
            _facts("Generator", _generator(result)),
            class_="facts",
        ),
        _notes(result),
        _arms(result),
        _runs(result),
    )


def _facts(title: str, pairs: Iterable[tuple[str, str]]) -> Safe:
    rows = [join([tag("dt", name), tag("dd", value)]) for name, value in pairs if value]
    return tag("div", tag("h3", title), tag("dl", rows)) if rows else Safe("")


def _workload(result: Result) -> Iterable[tuple[str, str]]:
    load = result.get("workload") or {}
    yield "name", str(load.get("name", ""))
    yield "source", str(load.get("source", ""))
    yield "licence", str(load.get("licence", ""))
    yield "arrivals", str(load.get("arrivals", ""))
    if load.get("requests") is not None:
        yield "requests", f"{plain(load['requests'])} for each arm, over all its runs"
    for name in ("prompt", "output"):
        lengths = load.get(f"{name}_tokens") or {}
        if lengths:
            yield f"{name} tokens", ", ".join(f"{k} {plain(v)}" for k, v in lengths.items())
    scale = load.get("scale")
    if scale not in (None, 1, 1.0):
        context = load.get("context_tokens")
        yield "scaled", f"lengths by {plain(scale)}, to fit {plain(context)} tokens"
    tenants, left = load.get("tenants"), load.get("cancelled_share")
    yield "tenants", "" if tenants in (None, 0, 1) else plain(tenants)
    yield "cancelled", valued(left, "share") if left else ""


def _settings(result: Result) -> Iterable[tuple[str, str]]:
    settings = result.get("settings") or {}
    capacity = result.get("capacity") or {}
    yield "model", str(settings.get("model", ""))
    yield "flags", " ".join(str(flag) for flag in settings.get("flags") or [])
    if capacity.get("requests_s"):
        concurrency = capacity.get("concurrency")
        beside = f" with {plain(concurrency)} in flight" if concurrency else ""
        shown = plain(float(f"{capacity['requests_s']:.3g}"))
        yield "capacity", f"{shown} requests/s of {capacity.get('arm')}{beside}"
    if settings.get("seconds") is not None:
        cut = valued(settings.get("cut_off_s"), "s")
        yield "a run", f"{valued(settings['seconds'], 's')} of requests, cut off {cut} after them"
    yield "repeats", str(settings.get("repeats", ""))
    yield "seed", str(settings.get("seed", ""))
    yield "intervals", f"{valued(settings.get('confidence'), 'share')}, Student's t"
    yield "command", str(settings.get("command", ""))


def _machine(result: Result) -> Iterable[tuple[str, str]]:
    machine = result.get("machine") or {}
    yield "CPU", str(machine.get("cpu", ""))
    yield "cores", str(machine.get("cores", ""))
    yield "system", str(machine.get("system", ""))
    yield "versions", ", ".join(f"{k} {v}" for k, v in (result.get("versions") or {}).items())
    yield "revision", str(result.get("revision", ""))
    yield "taken by the host", valued(result.get("stolen_share"), "share")
    yield "took", f"{plain(round((result.get('seconds') or 0.0) / 60, 1))} min"
    load = result.get("load_average")
    yield "load average", "" if load is None else plain(round(load, 2))


def _generator(result: Result) -> Iterable[tuple[str, str]]:
    found = result.get("generator") or {}
    top = found.get("top_rate_requests_s")
    yield "top rate", "" if top is None else valued(float(f"{top:.3g}"), "requests/s")
    ceiling = found.get("ceiling") or {}
    if ceiling.get("requests_s"):
        shown = valued(float(f"{ceiling['requests_s']:.3g}"), "requests/s")
        beside = f", {plain(ceiling['requests_s'] / top)}{TIMES} the top rate" if top else ""
        yield "ceiling", shown + beside
    yield "latest send", valued(found.get("late_ms_max"), "ms")
    yield "its core", valued(found.get("cpu_share_max"), "share")
    slow = found.get("bottleneck_runs")
    if slow is not None:
        yield "was the limit", f"in {plain(slow)} runs" if slow else "in no run"


def _notes(result: Result) -> Safe | None:
    notes = [tag("li", str(note)) for note in result.get("notes") or []]
    return join([tag("h3", "Notes"), tag("ul", notes, class_="notes")]) if notes else None


def _arms(result: Result) -> Safe | None:
    arms = result.get("arms") or []
    if not arms:
        return None
    rows = [
        [
            str(arm["name"]) + (" (baseline)" if arm.get("baseline") else ""),
            " ".join(str(flag) for flag in arm["flags"]) or "as it comes",
        ]
        for arm in arms
    ]
    return join(
        [tag("h3", "Arms"), table(Table(["arm", "flags beside the settings'"], rows, texts=2))]
    )


def _runs(result: Result) -> Safe | None:
    runs = sorted(result.get("runs") or [], key=lambda run: run["order"])
    if not runs:
        return None
    heads = ["arm", "began (UTC)", "rate", "repeat", "order", "sent", "finished", "cancelled"]
    heads += ["unfinished", "failed", "sends late p50", "clock ±", "stolen", "others", "generator"]
    rows = [_run(result, run) for run in runs]
    return tag(
        "details",
        tag("summary", "Every run", tag("span", plain(len(rows)), class_="unit")),
        table(Table(heads, rows, texts=3)),
        class_="numbers",
    )


def _run(result: Result, run: Result) -> list[str]:
    asked, generator = run["requests"], run["generator"]
    error_ns = (run.get("clock") or {}).get("error_ns")
    failed = (asked.get("failed") or 0) + (asked.get("refused") or 0)
    return [
        str(run["arm"]),
        datetime.fromtimestamp(run["began_unix_s"], UTC).strftime("%H:%M:%S"),
        rate_in_words(result, run["fraction"]),
        str(run["repeat"]),
        str(run["order"]),
        *(plain(asked.get(name)) for name in ("sent", "finished", "cancelled", "unfinished")),
        plain(failed),
        valued(round(generator["late_ms_p50"], 2), "ms"),
        NOTHING if error_ns is None else valued(round(error_ns / 1e6, 2), "ms"),
        valued(run.get("stolen_share"), "share"),
        valued(run.get("others_cpu_share"), "share"),
        "the limit" if generator.get("bottleneck") else "",
    ]
