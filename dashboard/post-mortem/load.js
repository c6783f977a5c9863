// Owns: the loading of one past window into a Store of its own: first how much it holds, then page
// by page what SQL returns for it, fed as the stream would have sent it. Called by: past.js and
// compare. Bounded: a window that holds more than a picture can is refused with its counts.

import { Store } from '../score/store.js';
import { objects } from './asker.js';
import { BEFORE, COUNTS, LOST, SHOWN_KINDS, pageOf, readPage, replay } from './records.js';
import { excess } from './window.js';

const BREATH = 3000; // records fed without giving the page a turn

// {counts, store} or {counts, store: null} where it is too much. onProgress(share) is told.
export async function load(asker, { run, from_ns, to_ns }, { signal, onProgress = () => {} } = {}) {
  const place = [run, Math.floor(from_ns), Math.ceil(to_ns)];
  const [counts] = objects(await asker.sql(COUNTS, place, { signal }));
  if (excess(counts) > 1) return { counts, store: null };
  const parts = {};
  let got = 0;
  for (const kind of SHOWN_KINDS) {
    parts[kind] = [];
    let after = -1;
    while (after !== null) {
      const page = readPage(await asker.sql(pageOf(kind), [...place, after], { signal }));
      for (const placed of page.placed) parts[kind].push(placed);
      after = page.after;
      if (kind === 'iteration') got += page.placed.length;
      onProgress(Math.min(1, got / (counts.iterations || 1)));
    }
  }
  const lost = (await asker.sql(LOST, place, { signal })).rows;
  const earlier = objects(await asker.sql(BEFORE, place.slice(0, 2), { signal }));
  const fed = replay(parts, lost, place[1], earlier);
  const store = new Store();
  for (let i = 0; i < fed.length; i++) {
    store.ingest(fed[i].kind, fed[i].record, run);
    if (i % BREATH === BREATH - 1) {
      await new Promise((resolve) => setTimeout(resolve));
      signal?.throwIfAborted();
    }
  }
  return { counts, store };
}
