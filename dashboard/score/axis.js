// Owns: the time axis under the tracks and the card of the selected request. Called by: score.js.
// Both are plain elements: the axis moves by transforms, the card is rebuilt when it changed.

import { make, put, write } from '../dom.js';
import { duration, int, timeOfDay } from '../format.js';
import { firstTokenNs } from './request.js';
import { list } from './tooltip.js';

const STEPS_S = [0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20];
const LABEL_PX = 95;

export class Axis {
  constructor(view, ticks) {
    Object.assign(this, { view, ticks });
    this.at = [];
  }

  // Which ticks there are; at 8 Hz.
  draw(startedUs, rem) {
    const { view, ticks } = this;
    const least = (LABEL_PX * rem) / 13;
    const step_ns = 1e9 * (STEPS_S.find((s) => s * view.scale >= least) ?? 20);
    this.at.length = 0;
    // Ticks stand at round times of day; the server's zero is no round time.
    const phase_ns = (startedUs % (step_ns / 1e3)) * 1e3;
    const first_ns = Math.ceil((view.left + phase_ns) / step_ns) * step_ns - phase_ns;
    for (let ns = first_ns; ns < view.right; ns += step_ns) {
      const tick =
        ticks.children[this.at.length] ||
        ticks.appendChild(make('div', { class: 'tick' }, make('b')));
      this.at.push(ns);
      tick.hidden = ns < 0;
      const whole = Math.round(ns / 1e6 + startedUs / 1e3) % 1000 === 0;
      tick.classList.toggle('whole', whole);
      write(tick.firstChild, timeOfDay(ns, startedUs, whole ? 0 : 2));
    }
    for (let i = this.at.length; i < ticks.children.length; i++) ticks.children[i].hidden = true;
    this.slide();
  }

  clear() {
    this.at.length = 0;
    for (const tick of this.ticks.children) tick.hidden = true;
  }

  // Where they are; each frame.
  slide() {
    this.at.forEach((ns, i) => {
      this.ticks.children[i].style.transform = `translateX(${Math.round(this.view.x(ns))}px)`;
    });
  }
}

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
