// Owns: the card of the selected request: what is on record of it so far. Called by: the pages that
// show a score. It is written anew only when something changed.

import { make, put, write } from '../dom.js';
import { duration, int } from '../format.js';
import { firstTokenNs } from './request.js';
import { list } from './tooltip.js';

export class Card {
  constructor({ onClear, onOpen }) {
    this.name = make('span');
    this.state = make('span', { class: 'when' });
    this.facts = make('div');
    // Made once: a button that is made anew under the pointer is never pressed.
    this.open = make('button', { class: 'quiet', text: 'Open', title: 'Enter', onclick: onOpen });
    const clear = make('button', {
      class: 'quiet',
      text: 'Clear',
      title: 'Escape',
      onclick: onClear,
    });
    this.element = make(
      'section',
      { class: 'panel card', hidden: true },
      make(
        'h2',
        {},
        this.name,
        this.state,
        make('span', { class: 'spacer' }),
        this.open,
        clear,
      ),
      this.facts,
    );
    this.shown = '';
  }

  update(r) {
    this.element.hidden = !r;
    const mark = r ? `${r.id}/${r.state}/${r.output}/${r.computed}/${r.preemptions}` : '';
    if (mark === this.shown) return;
    this.shown = mark;
    if (!r) return;
    write(this.name, r.name);
    write(this.state, `${r.start?.tenant ?? ''} · ${r.end ? r.end.finish : r.state}`);
    this.open.disabled = !r.start;
    put(this.facts, list(facts(r)));
  }
}

function facts(r) {
  const { start, end } = r;
  const out = [
    ['request_id', start?.request_id ?? '–'],
    ['prompt_tokens', start ? int(start.prompt_tokens) : '–'],
    ['output_tokens', `${int(r.output)}${start ? ' of ' + int(start.max_tokens) : ''}`],
  ];
  if (start?.external_id) out.splice(1, 0, ['external_id', start.external_id]);
  if (r.cached) out.push(['cached_tokens', int(r.cached)]);
  if (r.preemptions) out.push(['preemptions', int(r.preemptions)]);
  if (r.recomputed) out.push(['recomputed_tokens', int(r.recomputed)]);
  const first_ns = firstTokenNs(r);
  if (end) {
    const since = (ns) => (ns === null ? '–' : duration((ns - end.received_at_ns) / 1e6));
    out.push(
      ['admitted after', since(end.admitted_at_ns)],
      ['first token after', first_ns === null ? '–' : duration(first_ns / 1e6)],
      ['released after', since(end.released_at_ns)],
    );
  } else if (first_ns !== null) out.push(['first token after', duration(first_ns / 1e6)]);
  return out;
}
