// Owns: which request has which lane. A request keeps its lane for life, a lane rests between two
// so that ends show. A long queue gets lanes for its head only, or those who run would shrink to
// hairs; the others stand here in order of arrival, counted, and get a lane at admission.
// Called by: store.js (write), lanes.js and queue.js (read). Bounded by the lanes and the live.

const REST_NS = 250e6;
const WAITERS_MOST = 12;
const NOBODY = Object.freeze([]);

export class LaneSlots {
  constructor(most, waitersMost = WAITERS_MOST) {
    this.most = most;
    this.waitersMost = waitersMost;
    this.clear();
  }

  clear() {
    this.slots = []; // {request, free_at_ns, last}: who has it, or who had it until when
    this.beyond = [];
  }

  take(r, now_ns) {
    const room = !this.beyond.length && this.waiters() < this.waitersMost;
    if (!room || !this.place(r, now_ns)) this.beyond.push(r);
  }

  waiters() {
    let n = 0;
    for (const { request } of this.slots) if (request && request.state === 'waiting') n++;
    return n;
  }

  // Who runs has a lane before anybody who waits, if need be one that has not rested yet.
  admit(r, now_ns) {
    if (r.lane >= 0 || !(this.place(r, now_ns) || this.place(r, Infinity))) return;
    this.beyond.splice(this.beyond.indexOf(r), 1);
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
    if (!this.beyond.length) return NOBODY;
    let n = 0;
    const room = this.waitersMost - this.waiters();
    while (n < this.beyond.length && n < room && this.place(this.beyond[n], now_ns)) n++;
    return n ? this.beyond.splice(0, n) : NOBODY;
  }

  get inUse() {
    return this.slots.length;
  }
}
