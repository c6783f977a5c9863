// Owns: the parts of the Request view that are elements, not canvas: the head with its sentence,
// the waterfall's rows, the timeline, the receipt, and the prompt where prompts are shown. Called
// by: page.js. It must never fetch: what is clicked is told to the page.

import { make } from '../dom.js';
import { duration, int, percent, timeOfDay } from '../format.js';
import { phrase, relation, sentence } from './causes.js';
import { gapWords } from './gaps.js';
import { falls } from './waterfall.js';

const facts = (rows) =>
  make(
    'dl',
    { class: 'facts' },
    rows.flatMap(([name, value]) => [
      make('dt', { text: name }),
      make('dd', { text: value ?? '–', title: String(value ?? '').length > 24 && value }),
    ]),
  );

const panel = (title, note, ...children) =>
  make(
    'section',
    { class: 'req-panel' },
    make('h2', {}, title, note && make('span', { class: 'when', text: note })),
    children,
  );

export function stateWords({ state, finish, cancel_cause }) {
  if (state !== 'finished') return state;
  return cancel_cause ? `${finish} (${cancel_cause})` : finish;
}

// The sentence at the top, and what the record is honest about.
export function summary(body) {
  const { whole, words } = sentence(body);
  const first = body.ttft_ms === null ? null : `First token after ${duration(body.ttft_ms)}.`;
  return [make('b', { text: whole }), words, first && ' ' + first].filter(Boolean);
}

export function notes(body, asked) {
  const said = [];
  if (!body.complete) {
    said.push('The iterations of its beginning are no longer on record: its lane begins later.');
  }
  if (body.lane.left_out) said.push(`${int(body.lane.left_out)} older spans are left out.`);
  if (body.error) said.push(body.error);
  if (body.external_id !== null && body.external_id === asked && body.matches.length > 1) {
    said.push(`${int(body.matches.length)} requests carry this id; this is the latest of them.`);
  }
  return said;
}

// ---- the waterfall

function fallOf(row, body, { nameOf, onPick }) {
  const bar = make('i', { 'data-cause': row.cause ?? 'rest' });
  bar.style.left = row.left * 100 + '%';
  bar.style.width = Math.max(0.15, row.share * 100) + '%';
  return make(
    'tr',
    { class: 'fall' },
    make('th', { scope: 'row', title: row.cause && phrase(row.cause) }, causeWords(row)),
    make('td', { class: 'fall-bar', 'aria-hidden': 'true' }, make('div', {}, bar)),
    make('td', { class: 'num', text: duration(row.ms) }),
    make('td', { class: 'num faint', text: percent(row.share) }),
    make('td', { class: 'who' }, who(row, { nameOf, onPick })),
  );
}

const causeWords = ({ cause, count }) =>
  cause === null
    ? make('span', { class: 'muted', text: `${count} more, each too short to see` })
    : make('code', { text: cause });

function who({ cause, who: behind, others }, { nameOf, onPick }) {
  if (!behind.length) return [];
  return [
    make('span', { class: 'faint', text: relation(cause) + ' ' }),
    behind.map(({ request_id, tokens, ms }) =>
      make(
        'button',
        {
          class: 'link-name',
          title: `${request_id}: ${duration(ms)}`,
          onclick: () => onPick(request_id),
        },
        nameOf(request_id),
        tokens ? make('span', { class: 'faint', text: ` ${int(tokens)} tok` }) : null,
      ),
    ),
    others ? make('span', { class: 'faint', text: `and ${int(others)} more` }) : null,
  ].flat();
}

export function waterfall(body, acts) {
  return panel(
    'Where the time went',
    'each bar begins where the one before it ended',
    make(
      'div',
      { class: 'req-scroll' },
      make(
        'table',
        { class: 'falls' },
        make(
          'thead',
          { class: 'unseen' },
          make(
            'tr',
            {},
            ['cause', 'bar', 'time', 'share', 'who'].map((text) =>
              make('th', { scope: 'col', text }),
            ),
          ),
        ),
        make(
          'tbody',
          {},
          falls(body).map((row) => fallOf(row, body, acts)),
          make(
            'tr',
            { class: 'fall sum' },
            make('th', { scope: 'row', text: 'received to last write' }),
            make('td', { class: 'fall-bar' }),
            make('td', { class: 'num', text: duration(body.e2e_ms) }),
            make('td', { class: 'num faint', text: '100 %' }),
            make('td'),
          ),
        ),
      ),
    ),
  );
}

// The slow gaps as a list: each brings the cursor of the picture to it.
export function slowGaps(named, { nameOf, onGo }) {
  if (!named.length) return make('p', { class: 'muted', text: 'No gap stands out.' });
  return make(
    'ol',
    { class: 'slow' },
    named.map((gap) =>
      make(
        'li',
        {},
        make('button', {
          class: 'link-name',
          text: `token ${gap.token}`,
          onclick: () => onGo(gap.at_ms),
        }),
        ' ' + gapWords(gap, nameOf),
      ),
    ),
  );
}

// ---- the side

export function timeline(body) {
  const { began_unix_us, received_at_ns, timeline: events } = body;
  const at = began_unix_us === null ? null : timeOfDay(received_at_ns, began_unix_us, 3);
  const rows = events.map((event) => {
    const told = Object.entries(event).filter(([name]) => !['event', 'at_ms'].includes(name));
    const words = told.map(([name, value]) => `${name} ${value}`).join(', ');
    return make(
      'li',
      {},
      make('span', { class: 'num', text: '+' + duration(event.at_ms) }),
      make('span', {}, make('code', { text: event.event }), words && make('small', {}, words)),
    );
  });
  return panel('Timeline', at && `received ${at}`, make('ol', { class: 'events' }, rows));
}

export function receipt(body) {
  const used = body.receipt;
  const error = body.model_error === null ? '' : ` ± ${percent(body.model_error)}`;
  return panel(
    'Receipt',
    null,
    facts([
      ['request_id', body.request_id],
      ['external_id', body.external_id],
      ['tenant', body.tenant],
      ['stream', body.stream ? 'yes' : 'no'],
      ['priority', int(body.priority)],
      ['slo', body.slo],
      ['prompt_tokens', int(body.prompt_tokens)],
      ['cached_tokens', int(body.cached_tokens)],
      ['output_tokens', `${int(body.output_tokens)} of ${int(body.max_tokens)}`],
      ['recomputed_tokens', int(body.recomputed_tokens)],
      ['wasted_tokens', int(used.wasted_tokens)],
      ['dropped_tokens', int(used.dropped_tokens)],
      ['preemptions', int(body.preemptions)],
      ['iterations', int(used.iterations)],
      ['device', duration(used.device_ms)],
      ['KV', used.kv_block_s === null ? '–' : `${used.kv_block_s.toFixed(2)} block s`],
      ['client stalled', duration(body.client_stall_ms)],
      ['written', used.bytes === null ? '–' : `${int(used.bytes)} bytes`],
      ['rule', body.rule + error],
    ]),
  );
}

// Nothing of it exists on the page unless the server shows prompts.
export function promptOf({ prompt }) {
  if (!prompt) return null;
  const more = prompt.left_out_tokens ? `${int(prompt.left_out_tokens)} more tokens` : null;
  const text = make('pre', { class: 'req-prompt', tabindex: 0, text: prompt.text });
  return panel('Prompt', more, text);
}
