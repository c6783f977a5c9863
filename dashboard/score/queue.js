// Owns: the list of who waits, why, and behind whom. Called by: the pages at 8 Hz, for now or for
// the iteration under the cursor. The blocker waits for the reason itself; the others wait behind
// it. Those beyond the last lane are counted from the record, never silently absent.

import { make, put, write } from '../dom.js';
import { duration, int, plural, reason } from '../format.js';
import { KIND, STOPS, isWait } from './kinds.js';

const ROWS = 6;

// Who waits in an iteration: [{r, kind}], in order of arrival. Those beyond the last lane have
// nothing on record an iteration, so they are listed for the newest one only; `now` leaves out who
// ended since, and all that the newest iteration says where its engine is gone.
export function waiting(store, index, now = false) {
  const { columns } = store,
    out = [];
  if (now && store.gone) {
    const kind = KIND.NEXT;
    return [...store.live].slice(0, ROWS * 2).map((r) => ({ r, kind }));
  }
  for (let k = 0; k < columns.ops(index); k++) {
    const op = columns.op(index, k),
      kind = columns.opKind[op];
    if (!isWait(kind)) continue;
    const r = store.requests.get(columns.opRequest[op]);
    if (r && !(now && r.end)) out.push({ r, kind });
  }
  if (index === columns.last) {
    const blocker = columns.blocker[columns.slot(index)];
    for (const r of store.lanes.beyond) {
      if (out.length >= ROWS * 2) break;
      if (r.state === 'preempted') out.push({ r, kind: KIND.PREEMPTED });
      else if (r.id === blocker) out.push({ r, kind: KIND.WAIT });
      else if (r.state === 'waiting') out.push({ r, kind: KIND.BEHIND });
    }
  }
  return out.sort((a, b) => a.r.arrived_at_ns - b.r.arrived_at_ns);
}

export class Queue {
  constructor({ onPick, onHover }) {
    this.count = make('span', { class: 'when' });
    this.more = make('div', { class: 'more' });
    this.rows = Array.from({ length: ROWS }, () => waiterRow(onPick, onHover));
    this.empty = make('p', {
      class: 'hush',
      text: 'Nobody waits. A new request joins at the next step.',
    });
    this.element = make(
      'section',
      { class: 'panel' },
      make('h2', {}, 'Waiting', this.count),
      this.empty,
      make(
        'div',
        { class: 'queue' },
        this.rows.map((r) => r.element),
      ),
      this.more,
    );
  }

  clear() {
    write(this.count, '');
    write(this.more, '');
    this.empty.hidden = false;
    for (const row of this.rows) row.element.hidden = true;
  }

  update(store, index, selected, past) {
    const { columns } = store,
      s = columns.slot(index);
    const list = waiting(store, index, !past),
      total = past ? Math.max(list.length, columns.waiting[s]) : store.present().waiting;
    write(this.count, `${total || ''}${past ? ' at cursor' : ''}`);
    this.empty.hidden = total > 0;
    const stop = STOPS[columns.stop[s]],
      end_ns = columns.end_at_ns[s];
    this.rows.forEach((row, i) => {
      row.element.hidden = !list[i];
      if (list[i]) fill(row, list[i], { stop, end_ns, selected });
    });
    const hidden = total - Math.min(ROWS, list.length);
    const next = list[ROWS];
    const longest = next ? ', up to ' + duration((end_ns - next.r.arrived_at_ns) / 1e6) : '';
    write(this.more, hidden > 0 ? `${plural(hidden, 'more request')} behind${longest}` : '');
  }
}

function fill(row, { r, kind }, { stop, end_ns, selected }) {
  row.id = r.id;
  const preempted = kind === KIND.PREEMPTED;
  const word = preempted ? r.reason : kind === KIND.NEXT ? 'no_waiting' : stop;
  write(row.name, r.name);
  write(row.reason, kind === KIND.BEHIND ? 'behind' : reason(word ?? 'preempted_kv'));
  row.reason.title = kind === KIND.BEHIND ? `${reason(stop)}, behind the one above` : '';
  row.reason.dataset.reason = preempted ? 'preempted' : word;
  row.reason.dataset.blocker = kind === KIND.WAIT;
  const prompt = r.start ? int(r.prompt_tokens) + ' tok' : '';
  write(row.need, preempted ? 'lost ' + int(r.highest) : prompt);
  write(row.waited, duration((end_ns - r.arrived_at_ns) / 1e6));
  row.element.classList.toggle('on', r.id === selected);
}

function waiterRow(onPick, onHover) {
  const row = {
    id: null,
    name: make('span', { class: 'name' }),
    reason: make('span', { class: 'reason' }),
    need: make('span', { class: 'num faint' }),
    waited: make('span', { class: 'num' }),
  };
  row.element = make(
    'button',
    {
      class: 'waiter',
      hidden: true,
      onclick: () => onPick(row.id),
      onmouseenter: () => onHover(row.id),
      onmouseleave: () => onHover(null),
    },
    row.name,
    row.reason,
    row.need,
    row.waited,
  );
  return row;
}
