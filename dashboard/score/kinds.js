// Owns: the closed list of what a lane can show in one iteration, and the admission stops in the
// order of telemetry/records.py. Called by: store.js, which writes kinds, and every view.
// It must never know colours or pixels; marks.js says how a kind looks.

export const KIND = Object.freeze({
  PREFILL: 0,
  DECODE: 1,
  RECOMPUTE: 2,
  WAIT: 3, // the blocker: the admission stop names its reason
  BEHIND: 4, // waits behind the blocker
  NEXT: 5, // came after the plan; the next step will look at it
  PREEMPTED: 6,
  PASSED: 7,
  HELD: 8,
  ARRIVE: 16,
  HIT: 17,
  FIRST: 18,
  FINISH: 19,
  CANCEL: 20,
  PREEMPT: 21,
  ERROR: 22,
});

const FIRST_MARK = 16;

// Bodies fill a tile of time; marks are instants drawn over them.
export const isMark = (kind) => kind >= FIRST_MARK;
export const isSlice = (kind) => kind <= KIND.RECOMPUTE;
export const isWait = (kind) => kind >= KIND.WAIT && kind <= KIND.PREEMPTED;

export const STOPS = Object.freeze([
  'no_waiting',
  'batch_closed',
  'seqs',
  'budget',
  'prefill_cap',
  'dependency',
  'slo',
  'kv',
  'policy',
]);
