"""What ended requests add to the totals: phases, lengths, causes, cancellations, tenants, stalls.

Owns the sums over starts, ends, deliveries and causes; fold.py feeds it, metrics.py reads `values`.
All durations are differences of one monotonic clock. Keeps of a sequence that ended its id and
tenant until its shares are told, of at most RECENT_MAX.
"""

from types import MappingProxyType
from typing import TypeVar

from telemetry.fold_tenants import TenantFold
from telemetry.histogram import Histogram, Values, labelled
from telemetry.metric_spec import (
    GAP_EDGES_S,
    LENGTH_EDGES,
    PER_PROMPT_TOKEN_EDGES_S,
    PHASE_EDGES_S,
    SIBLING_EDGES,
    TTFT_EDGES_S,
)
from telemetry.records import (
    CANCEL_CAUSES,
    CAUSES,
    REJECTION_REASONS,
    Delivery,
    Rejection,
    RequestCause,
    RequestEnd,
    RequestShare,
    RequestStart,
)

RECENT_MAX = 10_000
PHASES = ("queue", "prefill", "decode", "inference")
WASTE_CAUSES = (*CANCEL_CAUSES, "error", "served")
NEIGHBOURS = MappingProxyType({"prefill": "neighbour_prefill", "decode": "neighbour_decode"})

_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")


class RequestFold:
    """Sums over the sequences of a run."""

    def __init__(self) -> None:
        self._phases_s = {phase: Histogram(PHASE_EDGES_S) for phase in PHASES}
        self._ttft_s = Histogram(TTFT_EDGES_S)
        self._e2e_s = Histogram(PHASE_EDGES_S)
        self._per_token_s = Histogram(GAP_EDGES_S)
        self._per_prompt_token_s = Histogram(PER_PROMPT_TOKEN_EDGES_S)
        self._lag_s = Histogram(PHASE_EDGES_S)
        self._prompt = Histogram(LENGTH_EDGES)
        self._computed = Histogram(LENGTH_EDGES)
        self._output = Histogram(LENGTH_EDGES)
        self._longest = Histogram(LENGTH_EDGES)
        self._siblings = Histogram(SIBLING_EDGES)
        self._max_tokens = Histogram(LENGTH_EDGES)
        # Of a request with several sequences: how many are open, how many it has, the longest.
        self._groups: dict[str, tuple[int, int, int]] = {}
        self._recent: dict[int, tuple[str, str]] = {}  # ended sequences: id and tenant
        self._asked = 0
        self._hits = 0
        self._wasted = dict.fromkeys(WASTE_CAUSES, 0)
        self._stalls = 0
        self._stall_ns = 0
        self._causes_ns = dict.fromkeys(CAUSES, 0)
        self._cancelled = dict.fromkeys(CANCEL_CAUSES, 0)
        self._rejections = dict.fromkeys(REJECTION_REASONS, 0)
        self._tenants = TenantFold()

    def start(self, record: RequestStart) -> None:
        """Add a sequence that was accepted."""
        self._max_tokens.observe(record.max_tokens)
        if record.parent_id is not None:
            still, count, longest = self._groups.get(record.parent_id, (0, 0, 0))
            keep(self._groups, record.parent_id, (still + 1, count + 1, longest))

    def end(self, record: RequestEnd) -> None:
        """Add a sequence that ended, as far as it came."""
        self._lengths(record)
        admitted_ns, first_ns = record.admitted_at_ns, record.first_token_at_ns
        self._phase(record, "queue", record.arrived_at_ns, admitted_ns)
        self._phase(record, "prefill", admitted_ns, first_ns)
        self._phase(record, "decode", first_ns, record.decided_at_ns)
        self._phase(record, "inference", admitted_ns, record.decided_at_ns)
        at_ns = record.released_at_ns
        if first_ns is not None and record.output_tokens > 1:
            each_s = (record.decided_at_ns - first_ns) / 1e9 / (record.output_tokens - 1)
            self._per_token_s.observe_of(record.request_id, each_s, at_ns)
        if admitted_ns is not None and first_ns is not None:
            each_s = (first_ns - admitted_ns) / 1e9 / max(1, record.prompt_tokens)
            self._per_prompt_token_s.observe(each_s)
        served = "served" if record.finish in {"stop", "length"} else "error"
        self._wasted[record.cancel_cause or served] += record.wasted_tokens
        if record.cancel_cause is not None:
            self._cancelled[record.cancel_cause] += 1
        keep(self._recent, record.request, (record.request_id, record.tenant))
        tenants, tenant = self._tenants, record.tenant
        tenants.weigh(tenant, record.prompt_tokens + record.output_tokens, at_ns)
        tenants.charge(tenant, "requests", 1)
        tenants.charge(tenant, "prompt_tokens", record.prompt_tokens)
        tenants.charge(tenant, "output_tokens", record.output_tokens)

    def _lengths(self, record: RequestEnd) -> None:
        output = record.output_tokens
        self._prompt.observe(record.prompt_tokens)
        self._output.observe(output)
        if record.admitted_at_ns is not None:
            self._asked += record.prompt_tokens
            self._hits += record.cached_tokens
            self._computed.observe(record.prompt_tokens - record.cached_tokens)
        still, count, longest = self._groups.pop(record.parent_id or "", (1, 1, 0))
        longest = max(longest, output)
        if still > 1 and record.parent_id is not None:
            self._groups[record.parent_id] = (still - 1, count, longest)
        else:
            self._siblings.observe(count)
            self._longest.observe(longest)

    def recent_id(self, request: int) -> str:
        """Return the id of a sequence that ended lately, empty when it is forgotten."""
        return self._recent.get(request, ("", ""))[0]

    def delivery(self, record: Delivery, request_id: str) -> None:
        """Add what the client saw first, and kept waiting."""
        if record.first_write_at_ns is not None:
            ttft_s = (record.first_write_at_ns - record.received_at_ns) / 1e9
            self._ttft_s.observe_of(request_id, ttft_s, record.first_write_at_ns)
        self._stall_ns += record.stall_ns
        self._stalls += record.stall_ns > 0

    def delivered(self, end: RequestEnd, delivery: Delivery) -> None:
        """Add a served sequence as its client saw it."""
        last_ns = delivery.last_write_at_ns or end.released_at_ns
        self._e2e_s.observe_of(end.request_id, (last_ns - delivery.received_at_ns) / 1e9, last_ns)
        if end.first_token_at_ns is not None and delivery.first_write_at_ns is not None:
            lag_ns = max(0, delivery.first_write_at_ns - end.first_token_at_ns)
            self._lag_s.observe_of(end.request_id, lag_ns / 1e9, delivery.first_write_at_ns)

    def cause(self, record: RequestCause) -> None:
        """Add one part of a life that is over."""
        # What a life with lost iterations had may be told a little too much, and its rest below 0
        # then; a counter never falls.
        self._causes_ns[record.cause] += max(0, record.ns)

    def share(self, record: RequestShare) -> None:
        """Add what a life that is over had of the device."""
        known = self._recent.pop(record.request, None)
        if known is not None:
            self._tenants.charge(known[1], "device_seconds", record.device_ns / 1e9)

    def rejection(self, record: Rejection) -> None:
        """Add a request that was refused."""
        self._rejections[record.reason] += 1
        self._tenants.charge(record.tenant, "rejections", 1)

    def _phase(
        self, record: RequestEnd, phase: str, begin_at_ns: int | None, end_at_ns: int | None
    ) -> None:
        if begin_at_ns is not None and end_at_ns is not None:
            took_s = (end_at_ns - begin_at_ns) / 1e9
            self._phases_s[phase].observe_of(record.request_id, took_s, end_at_ns)

    def values(self) -> dict[str, Values]:
        """Return what the table names of requests."""
        values: dict[str, Values] = {
            f"iterscope_request_{phase}_time_seconds": {(): histogram}
            for phase, histogram in self._phases_s.items()
        }
        neighbours = {kind: self._causes_ns[cause] for kind, cause in NEIGHBOURS.items()}
        return {
            **values,
            **self._tenants.values(),
            "iterscope_time_to_first_token_seconds": {(): self._ttft_s},
            "iterscope_e2e_request_latency_seconds": {(): self._e2e_s},
            "iterscope_request_time_per_output_token_seconds": {(): self._per_token_s},
            "iterscope_time_per_prefill_token_request_seconds": {(): self._per_prompt_token_s},
            "iterscope_delivery_lag_seconds": {(): self._lag_s},
            "iterscope_request_prompt_tokens": {(): self._prompt},
            "iterscope_request_prefill_kv_computed_tokens": {(): self._computed},
            "iterscope_request_generation_tokens": {(): self._output},
            "iterscope_request_max_num_generation_tokens": {(): self._longest},
            "iterscope_request_params_n": {(): self._siblings},
            "iterscope_request_params_max_tokens": {(): self._max_tokens},
            "iterscope_prefix_cache_queries_total": {(): self._asked},
            "iterscope_prefix_cache_hits_total": {(): self._hits},
            "iterscope_cause_seconds_total": labelled(self._causes_ns, 1e-9),
            "iterscope_neighbour_stall_seconds_total": labelled(neighbours, 1e-9),
            "iterscope_requests_cancelled_total": labelled(self._cancelled),
            "iterscope_requests_rejected_total": labelled(self._rejections),
            "iterscope_wasted_tokens_total": labelled(self._wasted),
            "iterscope_output_stalls_total": {(): self._stalls},
            "iterscope_output_stall_seconds_total": {(): self._stall_ns / 1e9},
        }


def keep(kept: dict[_Key, _Kept], key: _Key, what: _Kept) -> None:
    """Keep something of a sequence; beyond RECENT_MAX the oldest goes."""
    if len(kept) >= RECENT_MAX:
        del kept[next(iter(kept))]
    kept[key] = what
