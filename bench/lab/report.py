"""The lab's report: one HTML file that needs nothing else, drawn from a result.

Owns the page's order, its head and the writing of the file; the lab calls `write` when it is done
and after what it kept of an unfinished experiment. The parts are in bench/lab/page. Nothing is
fetched, nothing runs but the script that shows a figure under the pointer, and the page forbids
both by its own policy. Must never draw what the result does not say.
"""

import base64
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.lab.page.curves import curves
from bench.lab.page.ground import equality, ground
from bench.lab.page.markup import Safe, join, tag
from bench.lab.page.numbers import plain
from bench.lab.page.reasons import reasons
from bench.lab.page.steps import steps
from bench.lab.page.verdicts import comparisons, headline, verdicts

PAGE = Path(__file__).parent / "page"
CONTENTS = (
    ("verdicts", "Verdicts"),
    ("rates", "Against the rate"),
    ("comparisons", "Compared"),
    ("steps", "Steps"),
    ("reasons", "Why"),
    ("equality", "Same answers"),
    ("ground", "Ground"),
)


def write(result: dict[str, Any], path: Path) -> None:
    """Write the report of a result, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(page(result), encoding="utf-8")
    unfinished.replace(path)


def page(result: dict[str, Any]) -> str:
    """Return the report."""
    style = Safe((PAGE / "style.css").read_text(encoding="utf-8"))
    script = Safe((PAGE / "hover.js").read_text(encoding="utf-8"))
    patterns = Safe((PAGE / "patterns.svg").read_text(encoding="utf-8"))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    title = f"Batching lab: {result.get('name') or 'a result'}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", style),
    )
    sections = {
        "verdicts": verdicts(result),
        "rates": curves(result),
        "comparisons": comparisons(result),
        "steps": steps(result),
        "reasons": reasons(result),
        "equality": equality(result),
        "ground": ground(result),
    }
    main = tag("main", headline(result), join(sections.values()))
    top = _top(result, [name for name, inside in sections.items() if inside])
    body = tag("body", patterns, top, main, tag("script", script))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _top(result: dict[str, Any], there: list[str]) -> Safe:
    settings, machine = result.get("settings") or {}, result.get("machine") or {}
    load = result.get("workload") or {}
    began = min((run["began_unix_s"] for run in result.get("runs") or []), default=None)
    when = (
        None if began is None else datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%d %H:%M UTC")
    )
    cores = f"{machine.get('cores')} cores of {machine['cpu']}" if machine.get("cpu") else None
    facts = [
        settings.get("model") and Path(str(settings["model"])).name,
        load.get("name") and f"{load['name']}, {load.get('arrivals')}",
        cores,
        when,
    ]
    done, planned = result.get("runs_done"), result.get("runs_planned")
    unfinished = None
    if not result.get("complete"):
        unfinished = tag(
            "p",
            f"Not complete: {plain(done)} of {plain(planned)} runs. Intervals and verdicts rest on "
            "what there is.",
            class_="unfinished",
        )
    links = [tag("a", word, href=f"#{name}") for name, word in CONTENTS if name in there]
    return tag(
        "header",
        tag("h1", "Batching lab", tag("span", str(result.get("name") or ""), class_="unit")),
        tag("p", " · ".join(str(fact) for fact in facts if fact), class_="what"),
        unfinished,
        tag("nav", links, aria_label="sections"),
    )
