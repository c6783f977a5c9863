"""An explanation as text: a waterfall of causes with who stands behind each, gaps and timeline.

Owns the look of `iterscope explain`. A pure function from what GET /v1/requests/{id} answers to
lines of text, tested as whole text. Must never print a control character: ids come from strangers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from server.terminal import printable
from telemetry.causes import MEANINGS

BAR = 32
NAMED_SHOWN = 5
GAPS_SHOWN = 3
CAUSES_SHOWN = 3

Facts = Mapping[str, Any]


def explanation_text(body: Facts, width: int | None = None) -> str:
    """Return the text of an explanation, lines ending in a newline.

    On a narrow terminal the waterfall loses its last column, what each cause means.
    """
    waterfall = [line[:width] for line in _waterfall(body)]
    blocks = [list(_head(body)), waterfall, list(_token_times(body))]
    blocks.append(list(_timeline(body["timeline"])))
    lines = "\n\n".join("\n".join(block) for block in blocks if block)
    return "\n".join(line.rstrip() for line in lines.splitlines()) + "\n"


def _head(body: Facts) -> Iterator[str]:
    named = f" (client id {printable(body['external_id'])})" if body["external_id"] else ""
    state = body["state"]
    if body["finish"]:
        state = body["finish"] + (f" by {body['cancel_cause']}" if body["cancel_cause"] else "")
    so_far = "" if body["finish"] else " on record" if state == "lost" else " so far"
    yield f"{printable(body['request_id'])}{named}: {state}, {_ms(body['e2e_ms'])} ms{so_far}"
    parts = [f"prompt {_tokens(body['prompt_tokens'])}"]
    if body["cached_tokens"]:
        parts.append(f"{body['cached_tokens']} of them cached")
    parts.append(f"output {body['output_tokens']}")
    if body["preemptions"]:
        parts.append(f"preempted {_times(body['preemptions'])}")
    if body["recomputed_tokens"]:
        parts.append(f"{body['recomputed_tokens']} tokens recomputed")
    yield ", ".join(parts)
    if body["error"]:
        yield f"error: {printable(body['error'])}"
    if len(body["matches"]) > 1:
        yield f"the latest of {len(body['matches'])} requests with this id"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _waterfall(body: Facts) -> Iterator[str]:
    """Yield a line a cause, its bar where the one before ended; they fill the width exactly."""
    total = body["e2e_ms"]
    yield f"{'cause':<20}{'ms':>11}{'%':>7}  "
    passed = 0.0
    for part in body["causes"]:
        share = part["ms"] / total if total else 0.0
        begin = round(BAR * passed / total) if total else 0
        passed += part["ms"]
        end = max(begin + 1, round(BAR * passed / total) if total else 0)
        begin = min(begin, BAR - 1)
        bar = (" " * begin + "█" * (end - begin))[:BAR]
        yield (
            f"{part['cause']:<20}{_ms(part['ms']):>11}{100 * share:>7.1f}  "
            f"|{bar:<{BAR}}| {MEANINGS[part['cause']]}"
        )
        yield from _named(part)
    yield f"{'sum':<20}{_ms(passed):>11}{100.0 if total else 0.0:>7.1f}"
    if body["rule"] == "counted":
        yield "split by token counts: no step model was fitted yet"
    else:
        error = 100 * body["model_error"]
        yield f"split by the fitted step model, whose mean error was {error:.1f} %"


def _named(part: Facts) -> Iterator[str]:
    waits = part["cause"].startswith("queue_") or part["cause"] == "step_boundary"
    word = "behind" if waits else "for"
    if part["cause"].startswith("neighbour_"):
        word = "by"
    for one in part["requests"][:NAMED_SHOWN]:
        tokens = f", {_tokens(one['tokens'])}" if one["tokens"] else ""
        yield f"{'':<20}{_ms(one['ms']):>11}         {word} {printable(one['request_id'])}{tokens}"
    rest = len(part["requests"]) - NAMED_SHOWN + part.get("more", {}).get("requests", 0)
    if rest > 0:
        yield f"{'':<20}{'':>11}         and {rest} more"


def _token_times(body: Facts) -> Iterator[str]:
    first = body["ttft"]
    if first is not None:
        yield f"first write after {_ms(first['ms'])} ms: {_worst(first['causes'])}"
    gaps = sorted(body["gaps"], key=lambda gap: -gap["ms"])[:GAPS_SHOWN]
    for gap in gaps:
        yield (
            f"token {gap['token']} came at {_ms(gap['at_ms'])} ms, {_ms(gap['ms'])} ms after the "
            f"one before it: {_worst(gap['causes'])}"
        )


def _worst(causes: Sequence[Facts]) -> str:
    worst = sorted(causes, key=lambda part: -part["ms"])
    shown = [f"{part['cause']} {_ms(part['ms'])}" for part in worst[:CAUSES_SHOWN]]
    return ", ".join(shown)


def _timeline(events: Sequence[Facts]) -> Iterator[str]:
    for event in events:
        facts = [
            f"{key} {printable(str(value))}"
            for key, value in event.items()
            if key not in ("event", "at_ms")
        ]
        yield f"{_ms(event['at_ms']):>11}  {event['event']:<17}{', '.join(facts)}"


def _ms(ms: float) -> str:
    return f"{ms:,.1f}"
