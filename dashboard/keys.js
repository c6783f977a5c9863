// Owns: the keyboard: one table, shown by the help sheet and bound here. Called by: main.js.
// Keys typed into a field are never taken; keys of one view do nothing in another.

// key, words, act, and the view whose key it is (none: of the whole page)
export const KEYS = [
  ['space', 'pause or follow', (app) => app.live.toggle(), 'live'],
  ['+', 'zoom in', (app) => app.live.zoom(1.25), 'live'],
  ['-', 'zoom out', (app) => app.live.zoom(0.8), 'live'],
  ['ArrowLeft', 'one iteration back', (app) => step(app, -1), 'live'],
  ['ArrowRight', 'one iteration on', (app) => step(app, 1), 'live'],
  ['ArrowUp', 'request in the lane above', (app) => lane(app, -1), 'live'],
  ['ArrowDown', 'request in the lane below', (app) => lane(app, 1), 'live'],
  ['Enter', 'open the lit request', (app) => openSelected(app), 'live'],
  ['[', 'pan back', (app) => app.view.pan(-app.view.width / 2), 'live'],
  [']', 'pan on', (app) => app.view.pan(app.view.width / 2), 'live'],
  ['n', 'write a prompt', (app) => app.tryIt.focus(), 'live'],
  ['1 – 9', 'the views, as they stand above', null],
  ['t', 'theme', (app) => app.flip()],
  ['?', 'this sheet', (app) => app.help.toggle()],
  ['Escape', 'clear cursor and selection, follow', (app) => clear(app)],
];

function step({ view, store: { columns } }, by) {
  if (columns.count === columns.first) return;
  view.follow = false;
  const fresh = view.pinned === null;
  const at = columns.find(fresh ? view.right : view.pinned) + (fresh ? 0 : by);
  const s = columns.slot(Math.max(columns.first, Math.min(columns.last, at)));
  view.pinned = (columns.begin_at_ns[s] + columns.end_at_ns[s]) / 2;
  const x = view.x(view.pinned);
  if (x < 40 || x > view.width - 40) view.centre(view.pinned);
}

function lane(app, by) {
  const rows = app.store.lanes.slots.map((slot) => slot.request).filter(Boolean);
  const at = rows.findIndex((r) => r.id === app.selected);
  const next = rows[Math.max(0, Math.min(rows.length - 1, at + by))];
  if (next && next.id !== app.selected) app.live.select(next.id);
}

export function openSelected(app) {
  const id = app.store.requests.get(app.selected)?.start?.request_id;
  if (id) app.go('request', { id });
}

function clear(app) {
  if (app.help.close() || app.router.name !== 'live') return;
  app.view.pinned = null;
  app.view.follow = true;
  if (app.selected !== null) app.live.select(null);
}

export function bindKeys(app) {
  const table = new Map(KEYS.map(([key, , act, view]) => [key, { act, view }]));
  addEventListener('keydown', (e) => {
    const field = /^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName);
    if (field || e.ctrlKey || e.metaKey || e.altKey) return;
    const pressed = e.key === ' ' || e.key === 'Enter';
    if (pressed && /^(BUTTON|A|SUMMARY)$/.test(e.target.tagName)) return;
    const page = /^[1-9]$/.test(e.key) ? app.router.pages[e.key - 1] : null;
    const found = table.get(e.key === ' ' ? 'space' : e.key === '=' ? '+' : e.key);
    if (page) app.go(page.name, {});
    else if (found?.act && (!found.view || found.view === app.router.name)) found.act(app);
    else return;
    e.preventDefault();
  });
}
