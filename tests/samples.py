"""Records for tests: valid ones with plausible values, of which a test sets what it is about.

Owns one builder for each kind that the server publishes; used by the telemetry tests. Builders take
the fields to change by name, so that a test shows only what matters to it.
"""

from typing import Any

from telemetry.records import (
    Delivery,
    Fault,
    Iteration,
    Rejection,
    RequestEnd,
    RequestStart,
    Run,
    StepModel,
)


def run(**changed: Any) -> Run:
    values: dict[str, Any] = {
        "replica": "test",
        "schema_version": 1,
        "started_unix_us": 1_796_000_000_000_000,
        "model": "tiny",
        "parameters": 1000,
        "dtype": "f32",
        "device": "cpu",
        "backend": "reference",
        "backend_refusals": "{}",
        "policy": "decode_first",
        "batching": "continuous",
        "kv_blocks_total": 100,
        "block_tokens": 16,
        "batch_tokens_max": 512,
        "seqs_max": 64,
        "model_len_max": 1024,
        "buckets": [],
        "config": "{}",
        "revision": "test",
    }
    return Run(**(values | changed))


def start(request: int, **changed: Any) -> RequestStart:
    values: dict[str, Any] = {
        "request": request,
        "request_id": f"req-{request}",
        "external_id": None,
        "parent_id": None,
        "tenant": "default",
        "arrived_at_ns": 1000 * request,
        "prompt_tokens": 8,
        "max_tokens": 16,
        "priority": 0,
        "slo": None,
        "stream": True,
    }
    return RequestStart(**(values | changed))


def iteration(step: int, requests: list[int] | None = None, **changed: Any) -> Iteration:
    rows = requests or []
    values: dict[str, Any] = {
        "step": step,
        "begin_at_ns": step * 1000,
        "end_at_ns": step * 1000 + 1000,
        "plan_ns": 100,
        "launch_ns": 100,
        "wait_ns": 600,
        "commit_ns": 100,
        "gap_ns": 100,
        "device_ns": 500,
        "emit_ns": 10,
        "running": len(rows),
        "waiting": 0,
        "admission_stop": "no_waiting",
        "admission_blocker": None,
        "token_budget": 512,
        "prefill_tokens": 0,
        "decode_tokens": len(rows),
        "padding_tokens": 0,
        "idle_rows": 0,
        "bucket": 0,
        "graph": False,
        "kv_blocks_used": len(rows),
        "kv_blocks_cached": 0,
        "kv_tokens": 8 * len(rows),
        "kv_blocks_peak": len(rows),
        "allocation_failures": 0,
        "lost_before": 0,
        "requests": rows,
        "start_positions": [8 + step] * len(rows),
        "token_counts": [1] * len(rows),
        "kv_block_counts": [1] * len(rows),
        "admitted": [],
        "admitted_cached_tokens": [],
        "passed_over": [],
        "passed_over_reasons": [],
        "preempted": [],
        "preempted_causes": [],
        "preempted_blocks": [],
        "preempted_lost_tokens": [],
        "preempted_beneficiaries": [],
        "finished": [],
    }
    return Iteration(**(values | changed))


def end(request: int, **changed: Any) -> RequestEnd:
    values: dict[str, Any] = {
        "request": request,
        "request_id": f"req-{request}",
        "external_id": None,
        "parent_id": None,
        "tenant": "default",
        "received_at_ns": 900 * request,
        "arrived_at_ns": 1000 * request,
        "admitted_at_ns": 1000 * request + 1,
        "first_scheduled_at_ns": 1000 * request + 2,
        "prefill_finished_at_ns": 1000 * request + 3,
        "first_token_at_ns": 1000 * request + 4,
        "cancel_requested_at_ns": None,
        "decided_at_ns": 1000 * request + 5,
        "freed_at_ns": 1000 * request + 6,
        "released_at_ns": 1000 * request + 7,
        "prompt_tokens": 8,
        "cached_tokens": 0,
        "output_tokens": 4,
        "recomputed_tokens": 0,
        "dropped_tokens": 0,
        "wasted_tokens": 0,
        "preemptions": 0,
        "iterations": 4,
        "finish": "stop",
        "cancel_cause": None,
        "error": None,
    }
    return RequestEnd(**(values | changed))


def delivery(request: int, **changed: Any) -> Delivery:
    values: dict[str, Any] = {
        "request": request,
        "received_at_ns": 900 * request,
        "tokenized_at_ns": 950 * request,
        "submitted_at_ns": 990 * request,
        "first_write_at_ns": 1000 * request + 50_000_000,
        "last_write_at_ns": 1000 * request + 900_000_000,
        "stall_ns": 0,
        "merged_deltas": 0,
        "bytes": 1000,
    }
    return Delivery(**(values | changed))


def fault(**changed: Any) -> Fault:
    values: dict[str, Any] = {
        "fault_at_ns": 5,
        "step": None,
        "where": "engine process",
        "error": "the engine died",
        "traceback": "",
    }
    return Fault(**(values | changed))


def rejection(**changed: Any) -> Rejection:
    values: dict[str, Any] = {
        "request_id": "req-refused",
        "external_id": None,
        "tenant": "default",
        "rejected_at_ns": 7,
        "reason": "infeasible",
        "retry_after_s": None,
    }
    return Rejection(**(values | changed))


def step_model(**changed: Any) -> StepModel:
    values: dict[str, Any] = {
        "step": 200,
        "fixed": 1e6,
        "p": 1e4,
        "d": 1e5,
        "c": 1e2,
        "error": 0.05,
    }
    return StepModel(**(values | changed))
