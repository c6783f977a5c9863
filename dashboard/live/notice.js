// Owns: the state of the link in one place: a word in the bar, and a banner when it needs an eye.
// Called by: main.js 4 times a second. `notice` is pure: state in, words out.
// What is lost or unknown is said here in so many words, until the reader dismisses it.

import { make, put } from '../dom.js';
import { int, plural, timeOfDay } from '../format.js';

const WORD = {
  connecting: ['◌', 'connecting'],
  live: ['●', 'live'],
  disconnected: ['■', 'disconnected'],
};

// {key, level, head, body, retry?}, or null when there is nothing to say.
export function notice(store, link) {
  if (link === 'disconnected') return down(store);
  if (store.fault) {
    return {
      key: `fault/${store.fault.fault_at_ns}`,
      level: 'bad',
      head: 'The engine failed',
      body:
        `${store.fault.where}: ${store.fault.error}. Requests that ran in it have ended with an ` +
        'error. This page goes on as soon as a new engine is ready.',
    };
  }
  if (store.restarts && store.lostUnknown) {
    return {
      key: `restart/${store.restarts}`,
      level: 'warn',
      head: 'The server restarted',
      body:
        'This is a new run: records from before are not shown, and the numbers begin anew. ' +
        'Records lost in between: unknown.',
    };
  }
  return lost(store);
}

function down(store) {
  const { columns, run } = store;
  const s = columns.count > columns.first ? columns.slot(columns.last) : -1;
  const last =
    run && s >= 0
      ? `Last record: step ${int(columns.step[s])} at ` +
        `${timeOfDay(columns.end_at_ns[s], run.started_unix_us)}. Nothing on this page is newer. `
      : 'No record has come yet. ';
  return {
    key: 'down',
    level: 'bad',
    head: 'Disconnected',
    body: last + 'Trying again by itself.',
    retry: true,
  };
}

function lost(store) {
  const { lostHere, lostAsleep, lostAtSource, lostUnknown } = store;
  const hatched = 'The gap is hatched in every track.';
  if (lostUnknown) {
    return {
      key: 'lost/unknown',
      level: 'warn',
      head: 'Records lost: unknown',
      body: `The server did not know this page’s position. ${hatched}`,
    };
  }
  if (!lostHere && !lostAtSource) return null;
  const parts = [];
  const awake = lostHere - lostAsleep;
  if (lostAsleep) parts.push(`${int(lostAsleep)} came while nobody looked at this tab.`);
  if (awake) parts.push('This page read too slowly or was away too long.');
  if (lostHere) parts.push('The history has them.');
  if (lostAtSource) {
    parts.push(`${plural(lostAtSource, 'iteration')} never left the engine: nobody has them.`);
  }
  return {
    key: `lost/${lostHere}/${lostAtSource}`,
    level: 'warn',
    head: `${plural(lostHere + lostAtSource, 'record')} lost`,
    body: `${parts.join(' ')} ${hatched}`,
  };
}

export function lostWord({ lostHere, lostAtSource, lostUnknown }) {
  if (lostUnknown) return 'lost: unknown';
  return `${int(lostHere + lostAtSource)} lost`;
}

export class Notice {
  constructor({ word, banner, onRetry }) {
    Object.assign(this, { word, banner, onRetry });
    this.dismissed = null;
    this.shown = null;
  }

  update(store, link) {
    const mark = `${link}/${lostWord(store)}`;
    if (mark !== this.wordShown) {
      this.wordShown = mark;
      const [glyph, name] = WORD[link];
      this.word.dataset.state = link === 'live' && lostWord(store) !== '0 lost' ? 'lost' : link;
      put(
        this.word,
        make('i', { text: glyph, 'aria-hidden': 'true' }),
        name,
        make('span', { class: 'faint', text: lostWord(store) }),
      );
    }
    const n = notice(store, link);
    if (!n) this.dismissed = null;
    const key = n && n.key !== this.dismissed ? `${n.key}/${n.body}` : null;
    if (key === this.shown) return;
    this.shown = key;
    this.banner.hidden = !key;
    if (key) this.draw(n);
  }

  draw(n) {
    this.banner.dataset.level = n.level;
    const act = n.retry
      ? make('button', { class: 'quiet', text: 'Retry now', onclick: this.onRetry })
      : make('button', {
          class: 'quiet',
          text: 'Dismiss',
          onclick: () => {
            this.dismissed = n.key;
            this.banner.hidden = true;
          },
        });
    put(
      this.banner,
      make('b', { text: `${n.level === 'bad' ? '■' : '▲'} ${n.head}` }),
      make('span', { class: 'muted', text: n.body }),
      make('span', { class: 'spacer' }),
      act,
    );
  }
}
