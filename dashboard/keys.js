// Owns: the keyboard: one table, shown by the help sheet and bound here. Called by: main.js.
// Keys typed into a field are never taken; keys of one view do nothing in another.

// key, words, act. Those with a score act on the one of the view that is shown, if it has one.
export const KEYS = [
  ['space', 'pause or follow', onScore((score) => score.toggle())],
  ['+', 'zoom in', onScore((score) => score.zoom(1.25))],
  ['-', 'zoom out', onScore((score) => score.zoom(0.8))],
  ['ArrowLeft', 'one iteration back', onScore((score) => score.step(-1))],
  ['ArrowRight', 'one iteration on', onScore((score) => score.step(1))],
  ['ArrowUp', 'request in the lane above', onScore((score) => score.lane(-1))],
  ['ArrowDown', 'request in the lane below', onScore((score) => score.lane(1))],
  ['Enter', 'open the lit request', onScore(openLit)],
  ['[', 'pan back', onScore((score) => score.pan(-0.5))],
  [']', 'pan on', onScore((score) => score.pan(0.5))],
  ['n', 'write a prompt (Live)', writePrompt],
  ['1 – 9', 'the views, as they stand above', null],
  ['t', 'theme', (app) => app.flip()],
  ['?', 'this sheet', (app) => app.help.toggle()],
  ['Escape', 'clear cursor and selection, follow', clear],
];

// Answers false where there is nothing for the key to do, so that the browser may have it.
function onScore(act) {
  return (app) => {
    const { score } = app.router.page;
    if (!score?.drawable) return false;
    act(score, app);
  };
}

function openLit(score, app) {
  app.open(score.store.requests.get(score.selected));
}

function writePrompt(app) {
  if (app.router.name !== 'live') return false;
  app.tryIt.focus();
}

function clear(app) {
  if (!app.help.close()) app.router.page.score?.reset();
}

export function bindKeys(app) {
  const table = new Map(KEYS.map(([key, , act]) => [key, act]));
  addEventListener('keydown', (e) => {
    const field = /^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName);
    if (field || e.ctrlKey || e.metaKey || e.altKey || e.defaultPrevented) return;
    const pressed = e.key === ' ' || e.key === 'Enter';
    if (pressed && /^(BUTTON|A|SUMMARY)$/.test(e.target.tagName)) return;
    const page = /^[1-9]$/.test(e.key) ? app.router.pages[e.key - 1] : null;
    const act = table.get(e.key === ' ' ? 'space' : e.key === '=' ? '+' : e.key);
    if (page) app.router.visit(page.name);
    else if (!act || act(app) === false) return;
    e.preventDefault();
  });
}
