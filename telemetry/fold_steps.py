"""What steps add to the totals: tokens, rows, context, shapes, wall time by part, waiting time.

Owns the sums over iterations; fold.py feeds it each one in order, metrics.py reads `values`. Knows
no single sequence: rows are fold_tokens.py's.
"""

from collections import deque

from telemetry.histogram import Histogram, LabelValues, Values, labelled
from telemetry.metric_spec import CONTEXT_EDGES, ROW_EDGES, STEP_TOKEN_EDGES
from telemetry.records import ADMISSION_STOPS, PREEMPTION_CAUSES, Iteration, Run

PARTS = ("plan", "launch", "wait", "commit", "gap")
TOKEN_KINDS = ("prefill", "decode", "padding", "idle")
GRAPH_OUTCOMES = ("hit", "miss")
SHAPES_MAX = 64
"""Pairs of bucket and graph that are told apart; the rest count as bucket 'other'."""
BUSY_S = 10
SECOND_NS = 10**9


class StepFold:
    """Sums over the iterations of a run."""

    def __init__(self) -> None:
        self._last: Iteration | None = None
        self._waiting_ns = dict.fromkeys(ADMISSION_STOPS, 0)
        self._preemptions = dict.fromkeys(PREEMPTION_CAUSES, 0)
        self._preempted_tokens = 0
        self._tokens = dict.fromkeys(TOKEN_KINDS, 0)
        self._allocation_failures = 0
        self._parts_ns = dict.fromkeys(PARTS, 0)
        self._device_ns = 0
        self._busy: deque[list[int]] = deque(maxlen=BUSY_S + 2)  # a second, and the ns worked in it
        self._shapes: dict[LabelValues, int] = {("0", "false"): 0}
        self._graphs = dict.fromkeys(GRAPH_OUTCOMES, 0)
        self._replays = False
        self._rows = Histogram(ROW_EDGES)
        self._step_tokens = Histogram(STEP_TOKEN_EDGES)
        self._context = Histogram(CONTEXT_EDGES)
        self._longest = Histogram(CONTEXT_EDGES)

    def take(self, record: Iteration, *, context: int, longest: int) -> None:
        """Add one iteration; context is of all rows together, and of the longest one."""
        self._last = record
        self._waiting_ns[record.admission_stop] += record.waiting * (
            record.end_at_ns - record.begin_at_ns
        )
        for cause, lost in zip(record.preempted_causes, record.preempted_lost_tokens, strict=True):
            self._preemptions[cause] += 1
            self._preempted_tokens += lost
        self._allocation_failures += record.allocation_failures
        self._device_ns += record.device_ns
        second = record.end_at_ns // SECOND_NS
        if not self._busy or self._busy[-1][0] != second:
            self._busy.append([second, 0])
        self._busy[-1][1] += record.device_ns
        if record.requests:
            self._batch(record)
            self._context.observe(context)
            self._longest.observe(longest)

    def restart(self) -> None:
        """Begin with another engine."""
        self._last = None
        self._replays = False

    def _batch(self, record: Iteration) -> None:
        parts = self._parts_ns
        parts["plan"] += record.plan_ns
        parts["launch"] += record.launch_ns
        parts["wait"] += record.wait_ns
        parts["commit"] += record.commit_ns
        parts["gap"] += record.gap_ns
        tokens = self._tokens
        tokens["prefill"] += record.prefill_tokens
        tokens["decode"] += record.decode_tokens
        tokens["padding"] += record.padding_tokens
        tokens["idle"] += record.idle_rows
        self._rows.observe(len(record.requests))
        self._step_tokens.observe(record.prefill_tokens + record.decode_tokens)
        self._replays |= record.graph
        if self._replays and not record.prefill_tokens:
            self._graphs["hit" if record.graph else "miss"] += 1
        shape = (str(record.bucket), "true" if record.graph else "false")
        if shape not in self._shapes and len(self._shapes) >= SHAPES_MAX:
            shape = ("other", shape[1])
        self._shapes[shape] = self._shapes.get(shape, 0) + 1

    def busy_ratio(self, now_ns: int) -> float:
        """Return the share of the last whole seconds that the device worked."""
        now_s = now_ns // SECOND_NS
        worked_ns = sum(ns for second, ns in self._busy if now_s - BUSY_S <= second < now_s)
        return min(1.0, worked_ns / (BUSY_S * SECOND_NS))

    def values(self, run: Run | None, *, kv_used: int, now_ns: int) -> dict[str, Values]:
        """Return what the table names of steps."""
        last = self._last
        total = run.kv_blocks_total if run else 0
        cached = min(last.kv_blocks_cached, total - kv_used) if last else 0
        return {
            "iterscope_step_tokens": {(): self._step_tokens},
            "iterscope_batch_context_tokens": {(): self._context},
            "iterscope_batch_longest_context_tokens": {(): self._longest},
            "iterscope_waiting_seconds_total": labelled(self._waiting_ns, 1e-9),
            "iterscope_preemptions_total": labelled(self._preemptions),
            "iterscope_preempted_tokens_total": {(): self._preempted_tokens},
            "iterscope_scheduled_tokens_total": labelled(self._tokens),
            "iterscope_allocation_failures_total": {(): self._allocation_failures},
            "iterscope_batch_requests": {(): self._rows},
            "iterscope_steps_total": {**self._shapes},
            "iterscope_graph_steps_total": labelled(self._graphs),
            "iterscope_step_part_seconds_total": labelled(self._parts_ns, 1e-9),
            "iterscope_device_seconds_total": {(): self._device_ns / 1e9},
            "iterscope_device_busy_ratio": {(): self.busy_ratio(now_ns)},
            "iterscope_kv_blocks": labelled(
                {
                    "used": kv_used,
                    "cached": cached,
                    "free": total - kv_used - cached,
                    "total": total,
                }
            ),
            "iterscope_kv_tokens": {(): last.kv_tokens if last and kv_used else 0},
            "iterscope_kv_token_capacity": {(): total * run.block_tokens if run else 0},
        }
