// Owns: the traffic that the simulated engine is asked to serve, as scenes, the seeded randomness
// behind it, and a request as it arrives. Called by: simulate.js. It knows nothing of scheduling.

export function random(seed) {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

// A story is a loop of scenes: [seconds, arrivals a second, prompt median, output median, extra].
export const STORIES = {
  tour: [
    [7, 7, 110, 80],
    [7, 6.4, 100, 90, { long: [0.5, 3.6] }],
    [5, 5, 110, 80],
    [9, 3.9, 400, 320],
    [8, 1.5, 120, 80, { cancel: 6 }],
    [4, 5, 100, 70, { burst: 16 }],
    [9, 5, 110, 70],
  ],
  steady: [[60, 7, 90, 80]],
};

// The engine's own state of a request, with the record of its start.
export function newRequest({ id, at, shared, prompt, received, target, cancelAt }) {
  return {
    id,
    shared,
    received,
    prompt,
    known: prompt,
    target,
    cancelAt,
    state: 'waiting',
    computed: 0,
    highest: 0,
    output: 0,
    blocks: 0,
    lost: 0,
    hits: 0,
    preemptions: 0,
    iterations: 0,
    start: {
      request: id,
      request_id: `chatcmpl-${String(id).padStart(8, '0')}`,
      external_id: null,
      parent_id: null,
      tenant: ['atlas', 'birch', 'cedar'][id % 3],
      arrived_at_ns: at,
      prompt_tokens: prompt,
      max_tokens: Math.max(256, target),
      priority: 0,
      slo: null,
      stream: true,
    },
  };
}
