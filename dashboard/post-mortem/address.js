// Owns: what stands in the address of a post-mortem, so that an incident view is a link: the file,
// the run, the window, and what is shown of it. Called by: page.js and the other views that link
// here. Pure: text in, a frozen state out, and back; what cannot be read is left out.

const SHOWS = ['score', 'query'];

export const EMPTY = Object.freeze({
  file: null, // a recorded file's name, or null for the server's own record
  run: null,
  from_us: null, // the window on the wall clock
  to_us: null,
  show: 'score',
  query: null, // a named query, or null for free SQL
  values: Object.freeze({}), // of its parameters, as written
  sql: null,
});

// An ISO instant to microseconds since 1970; null for anything else.
export function instantUs(text) {
  if (!text || !/^\d{4}-\d\d-\d\dT\d\d:\d\d/.test(text)) return null;
  const [, base, fraction = '', zone = 'Z'] =
    /^([\dT:-]{16,19})(?:\.(\d{1,6}))?(Z|[+-]\d\d:\d\d)?$/.exec(text) ?? [];
  const ms = base ? Date.parse((base.length === 16 ? base + ':00' : base) + zone) : NaN;
  return Number.isNaN(ms) ? null : ms * 1e3 + Number(fraction.padEnd(6, '0').slice(0, 6) || 0);
}

export function instantText(us) {
  const base = new Date(Math.floor(us / 1e6) * 1e3).toISOString().slice(0, 19);
  const rest = Math.round(us - Math.floor(us / 1e6) * 1e6);
  const digits = String(rest).padStart(6, '0').replace(/0+$/, '');
  return base + (digits ? '.' + digits : '') + 'Z';
}

// given: an object of texts, or URLSearchParams.
export function readAddress(given) {
  const pairs = given?.entries ? [...given.entries()] : Object.entries(given ?? {});
  const of = Object.fromEntries(pairs.map(([key, value]) => [key, String(value)]));
  const values = Object.fromEntries(
    pairs.filter(([key]) => key.startsWith('p.')).map(([key, value]) => [key.slice(2), value]),
  );
  let from_us = instantUs(of.from),
    to_us = instantUs(of.to);
  if (from_us === null || to_us === null || from_us >= to_us) from_us = to_us = null;
  return Object.freeze({
    file: of.file || null,
    run: of.run || null,
    from_us,
    to_us,
    show: SHOWS.includes(of.show) ? of.show : 'score',
    query: of.q || null,
    values: Object.freeze(values),
    sql: of.sql || null,
  });
}

// The same, as an object of texts without what is not said.
export function writeAddress(state) {
  const out = {};
  if (state.file) out.file = state.file;
  if (state.run) out.run = state.run;
  if (state.from_us !== null && state.to_us !== null) {
    out.from = instantText(state.from_us);
    out.to = instantText(state.to_us);
  }
  if (state.show !== 'score') out.show = state.show;
  if (state.query) out.q = state.query;
  for (const [name, value] of Object.entries(state.values)) {
    if (value !== '' && value !== null) out['p.' + name] = String(value);
  }
  if (state.sql && !state.query) out.sql = state.sql;
  return out;
}
