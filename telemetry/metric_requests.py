"""The metrics of requests: how many, how long each part took, objectives, clients, tenants.

Owns their names, types, labels and words; metric_table.py makes the one table of it, the folds fill
in the values. A sequence is one answer: a request with n answers counts n times.
"""

from telemetry.metric_spec import (
    EXPLAIN,
    GAP_EDGES_S,
    LENGTH_EDGES,
    PER_PROMPT_TOKEN_EDGES_S,
    PHASE_EDGES_S,
    SIBLING_EDGES,
    TTFT_EDGES_S,
    MetricSpec,
)

COUNTS = (
    MetricSpec(
        name="iterscope_requests_accepted_total",
        type="counter",
        help="Sequences accepted into the queue; always ended + running + waiting.",
        query="queue",
    ),
    MetricSpec(
        name="iterscope_requests_ended_total",
        type="counter",
        help="Sequences that ended, by how; unknown are ends that this fold was too slow for.",
        labels=("finish",),
        query="departures",
    ),
    MetricSpec(
        name="iterscope_requests_rejected_total",
        type="counter",
        help="Requests refused before the queue.",
        labels=("reason",),
        query="rejections",
    ),
    MetricSpec(
        name="iterscope_requests_invalid_total",
        type="counter",
        help="Requests to generate that were refused as they stood: malformed, unknown, too large.",
        query="rejections",
    ),
    MetricSpec(
        name="iterscope_requests_cancelled_total",
        type="counter",
        help="Sequences that were cancelled, by who or what did it.",
        labels=("cause",),
        query="departures",
    ),
    MetricSpec(
        name="iterscope_wasted_tokens_total",
        type="counter",
        help="Tokens sampled and never sent, by what ended the sequence.",
        labels=("cause",),
        unit="tokens",
        query="departures",
    ),
    MetricSpec(
        name="iterscope_prompt_tokens_total",
        type="counter",
        help="Prompt tokens of sequences whose prompt was computed, cached ones included.",
        unit="tokens",
        query="throughput",
        aliases=("vllm:prompt_tokens_total",),
    ),
    MetricSpec(
        name="iterscope_generation_tokens_total",
        type="counter",
        help="Tokens sampled and kept.",
        unit="tokens",
        query="throughput",
        aliases=("vllm:generation_tokens_total",),
    ),
    MetricSpec(
        name="iterscope_request_prompt_tokens",
        type="histogram",
        help="Prompt length of sequences that ended.",
        buckets=LENGTH_EDGES,
        unit="tokens",
        query="tenants",
        aliases=("vllm:request_prompt_tokens",),
    ),
    MetricSpec(
        name="iterscope_request_prefill_kv_computed_tokens",
        type="histogram",
        help="Prompt tokens that a sequence did not find in the prefix cache.",
        buckets=LENGTH_EDGES,
        unit="tokens",
        query="prefix_cache",
        aliases=("vllm:request_prefill_kv_computed_tokens",),
    ),
    MetricSpec(
        name="iterscope_request_generation_tokens",
        type="histogram",
        help="Output length of sequences that ended.",
        buckets=LENGTH_EDGES,
        unit="tokens",
        query="tenants",
        aliases=("vllm:request_generation_tokens",),
    ),
    MetricSpec(
        name="iterscope_request_max_num_generation_tokens",
        type="histogram",
        help="Longest output of a request that ended, over its n sequences.",
        buckets=LENGTH_EDGES,
        unit="tokens",
        query="tenants",
        aliases=("vllm:request_max_num_generation_tokens",),
    ),
    MetricSpec(
        name="iterscope_request_params_n",
        type="histogram",
        help="Sequences of a request that ended.",
        buckets=SIBLING_EDGES,
        query="tenants",
        aliases=("vllm:request_params_n",),
    ),
    MetricSpec(
        name="iterscope_request_params_max_tokens",
        type="histogram",
        help="max_tokens of sequences accepted.",
        buckets=LENGTH_EDGES,
        unit="tokens",
        query="tenants",
        aliases=("vllm:request_params_max_tokens",),
    ),
)

TIMES = (
    MetricSpec(
        name="iterscope_time_to_first_token_seconds",
        type="histogram",
        help="HTTP request read to first byte of output written, one value a sequence.",
        buckets=TTFT_EDGES_S,
        unit="s",
        query=EXPLAIN,
        aliases=("vllm:time_to_first_token_seconds",),
    ),
    MetricSpec(
        name="iterscope_e2e_request_latency_seconds",
        type="histogram",
        help="HTTP request read to last byte written, of sequences that ended as stop or length.",
        buckets=PHASE_EDGES_S,
        unit="s",
        query=EXPLAIN,
        aliases=("vllm:e2e_request_latency_seconds",),
    ),
    MetricSpec(
        name="iterscope_inter_token_latency_seconds",
        type="histogram",
        help="Between the commits of a sequence's tokens, one value a token after the first.",
        buckets=GAP_EDGES_S,
        unit="s",
        query="token_gaps",
        aliases=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ),
    MetricSpec(
        name="iterscope_request_time_per_output_token_seconds",
        type="histogram",
        help="Mean time per token after the first, one value a sequence of two tokens or more.",
        buckets=GAP_EDGES_S,
        unit="s",
        query="latency",
        aliases=("vllm:request_time_per_output_token_seconds",),
    ),
    MetricSpec(
        name="iterscope_request_queue_time_seconds",
        type="histogram",
        help="Arrival in the engine's queue to first admission.",
        buckets=PHASE_EDGES_S,
        unit="s",
        query="why_waiting",
        aliases=("vllm:request_queue_time_seconds", "vllm:time_in_queue_requests"),
    ),
    MetricSpec(
        name="iterscope_request_prefill_time_seconds",
        type="histogram",
        help="First admission to first token.",
        buckets=PHASE_EDGES_S,
        unit="s",
        query="slowest_requests",
        aliases=("vllm:request_prefill_time_seconds",),
    ),
    MetricSpec(
        name="iterscope_time_per_prefill_token_request_seconds",
        type="histogram",
        help="First admission to first token, over the prompt's tokens.",
        buckets=PER_PROMPT_TOKEN_EDGES_S,
        unit="s",
        query="slowest_requests",
        aliases=("vllm:time_per_prefill_token_request_seconds",),
    ),
    MetricSpec(
        name="iterscope_request_decode_time_seconds",
        type="histogram",
        help="First token to the end.",
        buckets=PHASE_EDGES_S,
        unit="s",
        query="token_gaps",
        aliases=("vllm:request_decode_time_seconds",),
    ),
    MetricSpec(
        name="iterscope_request_inference_time_seconds",
        type="histogram",
        help="First admission to the end.",
        buckets=PHASE_EDGES_S,
        unit="s",
        query="slowest_requests",
        aliases=("vllm:request_inference_time_seconds",),
    ),
    MetricSpec(
        name="iterscope_cause_seconds_total",
        type="counter",
        help="Time of requests that are over, received to last write, by cause.",
        labels=("cause",),
        unit="s",
        query="causes",
    ),
    MetricSpec(
        name="iterscope_neighbour_stall_seconds_total",
        type="counter",
        help="The part of it that went into neighbours' tokens of the same steps, by their kind.",
        labels=("kind",),
        unit="s",
        query="neighbour_stalls",
    ),
)

OBJECTIVES = (
    MetricSpec(
        name="iterscope_slo_objective_seconds",
        type="gauge",
        help="The server's own objective: token j, from 0, is due at arrival + ttft + j x tpot.",
        labels=("part",),
        unit="s",
        query="goodput",
    ),
    MetricSpec(
        name="iterscope_slo_requests_total",
        type="counter",
        help=(
            "Sequences judged by their objective. met: served, each token in time. missed: served "
            "late, or its client left when a token was overdue. dropped: an error, cancelled by "
            "the server, or refused by overload. Who left in time is not judged."
        ),
        labels=("class", "outcome"),
        query="goodput",
    ),
    MetricSpec(
        name="iterscope_slo_tokens_total",
        type="counter",
        help="Tokens by whether they were committed by their deadline: met is the goodput.",
        labels=("class", "outcome"),
        unit="tokens",
        query="goodput",
    ),
)

CLIENTS = (
    MetricSpec(
        name="iterscope_delivery_lag_seconds",
        type="histogram",
        help="First token committed to its first byte written.",
        buckets=PHASE_EDGES_S,
        unit="s",
        query="latency",
    ),
    MetricSpec(
        name="iterscope_output_stalls_total",
        type="counter",
        help="Sequences whose client made a write wait.",
        query="slowest_requests",
    ),
    MetricSpec(
        name="iterscope_output_stall_seconds_total",
        type="counter",
        help="Time that writes waited for clients.",
        unit="s",
        query="slowest_requests",
    ),
)

TENANTS = (
    MetricSpec(
        name="iterscope_tenant_requests_total",
        type="counter",
        help=(
            "Sequences that ended, by tenant: the 20 that used most tokens of late, counted from "
            "when they were first of these, and all others."
        ),
        labels=("tenant",),
        query="tenants",
    ),
    MetricSpec(
        name="iterscope_tenant_prompt_tokens_total",
        type="counter",
        help="Prompt tokens, by tenant as above.",
        labels=("tenant",),
        unit="tokens",
        query="tenants",
    ),
    MetricSpec(
        name="iterscope_tenant_output_tokens_total",
        type="counter",
        help="Output tokens, by tenant as above.",
        labels=("tenant",),
        unit="tokens",
        query="tenants",
    ),
    MetricSpec(
        name="iterscope_tenant_device_seconds_total",
        type="counter",
        help="Shares of device time, by tenant as above.",
        labels=("tenant",),
        unit="s",
        query="tenants",
    ),
    MetricSpec(
        name="iterscope_tenant_rejections_total",
        type="counter",
        help="Requests refused before the queue, by tenant as above.",
        labels=("tenant",),
        query="rejections",
    ),
)
