// Owns: the keyboard: one table, shown by the help sheet and bound here. Called by: main.js.
// Keys typed into a field are never taken.

export const KEYS = [
  ['space', 'pause or follow', (app) => app.live.toggle()],
  ['+', 'zoom in', (app) => app.live.zoom(1.25)],
  ['-', 'zoom out', (app) => app.live.zoom(0.8)],
  ['ArrowLeft', 'one iteration back', (app) => step(app, -1)],
  ['ArrowRight', 'one iteration on', (app) => step(app, 1)],
  ['ArrowUp', 'request in the lane above', (app) => lane(app, -1)],
  ['ArrowDown', 'request in the lane below', (app) => lane(app, 1)],
  ['[', 'pan back', (app) => app.view.pan(-app.view.width / 2)],
  [']', 'pan on', (app) => app.view.pan(app.view.width / 2)],
  ['n', 'write a prompt', (app) => app.tryIt.focus()],
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

function clear(app) {
  if (app.help.close()) return;
  app.view.pinned = null;
  app.view.follow = true;
  if (app.selected !== null) app.live.select(null);
}

export function bindKeys(app) {
  const table = new Map(KEYS.map(([key, , act]) => [key, act]));
  addEventListener('keydown', (e) => {
    const field = /^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName);
    if (field || e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.target.tagName === 'BUTTON' && (e.key === ' ' || e.key === 'Enter')) return;
    const act = table.get(e.key === ' ' ? 'space' : e.key === '=' ? '+' : e.key);
    if (!act) return;
    e.preventDefault();
    act(app);
  });
}
