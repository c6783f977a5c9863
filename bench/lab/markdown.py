"""An experiment's result as a page of Markdown: for docs/, where a reader looks before running it.

Owns that page; `iterscope lab report DIR --markdown FILE` writes it. The report in HTML draws the
same result. Must never compute a figure: what is written stands in the result.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.lab.curves import open_ended

COLUMNS = (
    ("output_tok_s", "tokens/s", 1),
    ("ttft_p50_ms", "first token p50, ms", 0),
    ("ttft_p99_ms", "first token p99, ms", 0),
    ("itl_p99_ms", "gap p99, ms", 1),
    ("goodput_share", "in time", 2),
    ("useful_rows_share", "useful rows", 2),
    ("device_busy_share", "device busy", 2),
)
COMPARED = ("output_tok_s", "goodput_share", "ttft_p99_ms", "itl_p99_ms")


def write(result: dict[str, Any], path: Path) -> None:
    """Write the page."""
    path.write_text("\n".join(page(result)) + "\n", encoding="utf-8")


def page(result: dict[str, Any]) -> Iterator[str]:
    """Yield the page's lines."""
    settings, work = result["settings"], result["workload"]
    machine = result["machine"]
    yield f"# The batching lab: {_text(result['name'])}"
    yield ""
    yield (
        f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('system')}; revision "
        f"{result['revision']}. {result['runs_done']} of {result['runs_planned']} runs of "
        f"{settings['seconds']:g} s, cut off {settings['cut_off_s']:g} s after the last arrival, "
        f"in {result['seconds'] / 60:.0f} minutes. The host stole {result['stolen_share']:.1%} of "
        "the CPU on average. Written by `iterscope lab report DIR --markdown FILE`, not by hand."
    )
    yield ""
    yield f"- command: {_code(settings['command'])}"
    yield f"- every arm: {_code(' '.join(('iterscope serve', *settings['flags'])))}"
    yield from _work(result, work)
    yield ""
    yield from _rates(result)
    yield ""
    yield from _within(result)
    yield from _ratios(result)
    yield from _verdicts(result)
    yield from _ground(result)


def _work(result: dict[str, Any], work: dict[str, Any]) -> Iterator[str]:
    slo = result["settings"]["slo"]
    yield (
        f"- workload: {_text(work['source'])} ({work['licence']}), arrivals {work['arrivals']}, "
        f"{work['requests']} requests an arm, lengths x {work['scale']:.3f}: output mean "
        f"{work['output_tokens']['mean']:.0f}, p99 {work['output_tokens']['p99']:.0f} tokens"
        + (
            f"; prompts mean {work['prompt_tokens']['mean']:.0f}, p99 "
            f"{work['prompt_tokens']['p99']:.0f}"
            if work["prompt_tokens"]
            else ""
        )
    )
    yield (
        f"- objective: first token by {slo['ttft_ms']:g} ms, each after it {slo['tpot_ms']:g} ms "
        "later; a request is in time if every token is"
    )
    if capacity := result["capacity"]:
        yield (
            f"- capacity of {_text(capacity['arm'])} with all slots full: "
            f"{capacity['requests_s']:.2f} requests/s, {capacity['output_tok_s']:.0f} tokens/s; "
            "rates are parts of it"
        )


def _rates(result: dict[str, Any]) -> Iterator[str]:
    yield "Means over repeats; intervals stand in the report."
    yield ""
    yield "| x capacity | requests/s | arm | " + " | ".join(one[1] for one in COLUMNS) + " |"
    yield "|--:|--:|---|" + "--:|" * len(COLUMNS)
    for curve in sorted(result["curves"], key=lambda curve: float(curve["fraction"])):
        cells = []
        for name, _, digits in COLUMNS:
            figure = curve["figures"].get(name)
            cells.append("" if figure is None else f"{figure['mean']:,.{digits}f}")
        yield (
            f"| {curve['fraction']:g} | {curve['requests_s']:.2f} | {_text(curve['arm'])} | "
            + " | ".join(cells)
            + " |"
        )


def _within(result: dict[str, Any]) -> Iterator[str]:
    if not result["at_slo"]:
        return
    least = result["settings"]["attainment_min"]
    yield f"## What the objective allows ({least:.0%} of requests in time)"
    yield ""
    for row in result["at_slo"]:
        unit = "requests/s" if row["figure"] == "at_slo_requests_s" else "tokens/s"
        ours, theirs = (
            "at least " if row[name] in open_ended(result) else "" for name in ("arm", "baseline")
        )
        yield (
            f"- {_text(row['baseline'])} {theirs}{row['baseline_mean']:.2f} {unit}, "
            f"{_text(row['arm'])} "
            f"{ours}{row['arm_mean']:.2f}: {'no ratio' if ours or theirs else interval(row)}"
        )
    yield ""


def _ratios(result: dict[str, Any]) -> Iterator[str]:
    if not result["comparisons"]:
        return
    base = next((arm["name"] for arm in result["arms"] if arm["baseline"]), "")
    yield f"## Each arm against {_text(base)}, paired by repeat"
    yield ""
    yield "95 % intervals; * holds after Holm's correction over the rates."
    yield ""
    yield "| figure | x capacity | arm | ratio or difference | |"
    yield "|---|--:|---|---|---|"
    for row in result["comparisons"]:
        if row["figure"] in COMPARED:
            star = "*" if row["holm"] else ""
            yield (
                f"| {result['figures'][row['figure']]['title']} | {row['fraction']:g} | "
                f"{_text(row['arm'])} | {interval(row)}{star} | {row['verdict']} |"
            )
    yield ""


def interval(row: dict[str, Any]) -> str:
    """Return a comparison as people read it."""
    sign = "x " if row["kind"] == "ratio" else "by "
    value = f"{sign}{row['value']:.2f}"
    if row["low"] is None:
        return value
    return f"{value} ({row['low']:.2f} to {row['high']:.2f})"


def _verdicts(result: dict[str, Any]) -> Iterator[str]:
    if not result["hypotheses"]:
        return
    yield "## Verdicts"
    yield ""
    for one in result["hypotheses"]:
        asked = f"**{one['question']}** " if one["question"] else ""
        told = f"{asked}{_text(one['claim'])} **{one['verdict']}**: {_text(one['because'])}"
        yield f"- {told}"
    yield ""


def _text(words: str) -> str:
    """Return words as they are read: an arm may be called "a | b"."""
    return re.sub(r"([\\`*|<\[])", r"\\\1", words)


def _code(words: str) -> str:
    """Return a command as code, whatever quotes it holds."""
    longest = max(map(len, re.findall("`+", words)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {words} {fence}" if longest else f"{fence}{words}{fence}"


def _ground(result: dict[str, Any]) -> Iterator[str]:
    told, equal = result["generator"], result["equality"]
    ceiling = told["ceiling"] or {}
    yield "## What it stands on"
    yield ""
    yield (
        f"- The same tokens in {equal['same']} of {equal['checked']} answers compared"
        + (
            "."
            if not equal["differing"]
            else f"; where they part, the two tokens' scores lie up to "
            f"{max(one['gap'] or 0 for one in equal['differing']):.2f} apart "
            f"({'none beyond' if equal['allowed'] else 'some beyond'} the dtype's tolerance)."
        )
    )
    if ceiling.get("requests_s"):
        yield (
            f"- The generator alone sent {ceiling['requests_s']:.0f} requests/s "
            f"({ceiling['tok_s']:.0f} tokens/s) in time, "
            f"{ceiling['requests_s'] / ceiling['of']:.1f} times the top rate"
            + (", and was not tried further." if ceiling["climbed_all"] else ".")
        )
    yield (
        f"- Of all runs it was late by {told['late_ms_p99_max']:.1f} ms at worst (p99) and used "
        f"{told['cpu_share_max']:.1%} of a core."
    )
    for note in result["notes"]:
        yield f"- {note}"
