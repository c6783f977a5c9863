// Owns: the score of one side of a comparison: its first stretch, as long as the other side's, so
// that both have one scale. Called by: compare/page.js. It is the score of a past window without
// the panels beside it.

import { make, write } from '../dom.js';
import { Asker, objects } from '../post-mortem/asker.js';
import { load } from '../post-mortem/load.js';
import { RUNS } from '../post-mortem/overview.js';
import { Score } from '../score/score.js';
import { Store } from '../score/store.js';
import * as strips from '../score/strips.js';
import { View } from '../score/view.js';

export const SHOWN_US = 20e6;

// Both sides' batch and step strips get one full scale, or equal bars would mean unequal things.
export function level(pictures) {
  const kinds = [
    [strips.batchTokens, strips.tokenScale],
    [strips.tileMs, strips.stepScale],
  ];
  kinds.forEach(([measure, scaleOf], i) => {
    const most = Math.max(...pictures.map((picture) => picture.highest(measure)));
    for (const { score } of pictures) {
      const scale = scaleOf();
      const rungs = scale.rungs.filter((rung) => rung >= most);
      if (rungs.length) scale.rungs = rungs;
      scale.full = scale.rungs[0];
      score.bands.scales[i] = scale;
    }
  });
  for (const { score } of pictures) score.redraw();
}

export class Picture {
  constructor(letter) {
    this.view = new View({ past: true });
    this.score = new Score({ store: new Store(), view: this.view, past: true });
    this.about = make('span', { class: 'muted' });
    this.open = make('a', { class: 'quiet', text: 'Post-mortem', hidden: true });
    this.said = make('p', { class: 'cmp-said', role: 'status' });
    this.element = make(
      'section',
      { class: 'cmp-side', 'aria-label': `Score of ${letter}` },
      make('h2', {}, make('b', { class: 'ab', text: letter }), this.about, this.open),
      this.score.element,
      this.said,
    );
  }

  // about: what the server said of the side; length_us: how much of its beginning is shown.
  async show(ask, file, about, length_us, signal) {
    const asker = new Asker(ask, file);
    this.score.use(new Store());
    this.say('Reading…');
    const [run_id] = about.runs;
    const runs = objects(await asker.sql(RUNS, [], { signal }));
    const run = runs.find((one) => one.run_id === run_id);
    if (!run) throw new Error(`run ${run_id} is no longer on record`);
    const from_us = Math.max(
      about.from_unix_us,
      run.started_unix_us + Math.floor(run.first_ns / 1e3),
    );
    const ns = (us) => (us - run.started_unix_us) * 1e3;
    let wide_us = Math.min(length_us, Math.max(1e5, about.to_unix_us - from_us));
    for (;;) {
      const place = { run: run_id, from_ns: ns(from_us), to_ns: ns(from_us + wide_us) };
      const { counts, store } = await load(asker, place, { signal });
      if (!store) {
        wide_us /= 2;
        continue;
      }
      if (signal.aborted) return null;
      this.score.use(store);
      this.view.clear();
      this.view.span(place.from_ns, ns(from_us + length_us));
      this.score.redraw();
      this.say(counts.iterations ? '' : 'No step of the engine is in this stretch.');
      return { run: run_id, from_us, to_us: from_us + wide_us };
    }
  }

  // The highest bar of a strip in what is shown.
  highest(measure) {
    const { columns } = this.score.store;
    return strips.highest(columns, this.view.left, this.view.right, measure);
  }

  say(words) {
    write(this.said, words);
    this.said.hidden = !words;
  }
}
