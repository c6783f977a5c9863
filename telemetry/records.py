"""The contract of Iterscope: every record kind, each field with its meaning and unit.

Owns the vocabulary that engine, bus, history, metrics and dashboard share. Read this file first.
The DDL, the SSE JSON schema and SCHEMA.md are derived from it (telemetry/schema.py).
Imports nothing but the standard library, holds no behaviour, and is never mutated: records are
frozen, and a list inside one is never touched after it was built.

Words: an *iteration* is the record, *step* its number, *tile* the wall time it owns, *slice* one
request's entry in its lists. Instants end in `_at_ns`, durations in `_ns`; both count nanoseconds,
instants from the server's start on CLOCK_MONOTONIC. In lists a request is its small integer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args, get_type_hints

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Doc:
    """What a field means and the unit it counts ("" for a plain number or a name)."""

    text: str
    unit: str = ""


AdmissionStop = Literal[
    "no_waiting",
    "batch_closed",
    "seqs",
    "budget",
    "prefill_cap",
    "dependency",
    "slo",
    "kv",
    "policy",
]
Finish = Literal["stop", "length", "cancelled", "error"]
CancelCause = Literal["client", "api", "deadline", "stall", "drain", "shutdown"]
PreemptionCause = Literal["kv", "policy"]
RejectionReason = Literal[
    "queue_full",
    "queue_tokens",
    "queue_bytes",
    "infeasible",
    "tenant_limit",
    "draining",
    "engine_down",
]
Rule = Literal["fitted", "counted"]
Cause = Literal[
    "tokenize",
    "step_boundary",
    "queue_batch_closed",
    "queue_seqs",
    "queue_budget",
    "queue_prefill_cap",
    "queue_dependency",
    "queue_slo",
    "queue_kv",
    "queue_policy",
    "own_prefill",
    "own_decode",
    "neighbour_prefill",
    "neighbour_decode",
    "recompute",
    "preempted_kv",
    "preempted_policy",
    "passed_over",
    "batch_held",
    "scheduler",
    "padding",
    "output",
    "client_stall",
    "unexplained",
]

ADMISSION_STOPS: tuple[str, ...] = get_args(AdmissionStop)
FINISHES: tuple[str, ...] = get_args(Finish)
CANCEL_CAUSES: tuple[str, ...] = get_args(CancelCause)
PREEMPTION_CAUSES: tuple[str, ...] = get_args(PreemptionCause)
REJECTION_REASONS: tuple[str, ...] = get_args(RejectionReason)
CAUSES: tuple[str, ...] = get_args(Cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One engine's life: written each time an engine is ready."""

    replica: Annotated[str, Doc("name of this server among its replicas")]
    schema_version: Annotated[int, Doc("version of the record schema")]
    started_unix_us: Annotated[int, Doc("wall clock at the zero of all instants", "us")]
    model: Annotated[str, Doc("served model name")]
    parameters: Annotated[int, Doc("model parameters, tied ones counted once")]
    dtype: Annotated[str, Doc("weight and activation type in force")]
    device: Annotated[str, Doc("device the engine runs on")]
    backend: Annotated[str, Doc("attention backend in force")]
    backend_refusals: Annotated[str, Doc("backends tried before and why each refused, JSON")]
    policy: Annotated[str, Doc("scheduling policy")]
    batching: Annotated[str, Doc("batching mode")]
    kv_blocks_total: Annotated[int, Doc("KV blocks that requests may use", "blocks")]
    block_tokens: Annotated[int, Doc("tokens one KV block holds", "tokens")]
    batch_tokens_max: Annotated[int, Doc("token budget of one step", "tokens")]
    seqs_max: Annotated[int, Doc("most sequences running at once")]
    model_len_max: Annotated[int, Doc("the one effective context limit", "tokens")]
    buckets: Annotated[list[int], Doc("row counts that decode steps are padded to")]
    config: Annotated[str, Doc("resolved configuration, JSON")]
    revision: Annotated[str, Doc("version of Iterscope")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStart:
    """A sequence was accepted into the engine's queue."""

    request: Annotated[int, Doc("the sequence's integer, unique across generations of a run")]
    request_id: Annotated[str, Doc("the server's own id of the sequence")]
    external_id: Annotated[str | None, Doc("id that the client gave, an attribute only")]
    parent_id: Annotated[str | None, Doc("id of the HTTP request when it has several sequences")]
    tenant: Annotated[str, Doc("tenant it is accounted to")]
    arrived_at_ns: Annotated[int, Doc("entered the engine's queue", "ns")]
    prompt_tokens: Annotated[int, Doc("prompt length", "tokens")]
    max_tokens: Annotated[int, Doc("most tokens it may generate", "tokens")]
    priority: Annotated[int, Doc("lower runs earlier")]
    slo: Annotated[str | None, Doc("latency objective of the request, JSON")]
    stream: Annotated[bool, Doc("the client reads a stream")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One model iteration: who was in the batch, why the others were not, what it cost.

    `requests`, `start_positions`, `token_counts` and `kv_block_counts` are aligned: entry i is
    batch row i. The same holds inside each `admitted*`, `passed_over*` and `preempted*` group.
    """

    step: Annotated[int, Doc("number of the iteration in its generation, from 1")]
    begin_at_ns: Annotated[int, Doc("start of its tile: the previous end, or the wake-up", "ns")]
    end_at_ns: Annotated[int, Doc("its commit was done", "ns")]
    plan_ns: Annotated[int, Doc("scheduling", "ns")]
    launch_ns: Annotated[int, Doc("filling tensors and launching", "ns")]
    wait_ns: Annotated[int, Doc("waiting for the device (on CPU: the forward itself)", "ns")]
    commit_ns: Annotated[int, Doc("taking the results in", "ns")]
    gap_ns: Annotated[int, Doc("rest of the tile: inbox, emit of the previous record", "ns")]
    device_ns: Annotated[int, Doc("the device's own time for forward and sampling", "ns")]
    emit_ns: Annotated[int, Doc("emitting the previous iteration's record", "ns")]
    running: Annotated[int, Doc("running sequences after its commit")]
    waiting: Annotated[int, Doc("waiting sequences after its commit, preempted ones included")]
    admission_stop: Annotated[AdmissionStop, Doc("the check that ended admission")]
    admission_blocker: Annotated[int | None, Doc("first request that this check refused")]
    token_budget: Annotated[int, Doc("most tokens this step could have computed", "tokens")]
    prefill_tokens: Annotated[int, Doc("prompt and recomputed tokens of the step", "tokens")]
    decode_tokens: Annotated[int, Doc("generated tokens computed for the first time", "tokens")]
    padding_tokens: Annotated[int, Doc("rows added to reach a bucket", "tokens")]
    idle_rows: Annotated[int, Doc("rows that a fixed batch kept after their end")]
    bucket: Annotated[int, Doc("rows of the bucket, 0 when none was used")]
    graph: Annotated[bool, Doc("replayed a captured graph")]
    kv_blocks_used: Annotated[int, Doc("blocks that sequences hold after its commit", "blocks")]
    kv_blocks_cached: Annotated[int, Doc("free blocks with reusable content", "blocks")]
    kv_tokens: Annotated[int, Doc("tokens in used blocks, a shared prefix once", "tokens")]
    kv_blocks_peak: Annotated[int, Doc("blocks used after its plan", "blocks")]
    allocation_failures: Annotated[int, Doc("block allocations its plan could not meet")]
    lost_before: Annotated[int, Doc("iterations dropped since the one before this")]
    requests: Annotated[list[int], Doc("the batch, row by row")]
    start_positions: Annotated[list[int], Doc("first position computed", "tokens")]
    token_counts: Annotated[list[int], Doc("tokens computed", "tokens")]
    kv_block_counts: Annotated[list[int], Doc("blocks the sequence holds", "blocks")]
    admitted: Annotated[list[int], Doc("sequences that became running in this plan")]
    admitted_cached_tokens: Annotated[list[int], Doc("prefix hit of each", "tokens")]
    passed_over: Annotated[list[int], Doc("overtaken, or running but given no tokens")]
    passed_over_reasons: Annotated[list[str], Doc("why each was passed over")]
    preempted: Annotated[list[int], Doc("sequences that lost their blocks in this plan")]
    preempted_causes: Annotated[list[PreemptionCause], Doc("why each was preempted")]
    preempted_blocks: Annotated[list[int], Doc("blocks each gave back", "blocks")]
    preempted_lost_tokens: Annotated[list[int], Doc("computed tokens each lost", "tokens")]
    preempted_beneficiaries: Annotated[list[int], Doc("for whom; itself when left alone")]
    finished: Annotated[list[int], Doc("sequences that ended since the previous record")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """A sequence ended: exactly one for each RequestStart, written after its last step."""

    request: Annotated[int, Doc("the sequence's integer")]
    request_id: Annotated[str, Doc("the server's own id of the sequence")]
    external_id: Annotated[str | None, Doc("id that the client gave")]
    parent_id: Annotated[str | None, Doc("id of the HTTP request when it has several sequences")]
    tenant: Annotated[str, Doc("tenant it is accounted to")]
    received_at_ns: Annotated[int, Doc("the server had read the HTTP request", "ns")]
    arrived_at_ns: Annotated[int, Doc("entered the engine's queue", "ns")]
    admitted_at_ns: Annotated[int | None, Doc("first became running", "ns")]
    first_scheduled_at_ns: Annotated[int | None, Doc("first step with tokens of it began", "ns")]
    prefill_finished_at_ns: Annotated[int | None, Doc("its whole prompt was computed", "ns")]
    first_token_at_ns: Annotated[int | None, Doc("its first token was committed", "ns")]
    cancel_requested_at_ns: Annotated[int | None, Doc("an abort reached the engine", "ns")]
    decided_at_ns: Annotated[int, Doc("the finish was known", "ns")]
    freed_at_ns: Annotated[int | None, Doc("its blocks went back", "ns")]
    released_at_ns: Annotated[int, Doc("the end was handed to the server", "ns")]
    prompt_tokens: Annotated[int, Doc("prompt length", "tokens")]
    cached_tokens: Annotated[int, Doc("prefix hit at its first admission", "tokens")]
    output_tokens: Annotated[int, Doc("sampled and kept", "tokens")]
    recomputed_tokens: Annotated[int, Doc("lost at preemptions, less hits on return", "tokens")]
    dropped_tokens: Annotated[int, Doc("computed in a step that no longer counted", "tokens")]
    wasted_tokens: Annotated[int, Doc("kept but never sent to the client", "tokens")]
    preemptions: Annotated[int, Doc("times it lost its blocks")]
    iterations: Annotated[int, Doc("steps it had tokens in")]
    finish: Annotated[Finish, Doc("how it ended")]
    cancel_cause: Annotated[CancelCause | None, Doc("who or what cancelled it")]
    error: Annotated[str | None, Doc("what went wrong, without the prompt")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """The fitted cost of a step: device = fixed + p x prefill + d x decode + c x context."""

    step: Annotated[int, Doc("last step of the fit's window")]
    fixed: Annotated[float, Doc("cost of any step", "ns")]
    p: Annotated[float, Doc("cost of one prefill token", "ns/token")]
    d: Annotated[float, Doc("cost of one decode token", "ns/token")]
    c: Annotated[float, Doc("cost of one context token read", "ns/token")]
    error: Annotated[float, Doc("mean absolute error over mean step time", "ratio")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The server's side of a sequence: reading, tokenizing, writing."""

    request: Annotated[int, Doc("the sequence's integer")]
    received_at_ns: Annotated[int, Doc("the HTTP request was read", "ns")]
    tokenized_at_ns: Annotated[int, Doc("the prompt was tokens", "ns")]
    submitted_at_ns: Annotated[int, Doc("handed to the engine", "ns")]
    first_write_at_ns: Annotated[int | None, Doc("first byte of output was written", "ns")]
    last_write_at_ns: Annotated[int | None, Doc("last byte was written", "ns")]
    stall_ns: Annotated[int, Doc("writes that waited for the client", "ns")]
    merged_deltas: Annotated[int, Doc("token deltas that waited and were merged")]
    bytes: Annotated[int, Doc("body bytes written", "bytes")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCause:
    """One additive part of a request's life, received to last write."""

    request: Annotated[int, Doc("the sequence's integer")]
    cause: Annotated[Cause, Doc("where the time went")]
    ns: Annotated[int, Doc("how much of it", "ns")]
    rule: Annotated[Rule, Doc("whether a fitted step model or plain counts split it")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShare:
    """A request's share of the device and of the KV cache, for billing."""

    request: Annotated[int, Doc("the sequence's integer")]
    device_ns: Annotated[int, Doc("device time, all shares sum to all of it", "ns")]
    kv_block_ns: Annotated[int, Doc("blocks held times time", "block ns")]
    rule: Annotated[Rule, Doc("whether a fitted step model or plain counts split it")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A request was refused before it entered the queue."""

    request_id: Annotated[str, Doc("the server's own id")]
    external_id: Annotated[str | None, Doc("id that the client gave")]
    tenant: Annotated[str, Doc("tenant it is accounted to")]
    rejected_at_ns: Annotated[int, Doc("when", "ns")]
    reason: Annotated[RejectionReason, Doc("why")]
    retry_after_s: Annotated[float | None, Doc("when a retry may succeed", "s")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something broke: an engine died, a step raised, a thread met what it did not expect."""

    fault_at_ns: Annotated[int, Doc("when it was noticed", "ns")]
    step: Annotated[int | None, Doc("step it happened in, where known")]
    where: Annotated[str, Doc("part of the product")]
    error: Annotated[str, Doc("one line")]
    traceback: Annotated[str, Doc("stack, or empty")]


Record = (
    Run
    | RequestStart
    | Iteration
    | RequestEnd
    | StepModel
    | Delivery
    | RequestCause
    | RequestShare
    | Rejection
    | Fault
)

KINDS: dict[str, type[Record]] = {
    "run": Run,
    "request_start": RequestStart,
    "iteration": Iteration,
    "request_end": RequestEnd,
    "step_model": StepModel,
    "delivery": Delivery,
    "request_cause": RequestCause,
    "request_share": RequestShare,
    "rejection": Rejection,
    "fault": Fault,
}
"""Record kinds by the name that tables and SSE events carry."""


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a record: its name, Python type, meaning and unit."""

    name: str
    type: object
    doc: Doc


def columns(kind: type[Record]) -> Iterator[Column]:
    """Yield the fields of a record kind in order."""
    hints = get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        plain, doc = get_args(hints[item.name])[:2]
        yield Column(name=item.name, type=plain, doc=doc)
