// Owns: what bench/dashboard.py measures from inside the page: time between frames, time in the
// page's own frame, rows that came against rows that reached a canvas, age of the newest drawn.
// Evaluated in the page by Playwright; never part of the product.
(() => {
  const app = window.iterscope,
    { store } = app,
    { columns } = store,
    { score } = app.live;
  const SLICES = new Set([0, 1, 2]);
  const from = columns.count;
  // Arrays of fixed size, outside the heap that is measured.
  const probe = (window.probe = { count: 0, ingest_ms: 0, newest: from - 1 });
  for (const name of ['frames', 'draws', 'ages']) probe[name] = new Float64Array(1 << 17);
  for (const name of ['received', 'drawn']) probe[name] = new Int32Array(1 << 18);
  const began_ms = performance.now();
  let before_ms = began_ms;

  const ingest = store.ingest.bind(store);
  store.ingest = (kind, record, runId) => {
    const at = performance.now();
    ingest(kind, record, runId);
    probe.ingest_ms += performance.now() - at;
    if (kind === 'iteration') probe.received[columns.count - 1 - from] = record.requests.length;
  };

  const { track } = score.lanes;
  const paint = track.paint;
  track.paint = (ctx, index, box) => {
    paint(ctx, index, box);
    if (index < from) return;
    let n = 0;
    for (let k = 0; k < columns.ops(index); k++) {
      const op = columns.op(index, k);
      if (SLICES.has(columns.opKind[op]) && columns.opLane[op] >= 0) n++;
    }
    probe.drawn[index - from] = n;
    probe.newest = Math.max(probe.newest, index);
  };

  const { live } = app,
    frame = live.frame.bind(live);
  live.frame = (now_ms, elapsed_ms) => {
    const at = performance.now();
    frame(now_ms, elapsed_ms);
    const done = performance.now();
    const i = probe.count++;
    probe.draws[i] = done - at;
    probe.frames[i] = at - before_ms;
    before_ms = at;
    if (probe.newest < from) return;
    const end_ns = columns.end_at_ns[columns.slot(probe.newest)];
    const wall_ms = performance.timeOrigin + done;
    probe.ages[i] = wall_ms - store.run.started_unix_us / 1e3 - end_ns / 1e6;
  };

  const quantile = (values, q) => {
    const sorted = values.slice(0, probe.count).sort();
    return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] ?? 0;
  };

  // What was drawn is compared up to the newest column that was: later ones are on their way.
  probe.read = () => {
    const lasted_ms = before_ms - began_ms;
    const upTo = probe.newest - from + 1;
    const sum = (values) => values.slice(0, upTo).reduce((a, b) => a + b, 0);
    const frames = probe.frames.slice(0, probe.count);
    return {
      frames_per_s: (probe.count / lasted_ms) * 1e3,
      frame_ms_max: quantile(frames, 1),
      slow_frames: frames.filter((ms) => ms > 34).length,
      draw_ms_p50: quantile(probe.draws, 0.5),
      draw_ms_p95: quantile(probe.draws, 0.95),
      draw_ms_p99: quantile(probe.draws, 0.99),
      ingest_share: probe.ingest_ms / lasted_ms,
      age_ms_p50: quantile(probe.ages, 0.5),
      age_ms_p95: quantile(probe.ages, 0.95),
      age_ms_max: quantile(probe.ages, 1),
      rows_received: sum(probe.received),
      marks_drawn: sum(probe.drawn),
      columns: upTo,
      lanes: store.lanes.inUse,
      records: store.records,
    };
  };
})();
