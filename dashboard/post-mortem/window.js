// Owns: the arithmetic of windows in time: a run's extent, round lengths, a window kept within
// it, and what to offer when one holds too much to draw. Called by: page.js, picker.js, range.js.
// Pure: microseconds of the wall clock in and out.

// What one picture may hold: iterations and rows of batches, which the columns keep whole.
export const DRAWN_MOST = Object.freeze({ iterations: 12_000, slices: 400_000 });
export const FIRST_US = 30e6; // how long a window is that nobody chose
const LEAST_US = 20e3;

export const LENGTHS = Object.freeze([
  [5e6, '5 s'],
  [15e6, '15 s'],
  [60e6, '1 min'],
  [300e6, '5 min'],
  [1800e6, '30 min'],
  [7200e6, '2 h'],
]);

// [from, to] of at least LEAST_US, moved rather than cut where it sticks out of the extent.
export function within([from, to], [first, last]) {
  const whole = Math.max(LEAST_US, last - first);
  const length = Math.min(whole, Math.max(LEAST_US, to - from));
  const begin = Math.min(Math.max(from, first), first + whole - length);
  return [Math.round(begin), Math.round(begin + length)];
}

export function moved([from, to], share) {
  const by = (to - from) * share;
  return [from + by, to + by];
}

// Longer or shorter about its middle.
export function scaled([from, to], factor) {
  const middle = (from + to) / 2,
    half = ((to - from) * factor) / 2;
  return [middle - half, middle + half];
}

export const longAs = ([, to], length_us) => [to - length_us, to];

// The newest stretch of an extent: where a page begins that was asked for no window.
export const newest = ([first, last]) => within([last - FIRST_US, last], [first, last]);

// How many times too much a window holds; up to 1 it can be drawn.
export function excess({ iterations, slices }) {
  return Math.max(iterations / DRAWN_MOST.iterations, slices / DRAWN_MOST.slices);
}

// Of a window that is too long: the narrower ones worth a look. `buckets` are {at_us, weight} of
// the window, equally long; the heaviest stretch of them comes first.
export function narrower([from, to], counts, buckets = []) {
  const length = Math.max(LEAST_US, Math.floor(((to - from) / excess(counts)) * 0.9));
  const offers = [];
  const best = heaviest(buckets, length);
  if (best !== null) {
    const begin = Math.min(Math.max(from, best - length / 2), to - length);
    offers.push({ words: 'around its longest queue', window: [begin, begin + length] });
  }
  offers.push({ words: 'its beginning', window: [from, from + length] });
  offers.push({ words: 'its end', window: [to - length, to] });
  return offers;
}

// The middle of the stretch of a length whose buckets weigh most; null if none weighs anything.
function heaviest(buckets, length_us) {
  let best = null,
    most = 0,
    sum = 0,
    tail = 0;
  buckets.forEach(({ at_us, weight }) => {
    sum += weight;
    while (buckets[tail].at_us < at_us - length_us) sum -= buckets[tail++].weight;
    if (sum <= most) return;
    most = sum;
    best = (buckets[tail].at_us + at_us) / 2;
  });
  return best;
}
