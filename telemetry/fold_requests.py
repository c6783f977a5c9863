"""What ended requests add to the totals: phases, lengths, causes, cancellations, tenants, stalls.

Owns the sums over starts, ends, deliveries and causes; fold.py feeds it, metrics.py reads `values`.
All durations are differences of one monotonic clock. Must never grow with the number of tenants:
the first TENANTS_MAX have series of their own, the others share one.
"""

from telemetry.histogram import Histogram, Values, labelled
from telemetry.metric_spec import GAP_EDGES_S, LENGTH_EDGES, PHASE_EDGES_S
from telemetry.records import (
    CANCEL_CAUSES,
    CAUSES,
    Delivery,
    RequestCause,
    RequestEnd,
    RequestStart,
)

TENANTS_MAX = 20
OTHER = "other"
PHASES = ("queue", "prefill", "decode", "inference")


class RequestFold:
    """Sums over the sequences of a run."""

    def __init__(self) -> None:
        self._phases_s = {phase: Histogram(PHASE_EDGES_S) for phase in PHASES}
        self._per_token_s = Histogram(GAP_EDGES_S)
        self._lag_s = Histogram(PHASE_EDGES_S)
        self._prompt = Histogram(LENGTH_EDGES)
        self._output = Histogram(LENGTH_EDGES)
        self._max_tokens = Histogram(LENGTH_EDGES)
        self._asked = 0
        self._hits = 0
        self._wasted = 0
        self._stall_ns = 0
        self._causes_ns = dict.fromkeys(CAUSES, 0)
        self._cancelled = dict.fromkeys(CANCEL_CAUSES, 0)
        self._tenants: dict[str, tuple[int, int]] = {OTHER: (0, 0)}

    def start(self, record: RequestStart) -> None:
        """Add a sequence that was accepted."""
        self._max_tokens.observe(record.max_tokens)

    def end(self, record: RequestEnd) -> None:
        """Add a sequence that ended, as far as it came."""
        if record.admitted_at_ns is not None:
            self._asked += record.prompt_tokens
            self._hits += record.cached_tokens
        self._phase("queue", record.arrived_at_ns, record.admitted_at_ns)
        self._phase("prefill", record.admitted_at_ns, record.first_token_at_ns)
        self._phase("decode", record.first_token_at_ns, record.decided_at_ns)
        self._phase("inference", record.admitted_at_ns, record.decided_at_ns)
        if record.first_token_at_ns is not None and record.output_tokens > 1:
            took_ns = record.decided_at_ns - record.first_token_at_ns
            self._per_token_s.observe(took_ns / 1e9 / (record.output_tokens - 1))
        self._prompt.observe(record.prompt_tokens)
        self._output.observe(record.output_tokens)
        self._wasted += record.wasted_tokens
        if record.cancel_cause is not None:
            self._cancelled[record.cancel_cause] += 1
        tenant = record.tenant
        if tenant not in self._tenants and len(self._tenants) > TENANTS_MAX:
            tenant = OTHER
        requests, tokens = self._tenants.get(tenant, (0, 0))
        self._tenants[tenant] = (requests + 1, tokens + record.output_tokens)

    def delivery(self, record: Delivery) -> None:
        """Add what the client kept waiting."""
        self._stall_ns += record.stall_ns

    def delivered(self, end: RequestEnd, delivery: Delivery) -> None:
        """Add the way from the engine to the client of a served sequence."""
        if end.first_token_at_ns is not None and delivery.first_write_at_ns is not None:
            lag_ns = delivery.first_write_at_ns - end.first_token_at_ns
            self._lag_s.observe(max(0, lag_ns) / 1e9)

    def cause(self, record: RequestCause) -> None:
        """Add one part of a life that is over."""
        self._causes_ns[record.cause] += record.ns

    def _phase(self, phase: str, begin_at_ns: int | None, end_at_ns: int | None) -> None:
        if begin_at_ns is not None and end_at_ns is not None:
            self._phases_s[phase].observe((end_at_ns - begin_at_ns) / 1e9)

    def values(self) -> dict[str, Values]:
        """Return what the table names of requests."""
        values: dict[str, Values] = {
            f"vllm:request_{phase}_time_seconds": {(): histogram}
            for phase, histogram in self._phases_s.items()
        }
        tenants = self._tenants.items()
        return values | {
            "vllm:request_time_per_output_token_seconds": {(): self._per_token_s},
            "vllm:request_prompt_tokens": {(): self._prompt},
            "vllm:request_generation_tokens": {(): self._output},
            "vllm:request_params_max_tokens": {(): self._max_tokens},
            "vllm:prefix_cache_queries_total": {(): self._asked},
            "vllm:prefix_cache_hits_total": {(): self._hits},
            "iterscope_cause_seconds_total": labelled(self._causes_ns, 1e-9),
            "iterscope_requests_cancelled_total": labelled(self._cancelled),
            "iterscope_wasted_tokens_total": {(): self._wasted},
            "iterscope_output_stall_seconds_total": {(): self._stall_ns / 1e9},
            "iterscope_delivery_lag_seconds": {(): self._lag_s},
            "iterscope_tenant_requests_total": {(name,): sums[0] for name, sums in tenants},
            "iterscope_tenant_output_tokens_total": {(name,): sums[1] for name, sums in tenants},
        }
