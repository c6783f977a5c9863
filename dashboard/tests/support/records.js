// Owns: builders of single records for tests, with the fields of telemetry/records.py and quiet
// defaults. Called by: the tests beside it. Steps are 10 ms long, so step n ends at n x 10 ms.

const STEP_NS = 10e6;

export function run(fields = {}) {
  return {
    replica: 'test',
    schema_version: 1,
    started_unix_us: 1764424980e6,
    model: 'tiny',
    dtype: 'float32',
    device: 'cpu',
    backend: 'reference',
    policy: 'fcfs',
    batching: 'continuous',
    kv_blocks_total: 64,
    block_tokens: 16,
    batch_tokens_max: 64,
    seqs_max: 8,
    model_len_max: 512,
    buckets: [],
    ...fields,
  };
}

export function requestStart(request, fields = {}) {
  return {
    request,
    request_id: `cmpl-${request}`,
    external_id: null,
    parent_id: null,
    tenant: 'default',
    arrived_at_ns: 1000 * request,
    prompt_tokens: 8,
    max_tokens: 64,
    priority: 0,
    slo: null,
    stream: true,
    ...fields,
  };
}

// rows: [request, start position, tokens, blocks]; admitted: [request, cached tokens];
// passed_over: [request, reason]; preempted: [request, cause, blocks, lost tokens].
export function iteration(step, { rows = [], admitted = [], ...more } = {}) {
  const { passed_over = [], preempted = [], ...fields } = more;
  const column = (list, i, otherwise) => list.map((entry) => entry[i] ?? otherwise);
  return {
    step,
    begin_at_ns: (step - 1) * STEP_NS,
    end_at_ns: step * STEP_NS,
    plan_ns: 1e5,
    launch_ns: 1e5,
    wait_ns: 9e6,
    commit_ns: 1e5,
    gap_ns: 7e5,
    device_ns: 9e6,
    emit_ns: 1e4,
    running: rows.length,
    waiting: 0,
    admission_stop: 'no_waiting',
    admission_blocker: null,
    token_budget: 64,
    prefill_tokens: 0,
    decode_tokens: 0,
    padding_tokens: 0,
    idle_rows: 0,
    bucket: 0,
    graph: false,
    kv_blocks_used: rows.length,
    kv_blocks_cached: 0,
    kv_tokens: 0,
    kv_blocks_peak: rows.length,
    allocation_failures: 0,
    lost_before: 0,
    requests: column(rows, 0),
    start_positions: column(rows, 1),
    token_counts: column(rows, 2),
    kv_block_counts: column(rows, 3, 1),
    admitted: column(admitted, 0),
    admitted_cached_tokens: column(admitted, 1),
    passed_over: column(passed_over, 0),
    passed_over_reasons: column(passed_over, 1),
    preempted: column(preempted, 0),
    preempted_causes: column(preempted, 1),
    preempted_blocks: column(preempted, 2),
    preempted_lost_tokens: column(preempted, 3),
    preempted_beneficiaries: column(preempted, 0),
    finished: [],
    ...fields,
  };
}

export function requestEnd(request, fields = {}) {
  return {
    request,
    request_id: `cmpl-${request}`,
    external_id: null,
    parent_id: null,
    tenant: 'default',
    received_at_ns: 500 * request,
    arrived_at_ns: 1000 * request,
    admitted_at_ns: 2000 * request,
    first_scheduled_at_ns: 2000 * request,
    prefill_finished_at_ns: 10e6,
    first_token_at_ns: 10e6,
    cancel_requested_at_ns: null,
    decided_at_ns: 30e6,
    freed_at_ns: 30e6,
    released_at_ns: 31e6,
    prompt_tokens: 8,
    cached_tokens: 0,
    output_tokens: 1,
    recomputed_tokens: 0,
    dropped_tokens: 0,
    wasted_tokens: 0,
    preemptions: 0,
    iterations: 1,
    finish: 'stop',
    cancel_cause: null,
    error: null,
    ...fields,
  };
}
