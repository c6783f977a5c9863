"""The dashboard of the KV cache: how full, with what, what the prefix cache gives, what lack costs.

Owns that board's panels; generate.py writes it. What a lack of blocks does to those who wait stands
here, what it does to latency in latency.py. Must never show blocks and tokens on one axis.
"""

from grafana.board import Board, Row
from grafana.expressions import quantiles, rate, rate_by, share
from grafana.panel import BAD, FAIR, Panel, Query

FULL = Row(
    title="How full is it?",
    panels=(
        Panel(
            title="Share of blocks in use",
            unit="percentunit",
            queries=(Query(expr="iterscope_kv_usage_ratio{$only}", legend="{{instance}}"),),
            limits=((0.8, FAIR), (0.95, BAD)),
            high=1.0,
            runbook="IterscopeKvPressure",
        ),
        Panel(
            title="What are the blocks doing?",
            kind="stacked",
            queries=(
                Query(
                    expr='sum by (state) (iterscope_kv_blocks{state!="total",$only})',
                    legend="{{state}}",
                ),
            ),
            why="`used` belongs to sequences, `cached` may be used again or taken.",
        ),
        Panel(
            title="How many tokens do they hold?",
            unit="tokens",
            queries=(
                Query(expr="sum(iterscope_kv_tokens{$only})", legend="held"),
                Query(expr="sum(iterscope_kv_token_capacity{$only})", legend="capacity"),
            ),
            why="Held far below the blocks in use: their last blocks are mostly empty.",
        ),
    ),
)

PREFIX = Row(
    title="What does the prefix cache give?",
    panels=(
        Panel(
            title="Share of prompt tokens found",
            unit="percentunit",
            queries=(
                share(
                    "iterscope_prefix_cache_hits_total{$only}",
                    "iterscope_prefix_cache_queries_total{$only}",
                    "hits",
                ),
            ),
            high=1.0,
        ),
        Panel(
            title="Prompt tokens asked for and found",
            unit="tokens/s",
            queries=(
                rate("iterscope_prefix_cache_queries_total", "asked for"),
                rate("iterscope_prefix_cache_hits_total", "found"),
            ),
        ),
        Panel(
            title="What is left to compute of a prompt?",
            unit="tokens",
            queries=quantiles("iterscope_request_prefill_kv_computed_tokens"),
        ),
    ),
)

LACK = Row(
    title="What does lack of it cost?",
    panels=(
        Panel(
            title="Who is thrown out?",
            kind="stacked",
            unit="cps",
            width=6,
            queries=rate_by("iterscope_preemptions_total", "cause"),
            runbook="IterscopePreemptionThrash",
        ),
        Panel(
            title="How much is thrown away?",
            unit="percentunit",
            width=6,
            queries=(
                share(
                    "iterscope_preempted_tokens_total{$only}",
                    'iterscope_scheduled_tokens_total{kind=~"prefill|decode",$only}',
                    "thrown away",
                ),
                share(
                    "iterscope_recomputed_tokens_total{$only}",
                    'iterscope_scheduled_tokens_total{kind=~"prefill|decode",$only}',
                    "computed again",
                ),
            ),
            why="Of all tokens that are computed. A healthy overload loses a few percent.",
            limits=((0.1, BAD),),
            runbook="IterscopePreemptionThrash",
        ),
        Panel(
            title="Who waits for it?",
            width=6,
            queries=(rate("iterscope_waiting_seconds_total", "wait for KV", 'reason="kv"'),),
            why="The mean number of sequences that wait because blocks lack.",
            query="why_waiting",
            runbook="IterscopeKvPressure",
        ),
        Panel(
            title="How often is a block missing?",
            unit="cps",
            width=6,
            queries=(rate("iterscope_allocation_failures_total", "allocations that failed"),),
        ),
    ),
)

SIZE = Row(
    title="How large is it?",
    height=5,
    panels=(
        Panel(
            title="The cache of each engine",
            kind="table",
            width=24,
            queries=(Query(expr="iterscope_cache_config_info{$only}", legend="is"),),
        ),
    ),
)

BOARD = Board(
    uid="iterscope-kv",
    title="KV cache",
    about="How full the KV cache is, what prefix hits save, and what lack of blocks costs.",
    rows=(FULL, PREFIX, LACK, SIZE),
)
