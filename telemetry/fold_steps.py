"""What steps add to the totals: tokens, rows, shapes, wall time by part, waiting by reason, gaps.

Owns the sums over iterations; fold.py feeds it each one in order, metrics.py reads `values`. Rows
that go on as in the step before cost one observation together, not one each. Must never keep more
of a sequence than its last commit, and forgets it at its end.
"""

from collections.abc import Callable

from telemetry.histogram import Histogram, LabelValues, Values, labelled
from telemetry.metric_spec import GAP_EDGES_S, ROW_EDGES, STEP_TOKEN_EDGES
from telemetry.records import ADMISSION_STOPS, PREEMPTION_CAUSES, Iteration, Run

Reached = Callable[[int], tuple[int, int]]
"""A sequence to its prompt length and the first position of it that was never computed."""
PARTS = ("plan", "launch", "wait", "commit", "gap")
TOKEN_KINDS = ("prefill", "decode", "padding", "idle")
SHAPES_MAX = 64
"""Pairs of bucket and graph that are told apart; the rest count as bucket 'other'."""


class StepFold:
    """Sums over the iterations of a run."""

    def __init__(self) -> None:
        self._last: Iteration | None = None
        self._token_at_ns: dict[int, int] = {}
        self._waiting_ns = dict.fromkeys(ADMISSION_STOPS, 0)
        self._preemptions = dict.fromkeys(PREEMPTION_CAUSES, 0)
        self._preempted_tokens = 0
        self._tokens = dict.fromkeys(TOKEN_KINDS, 0)
        self._allocation_failures = 0
        self._parts_ns = dict.fromkeys(PARTS, 0)
        self._device_ns = 0
        self._shapes: dict[LabelValues, int] = {("0", "false"): 0}
        self._rows = Histogram(ROW_EDGES)
        self._step_tokens = Histogram(STEP_TOKEN_EDGES)
        self.gaps_s = Histogram(GAP_EDGES_S)

    def take(self, record: Iteration, reached: Reached) -> None:
        """Add one iteration; `reached` tells of a sequence what was known of it before."""
        self._waiting_ns[record.admission_stop] += record.waiting * (
            record.end_at_ns - record.begin_at_ns
        )
        for cause, lost in zip(record.preempted_causes, record.preempted_lost_tokens, strict=True):
            self._preemptions[cause] += 1
            self._preempted_tokens += lost
        self._allocation_failures += record.allocation_failures
        self._device_ns += record.device_ns
        parts = self._parts_ns
        parts["plan"] += record.plan_ns
        parts["launch"] += record.launch_ns
        parts["wait"] += record.wait_ns
        parts["commit"] += record.commit_ns
        parts["gap"] += record.gap_ns
        if record.requests:
            self._shape(record)
            self._gaps(record, reached)
        self._last = record

    def forget(self, request: int) -> None:
        """Forget a sequence that ended."""
        self._token_at_ns.pop(request, None)

    def restart(self) -> None:
        """Begin with another engine, which has none of the sequences so far."""
        self._last = None
        self._token_at_ns.clear()

    def _shape(self, record: Iteration) -> None:
        tokens = self._tokens
        tokens["prefill"] += record.prefill_tokens
        tokens["decode"] += record.decode_tokens
        tokens["padding"] += record.padding_tokens
        tokens["idle"] += record.idle_rows
        self._rows.observe(len(record.requests))
        self._step_tokens.observe(record.prefill_tokens + record.decode_tokens)
        shape = (str(record.bucket), "true" if record.graph else "false")
        if shape not in self._shapes and len(self._shapes) >= SHAPES_MAX:
            shape = ("other", shape[1])
        self._shapes[shape] = self._shapes.get(shape, 0) + 1

    def _gaps(self, record: Iteration, reached: Reached) -> None:
        """Observe the time between commits of each sequence's tokens; the first token has none.

        A row gives a token when it reaches past its prompt and everything computed before: what a
        preemption lost and is computed again gives none, so that its wait counts as one gap.
        """
        last, end_at_ns = self._last, record.end_at_ns
        if (
            last is not None
            and record.decode_tokens == last.decode_tokens == len(record.requests)
            and record.requests == last.requests
            and record.step == last.step + 1
        ):
            self.gaps_s.observe((end_at_ns - last.end_at_ns) / 1e9, len(record.requests))
            self._token_at_ns.update(dict.fromkeys(record.requests, end_at_ns))
            return
        for request, start, count in zip(
            record.requests, record.start_positions, record.token_counts, strict=True
        ):
            prompt, highest = reached(request)
            if start + count < prompt or start + count <= highest:
                continue
            before = self._token_at_ns.get(request)
            if before is not None:
                self.gaps_s.observe((end_at_ns - before) / 1e9)
            self._token_at_ns[request] = end_at_ns

    def values(self, run: Run | None, *, kv_used: int) -> dict[str, Values]:
        """Return what the table names of steps."""
        last = self._last
        cached = last.kv_blocks_cached if last else 0
        return {
            "vllm:inter_token_latency_seconds": {(): self.gaps_s},
            "vllm:time_per_output_token_seconds": {(): self.gaps_s},
            "vllm:iteration_tokens_total": {(): self._step_tokens},
            "iterscope_waiting_seconds_total": labelled(self._waiting_ns, 1e-9),
            "iterscope_preemptions_total": labelled(self._preemptions),
            "iterscope_preempted_tokens_total": {(): self._preempted_tokens},
            "iterscope_scheduled_tokens_total": labelled(self._tokens),
            "iterscope_allocation_failures_total": {(): self._allocation_failures},
            "iterscope_batch_requests": {(): self._rows},
            "iterscope_steps_total": dict(self._shapes),
            "iterscope_step_part_seconds_total": labelled(self._parts_ns, 1e-9),
            "iterscope_device_seconds_total": {(): self._device_ns / 1e9},
            "iterscope_kv_blocks": labelled(
                {
                    "used": kv_used,
                    "cached": cached,
                    "total": run.kv_blocks_total if run else 0,
                }
            ),
            "iterscope_kv_tokens": {(): last.kv_tokens if last and kv_used else 0},
        }
