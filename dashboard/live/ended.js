// Owns: the list of requests that just ended: how, with how many tokens, and what kept each from
// running longest, when that was a fair part of its life. Called by: page.js once a second.
// It names only what the records show; the full split into causes is the server's to give.

import { make, put } from '../dom.js';
import { duration, int, percent, reason } from '../format.js';
import { STOPS } from '../score/kinds.js';

const ROWS_MAX = 16;
const FAIR_SHARE = 0.15;
const GLYPH = { stop: '▮', length: '▮', cancelled: '×', error: '!' };

// What kept a request from running longest: [reason, ns]. Its own record says how long it
// queued, also before this page was open; the reason is known for what the page saw.
export function heldUp(r) {
  const { end } = r,
    queued_ns = (end.admitted_at_ns ?? end.decided_at_ns) - end.arrived_at_ns;
  let worst = null,
    stop = 'queued';
  for (const entry of r.waits) {
    if (!STOPS.includes(entry[0])) worst = !worst || entry[1] > worst[1] ? entry : worst;
    else if (stop === 'queued' || entry[1] > r.waits.get(stop)) [stop] = entry;
  }
  return worst && worst[1] >= queued_ns ? worst : [stop, queued_ns];
}

export class Ended {
  constructor({ onPick }) {
    this.onPick = onPick;
    this.list = make('div', { class: 'ended' });
    this.rows = ROWS_MAX;
    this.shown = null;
    this.element = make(
      'section',
      { class: 'panel grow' },
      make('h2', {}, 'Just ended', make('span', { class: 'when', text: 'and what held it up' })),
      this.list,
    );
  }

  measure(rem) {
    const row = 1.82 * rem;
    const room = Math.floor((this.element.clientHeight - 2.4 * row) / row);
    this.rows = Math.max(1, Math.min(ROWS_MAX, room));
  }

  update(store) {
    const newest = store.ended[store.ended.length - 1];
    const mark = newest ? `${newest.id}/${this.rows}` : '';
    if (mark === this.shown) return;
    this.shown = mark;
    if (!newest) {
      put(this.list, make('p', { class: 'hush', text: 'No request has ended yet.' }));
      return;
    }
    put(
      this.list,
      store.ended
        .slice(-this.rows)
        .reverse()
        .map((r) => this.row(r)),
    );
  }

  row(r) {
    const { end } = r;
    const life_ns = end.released_at_ns - end.received_at_ns;
    const worst = heldUp(r);
    const held = worst[1] > FAIR_SHARE * life_ns;
    const bad = end.finish === 'cancelled' || end.finish === 'error';
    const word = held ? reason(worst[0]) : 'not held up';
    const cause = held ? worst[0] : bad ? 'bad' : 'own';
    const share = held ? `; ${worst[0]} for ${percent(worst[1] / life_ns)} of its life` : '';
    const title = end.error ?? `finish: ${end.finish}, ${int(end.output_tokens)} tokens${share}`;
    return make(
      'button',
      { class: 'ender', title, onclick: () => this.onPick(r.id) },
      make('span', { class: 'name', text: `${GLYPH[end.finish]} ${r.name}` }),
      make('i', { class: 'key', 'data-cause': cause }),
      make('span', { class: 'reason', text: bad && !held ? end.finish : word }),
      make('span', { class: 'num faint', text: int(end.output_tokens) }),
      make('span', { class: 'num', text: duration(life_ns / 1e6) }),
    );
  }
}
