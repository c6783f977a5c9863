// Owns: which request has which lane. A request keeps its lane for life, a lane rests between two
// so that ends show, and those beyond the last lane wait here in order of arrival, counted.
// Called by: store.js (write), lanes.js and queue.js (read). Bounded by the lanes.

const REST_NS = 250e6;
const NOBODY = Object.freeze([]);

export class LaneSlots {
  constructor(most) {
    this.most = most;
    this.clear();
  }

  clear() {
    this.slots = []; // {request, free_at_ns, last}: who has it, or who had it until when
    this.beyond = [];
  }

  take(r, now_ns) {
    if (this.beyond.length || !this.place(r, now_ns)) this.beyond.push(r);
  }

  place(r, now_ns) {
    for (let i = 0; i < this.most; i++) {
      const slot = this.slots[i];
      if (slot && (slot.request || slot.free_at_ns > now_ns)) continue;
      this.slots[i] = { request: r, free_at_ns: 0 };
      r.lane = i;
      return true;
    }
    return false;
  }

  release(r, free_at_ns) {
    if (r.lane >= 0) {
      this.slots[r.lane] = { request: null, free_at_ns: free_at_ns + REST_NS, last: r };
      return;
    }
    const at = this.beyond.indexOf(r);
    if (at >= 0) this.beyond.splice(at, 1);
  }

  // Gives freed lanes to those beyond the last one, first come first served; answers who got one.
  settle(now_ns) {
    let n = 0;
    while (n < this.beyond.length && this.place(this.beyond[n], now_ns)) n++;
    return n ? this.beyond.splice(0, n) : NOBODY;
  }

  get inUse() {
    return this.slots.length;
  }
}
