"""The receipt of an answer: its phases, where its time went, and what it used of the machine.

Owns the object that `include_metrics: true` puts into a response. Pure: from settled lives to plain
values. Of several sequences the device, the cache and the tokens are summed, while phases and
causes are those of the one that took longest. Must never grow with the length of an answer.
"""

from collections.abc import Sequence
from typing import Any

from telemetry.explain_life import Settled

CAUSES_SHOWN = 3


def receipt_of(lives: Sequence[Settled]) -> dict[str, Any]:
    """Return the receipt of an HTTP request's sequences, at least one."""
    longest = max(lives, key=lambda life: life.bounds.last - life.bounds.received)
    worst = sorted(longest.causes.items(), key=lambda item: -item[1])[:CAUSES_SHOWN]
    rules = {life.rule for life in lives}
    return {
        "request_id": longest.start.parent_id or longest.start.request_id,
        "e2e_ms": _ms(longest.bounds.last - longest.bounds.received),
        "phases": _phases(longest),
        "causes": [{"cause": cause, "ms": _ms(ns)} for cause, ns in worst],
        "device_ms": _ms(sum(life.device_ns for life in lives)),
        "kv_block_s": round(sum(life.kv_block_ns for life in lives) / 1e9, 6),
        "cached_tokens": sum(life.end.cached_tokens for life in lives),
        "recomputed_tokens": sum(life.end.recomputed_tokens for life in lives),
        "rule": "counted" if "counted" in rules else "fitted",
    }


def _phases(life: Settled) -> dict[str, float]:
    """Return the life in five parts that sum to it, in ms."""
    end, limits = life.end, life.bounds
    admitted = limits.stop if end.admitted_at_ns is None else min(end.admitted_at_ns, limits.stop)
    first = limits.stop if end.first_token_at_ns is None else end.first_token_at_ns
    first = min(max(first, admitted), limits.stop)
    return {
        "tokenize_ms": _ms(limits.submitted - limits.received),
        "queue_ms": _ms(admitted - limits.submitted),
        "prefill_ms": _ms(first - admitted),
        "decode_ms": _ms(limits.stop - first),
        "output_ms": _ms(limits.last - limits.stop),
    }


def _ms(ns: float) -> float:
    return round(ns / 1e6, 6)
