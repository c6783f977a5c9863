"""The answer to "why was this request slow": causes, who caused them, its timeline and its gaps.

Owns the shape of `GET /v1/requests/{id}`; `iterscope explain` prints the same. Pure: from a Case to
plain values that JSON can hold, in ms from the receipt of the request. Must never hold a prompt,
and names at most so many neighbours a cause, the worst first, with a count of the rest.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from telemetry.explain_case import Case
from telemetry.explain_lane import lane
from telemetry.explain_walk import Named, Neighbour, Walk, walk
from telemetry.records import CAUSES

NAMED_MAX = 50
NAMED_A_GAP = 3

MILESTONES = (
    ("admitted", "admitted_at_ns"),
    ("first_token", "first_token_at_ns"),
    ("cancel_requested", "cancel_requested_at_ns"),
    ("decided", "decided_at_ns"),
    ("freed", "freed_at_ns"),
)
DELIVERED = (
    ("submitted", "submitted_at_ns"),
    ("first_write", "first_write_at_ns"),
    ("last_write", "last_write_at_ns"),
)


def explain(case: Case) -> dict[str, Any]:
    """Return everything that is known of one request's time; parts of a ms are kept."""
    walked = walk(
        case.start,
        case.end,
        case.delivery,
        case.tiles,
        prompts=case.prompts,
        prior_step=case.prior_step,
    )
    start, end, delivery = case.start, case.end, case.delivery
    limits = walked.bounds
    first_write = delivery.first_write_at_ns if delivery else None
    ttft = None if first_write is None else first_write - limits.received
    last_model = walked.models[-1] if walked.models else None
    fitted = all(model.fitted for model in walked.models)
    # Iterations that are gone by now were there when the fold divided the life.
    totals = walked.totals() if case.whole or not case.told else case.told
    return {
        "request_id": start.request_id,
        "external_id": start.external_id,
        "parent_id": start.parent_id,
        "run_id": case.run_id,
        "began_unix_us": case.began_unix_us,
        "received_at_ns": limits.received,
        "state": walked.state,
        "finish": end.finish if end else None,
        "cancel_cause": end.cancel_cause if end else None,
        "error": end.error if end else None,
        "matches": case.matches,
        "tenant": start.tenant,
        "stream": start.stream,
        "priority": start.priority,
        "slo": start.slo,
        "max_tokens": start.max_tokens,
        "prompt_tokens": start.prompt_tokens,
        "output_tokens": end.output_tokens if end else walked.tokens,
        "cached_tokens": end.cached_tokens if end else _cached(walked),
        "recomputed_tokens": end.recomputed_tokens if end else None,
        "preemptions": end.preemptions if end else _count(walked, "preempted"),
        "e2e_ms": _ms(limits.last - limits.received),
        "ttft_ms": None if ttft is None else _ms(ttft),
        "rule": "fitted" if fitted and last_model else "counted",
        "model_error": last_model.error if last_model and last_model.fitted else None,
        "complete": case.whole,
        "causes": [
            {
                "cause": cause,
                "ms": _ms(ns),
                **_named(case.names, walked.named.get(cause, {})),
            }
            for cause, ns in sorted(totals.items(), key=lambda item: CAUSES.index(item[0]))
        ],
        "ttft": _first(case, walked, first_write),
        "gaps": list(_gaps(case.names, walked)),
        "lane": lane(walked),
        "receipt": _receipt(case),
        "client_stall_ms": _ms(delivery.stall_ns) if delivery else None,
        "timeline": _timeline(case, walked),
    }


def _ms(ns: float) -> float:
    return round(ns / 1e6, 6)


def _receipt(case: Case) -> dict[str, Any]:
    """Return what it used and what was sent; null as long as that is not settled."""
    end, share, delivery = case.end, case.share, case.delivery
    return {
        "device_ms": _ms(share.device_ns) if share else None,
        "kv_block_s": round(share.kv_block_ns / 1e9, 6) if share else None,
        "iterations": end.iterations if end else None,
        "dropped_tokens": end.dropped_tokens if end else None,
        "wasted_tokens": end.wasted_tokens if end else None,
        "merged_deltas": delivery.merged_deltas if delivery else None,
        "bytes": delivery.bytes if delivery else None,
    }


def _named(
    names: Mapping[int, str], found: Mapping[int, Neighbour], most: int = NAMED_MAX
) -> dict[str, Any]:
    """Return who stands behind a cause, the worst first, and what is left out."""
    worst = sorted(found.items(), key=lambda item: -item[1].ns)
    shown = [
        {
            "request_id": names.get(request, f"#{request}"),
            "tokens": one.tokens,
            "ms": _ms(one.ns),
        }
        for request, one in worst[:most]
    ]
    rest = [one for _, one in worst[most:]]
    if not rest:
        return {"requests": shown}
    return {
        "requests": shown,
        "more": {
            "requests": len(rest),
            "tokens": sum(one.tokens for one in rest),
            "ms": _ms(sum(one.ns for one in rest)),
        },
    }


def _causes(ns: "np.ndarray[Any, np.dtype[np.int64]]") -> list[dict[str, Any]]:
    return [
        {"cause": cause, "ms": _ms(part)}
        for cause, part in zip(CAUSES, ns.tolist(), strict=True)
        if part
    ]


def _first(case: Case, walked: Walk, first_write: int | None) -> dict[str, Any] | None:
    """Divide the time to the first write.

    Of a stream the engine's part ends with the first token; an answer in one piece is written
    once all of it is there, so that its causes are those of the whole life.
    """
    if first_write is None or not walked.commits:
        return None
    limits = walked.bounds
    last, _ = walked.commits[0]
    until = walked.at_ns[last]
    if not case.start.stream:
        last, until = len(walked.at_ns) - 1, limits.stop
    if first_write < until:  # the text of an echoed prompt needs no token
        return {"ms": _ms(first_write - limits.received), "causes": []}
    ns = walked.by_tile[: last + 1].sum(axis=0)
    for cause, part in walked.before.items():
        ns[CAUSES.index(cause)] += part
    ns[CAUSES.index("output")] += first_write - until
    return {"ms": _ms(first_write - limits.received), "causes": _causes(ns)}


def _gaps(names: Mapping[int, str], walked: Walk) -> Iterator[dict[str, Any]]:
    """Yield the time between each token's commit and the one before it, divided.

    The longest name who was behind each cause. What the client saw differs by the delay of the
    output, which `output_ms` shows once.
    """
    for index, ((last, _), (this, token)) in enumerate(pairwise(walked.commits), start=1):
        causes = _causes(walked.by_tile[last + 1 : this + 1].sum(axis=0))
        if index in walked.slow:
            _name(causes, names, walked.slow[index])
        yield {
            "token": token,
            "at_ms": _ms(walked.at_ns[this] - walked.bounds.received),
            "ms": _ms(walked.at_ns[this] - walked.at_ns[last]),
            "causes": causes,
        }


def _name(causes: list[dict[str, Any]], names: Mapping[int, str], found: Named) -> None:
    for part in causes:
        if behind := found.get(part["cause"]):
            part.update(_named(names, behind, NAMED_A_GAP))


def _cached(walked: Walk) -> int | None:
    first = next((one for one in walked.events if one.name == "admitted"), None)
    cached = first.facts["cached_tokens"] if first else None
    return cached if isinstance(cached, int) else None


def _count(walked: Walk, name: str) -> int:
    return sum(one.name == name for one in walked.events)


def _timeline(case: Case, walked: Walk) -> list[dict[str, Any]]:
    """Return the events of a life in order, each with its facts."""
    limits = walked.bounds
    events: list[tuple[int, str, dict[str, Any]]] = [
        (limits.received, "received", {}),
        (limits.arrived, "arrived", {"prompt_tokens": case.start.prompt_tokens}),
    ]
    for record, stamps in ((case.end, MILESTONES), (case.delivery, DELIVERED)):
        for name, field in stamps if record else ():
            at_ns = getattr(record, field)
            if at_ns is not None:
                events.append((at_ns, name, _facts_of(case, name)))
    told = {name for _, name, _ in events}
    for one in walked.events:
        if one.name not in told:
            facts = dict(one.facts)
            if isinstance(whom := facts.pop("request", None), int):
                facts["for"] = case.names.get(whom, f"#{whom}")
            events.append((one.at_ns, one.name, facts))
    if case.end is None and walked.commits and "first_token" not in told:
        events.append((walked.at_ns[walked.commits[0][0]], "first_token", {}))
    return [
        {"event": name, "at_ms": _ms(at_ns - limits.received), **facts}
        for at_ns, name, facts in sorted(events, key=lambda event: event[0])
    ]


def _facts_of(case: Case, name: str) -> dict[str, Any]:
    if case.end is None:
        return {}
    if name == "admitted":
        return {"cached_tokens": case.end.cached_tokens}
    if name == "decided":
        return {"finish": case.end.finish, "output_tokens": case.end.output_tokens}
    return {}
