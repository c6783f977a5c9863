// Owns: the score of one side of a comparison: all of it, or as much of its beginning as can be
// drawn, on the other side's scales; zoomed or moved, the other goes along. Called by:
// compare/page.js. It is the score of a past window without the panels beside it.

import { make, write } from '../dom.js';
import { Asker, objects } from '../post-mortem/asker.js';
import { load } from '../post-mortem/load.js';
import { RUNS } from '../post-mortem/overview.js';
import { Score } from '../score/score.js';
import { Store } from '../score/store.js';
import { SCALES, highest } from '../score/strips.js';
import { View } from '../score/view.js';

export const SHOWN_US = 600e6;
const LEAST_US = 1e5;

// Both sides have one width in time, and one full scale a strip, or equal bars would mean unequal
// things. `anew`: both were just drawn, from their beginnings.
export function together(pictures, { anew = false } = {}) {
  if (anew) {
    const wide_ns = Math.max(...pictures.map(({ wide_ns }) => wide_ns));
    for (const { view, zero_ns } of pictures) {
      view.clear();
      view.span(zero_ns, zero_ns + wide_ns);
    }
    if (pictures.every(({ score }) => score.drawable)) level(pictures);
    for (const picture of pictures) picture.place = picture.at();
    return;
  }
  const led = pictures.find((picture) => picture.place !== picture.at());
  if (!led) return;
  for (const picture of pictures) {
    if (picture !== led) picture.follow(led);
    picture.place = picture.at();
  }
}

function level(pictures) {
  for (const [name, { measure, create }] of Object.entries(SCALES)) {
    const most = Math.max(...pictures.map((picture) => picture.highest(measure)));
    for (const { score } of pictures) {
      const scale = create();
      const rungs = scale.rungs.filter((rung) => rung >= most);
      if (rungs.length) scale.rungs = rungs;
      scale.full = scale.rungs[0];
      score.bands.scales[name] = scale;
    }
  }
  for (const { score } of pictures) score.redraw();
}

export class Picture {
  constructor(letter) {
    this.view = new View({ past: true });
    this.zero_ns = this.wide_ns = 0; // where what is drawn begins, and how long it is
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

  // Which stretch of its own it shows; two pictures with one text show the same stretch.
  at() {
    const { view, zero_ns } = this;
    return `${view.scale} ${Math.round(((view.left - zero_ns) / 1e9) * view.scale)}`;
  }

  // Shows the stretch that another shows, each from its own beginning.
  follow({ view, zero_ns }) {
    const zoomed = this.view.scale !== view.scale;
    this.view.asked = null;
    this.view.scale = view.scale;
    this.view.right = this.zero_ns + (view.left - zero_ns) + (this.view.width / view.scale) * 1e9;
    if (zoomed) this.score.redraw();
  }

  // about: what the server said of the side; length_us: at most so much of it is shown.
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
    let wide_us = Math.min(length_us, Math.max(LEAST_US, about.to_unix_us - from_us));
    for (;;) {
      const place = { run: run_id, from_ns: ns(from_us), to_ns: ns(from_us + wide_us) };
      const { counts, store } = await load(asker, place, { signal });
      if (!store) {
        wide_us /= 2;
        continue;
      }
      if (signal.aborted) return null;
      this.score.use(store);
      this.zero_ns = place.from_ns;
      this.wide_ns = place.to_ns - place.from_ns;
      this.view.span(place.from_ns, place.to_ns);
      this.score.redraw();
      this.say(counts.iterations ? '' : 'No step of the engine is in this stretch.');
      return { run: run_id, from_us, to_us: from_us + wide_us };
    }
  }

  // The highest bar of a strip in what is shown.
  highest(measure) {
    const { columns } = this.score.store;
    return highest(columns, this.view.left, this.view.right, measure);
  }

  say(words) {
    write(this.said, words);
    this.said.hidden = !words;
  }
}
