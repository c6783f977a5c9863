// Owns: the card at the pointer that shows a record in words and in its own field names. Called
// by: gestures.js on hover. It reads the columns alone, so it shows the past as it was recorded.

import { make, put } from '../dom.js';
import { duration, int, plural, reason } from '../format.js';
import { KIND, STOPS, isMark, isSlice } from './kinds.js';

const VERB = {
  [KIND.PREFILL]: 'reads its prompt',
  [KIND.DECODE]: 'decodes',
  [KIND.RECOMPUTE]: 'computes again',
  [KIND.WAIT]: 'is the blocker',
  [KIND.BEHIND]: 'waits behind',
  [KIND.NEXT]: 'has just come',
  [KIND.PREEMPTED]: 'is preempted',
  [KIND.PASSED]: 'was passed over',
  [KIND.HELD]: 'is held by the batch',
};

// What a lane shows in an iteration: {kind, id, amount, position, blocks, row}, or null.
export function sliceAt(columns, index, lane) {
  let row = 0;
  for (let k = 0; k < columns.ops(index); k++) {
    const op = columns.op(index, k),
      kind = columns.opKind[op];
    if (columns.opLane[op] === lane && !isMark(kind)) {
      return {
        kind,
        id: columns.opRequest[op],
        amount: columns.opAmount[op],
        position: columns.opPosition[op],
        blocks: columns.opBlocks[op],
        row,
      };
    }
    if (isSlice(kind)) row++;
  }
  return null;
}

export class Tip {
  constructor() {
    this.element = make('div', { class: 'tip', role: 'tooltip', hidden: true });
    document.body.append(this.element);
  }

  hide() {
    this.element.hidden = true;
  }

  show(store, index, found, { clientX, clientY }) {
    const { element } = this;
    put(element, found && aboutRequest(store, index, found), aboutIteration(store, index));
    element.hidden = false;
    const box = element.getBoundingClientRect();
    const right = clientX + 18 + box.width > innerWidth;
    const top = Math.min(innerHeight - box.height - 8, Math.max(8, clientY - box.height / 3));
    element.style.left = (right ? clientX - 18 - box.width : clientX + 18) + 'px';
    element.style.top = top + 'px';
  }
}

function aboutRequest(store, index, { kind, id, amount, position, blocks, row }) {
  const { columns } = store,
    s = columns.slot(index);
  const r = store.requests.get(id);
  const slice = isSlice(kind),
    stop = STOPS[columns.stop[s]];
  const facts = slice
    ? [
        ['batch row', int(row)],
        ['start_positions', int(position)],
        ['token_counts', int(amount)],
        ['kv_block_counts', int(blocks)],
      ]
    : [];
  if (!slice && r) {
    facts.push(['waiting', duration((columns.end_at_ns[s] - r.arrived_at_ns) / 1e6)]);
  }
  const why = {
    [KIND.WAIT]: `${reason(stop)}: nobody behind it may enter`,
    [KIND.BEHIND]: `${reason(stop)}, behind ${store.name(columns.blocker[s])}`,
    [KIND.NEXT]: 'it came after this step was planned',
    [KIND.PREEMPTED]: 'its blocks went to another request',
  }[kind];
  const tokens = slice && kind !== KIND.DECODE ? `: ${plural(amount, 'token')}` : '';
  const prompt = r?.start ? `prompt ${int(r.prompt_tokens)} · output ${int(r.output)}` : '';
  return make(
    'div',
    { class: 'tip-request' },
    make(
      'div',
      { class: 'tip-head' },
      `${store.name(id)} ${VERB[kind]}${tokens}`,
      make('span', { text: prompt }),
    ),
    why && make('p', { text: why }),
    list(facts),
  );
}

function aboutIteration(store, index) {
  const { columns } = store,
    s = columns.slot(index);
  const facts = [
    ['prefill_tokens', int(columns.prefill_tokens[s])],
    ['decode_tokens', int(columns.decode_tokens[s])],
    ['padding_tokens', int(columns.padding_tokens[s])],
    ['device_ns', duration(columns.device_ns[s] / 1e6)],
    [
      'plan_ns · commit_ns',
      `${duration(columns.plan_ns[s] / 1e6)} · ${duration(columns.commit_ns[s] / 1e6)}`,
    ],
    ['kv_blocks_used', `${int(columns.kv_blocks_used[s])} of ${int(store.run.kv_blocks_total)}`],
  ];
  if (columns.blocker[s] >= 0) {
    const blocker = store.name(columns.blocker[s]);
    facts.push(['admission_stop', `${STOPS[columns.stop[s]]} (${blocker})`]);
  }
  if (columns.preempted[s]) facts.push(['preempted', int(columns.preempted[s])]);
  if (columns.lost_before[s]) facts.push(['lost_before', int(columns.lost_before[s])]);
  const tile = duration(columns.tileNs(index) / 1e6);
  return make(
    'div',
    {},
    make(
      'div',
      { class: 'tip-head' },
      `iteration ${int(columns.step[s])}`,
      make('span', {
        text: `${tile} · ${int(columns.running[s])} run · ${int(columns.waiting[s])} wait`,
      }),
    ),
    list(facts),
  );
}

export function list(facts) {
  return make(
    'dl',
    {},
    facts.flatMap(([name, value]) => [
      make('dt', { text: name }),
      make('dd', { text: value, title: value.length > 16 && value }),
    ]),
  );
}
