// Owns: what the SQL editor offers at the caret: tables after FROM and JOIN, columns of the tables
// in reach, those of one table behind its name or alias, then functions and keywords. Called by:
// editor.js. Pure: the schema comes from GET /telemetry/schema.

import { KEYWORDS, tokens } from './tokens.js';

const OFFERS_MOST = 12;
const FUNCTIONS = (
  'count sum avg min max median quantile_cont arg_max arg_min any_value list unnest len round ' +
  'coalesce nullif greatest least make_timestamp epoch_us time_bucket lag lead row_number rank ' +
  'list_sum list_contains histogram string_agg bool_or bool_and stddev range'
).split(' ');

// {name: {doc, columns: [{name, type, unit, doc}]}}, tables and views alike.
export function tablesOf(schema) {
  return schema ? { ...schema.tables, ...schema.views } : {};
}

// {from, word, offers: [{text, kind, note}]}: what is offered instead of sql.slice(from, caret);
// null where nothing is typed, or inside a text or a comment.
export function suggest(sql, caret, schema, { asked = false } = {}) {
  const all = tokens(sql);
  const inside = all.find(({ at, text }) => at < caret && caret < at + text.length);
  const quiet = ['comment', 'text', 'number'];
  if (inside && quiet.includes(inside.kind)) return null;
  const before = tokens(sql.slice(0, caret));
  const last = before[before.length - 1];
  if (last && quiet.includes(last.kind) && !asked) return null;
  const typing = last && ['name', 'keyword', 'call'].includes(last.kind) ? last : null;
  const word = typing ? typing.text : '';
  const from = typing ? typing.at : caret;
  const past = before.filter((token) => token !== typing && token.kind !== 'space');
  const behindDot = past.length > 1 && past[past.length - 1].text === '.';
  if (!word && !behindDot && !asked) return null;
  const offers = behindDot
    ? columnsOf(owner(past[past.length - 2].text, all, schema), schema)
    : anywhere(past, all, schema);
  const ranked = rank(offers, word);
  const exact = ranked.length === 1 && ranked[0].text === word;
  return ranked.length && !exact ? { from, word, offers: ranked } : null;
}

function anywhere(past, all, schema) {
  const tables = tablesOf(schema);
  const names = Object.entries(tables).map(([text, { doc }]) => ({
    text,
    kind: 'table',
    note: doc,
  }));
  const ctes = cteNames(all).map((text) => ({ text, kind: 'table', note: 'of this query' }));
  const before = past[past.length - 1]?.text.toUpperCase();
  if (before === 'FROM' || before === 'JOIN') return [...ctes, ...names];
  const inReach = new Set(reach(all).map(({ table }) => table));
  const columns = [...inReach].flatMap((table) => columnsOf(table, schema));
  return [
    ...columns,
    ...ctes,
    ...names,
    ...FUNCTIONS.map((text) => ({ text, kind: 'function', note: '' })),
    ...KEYWORDS.map((text) => ({ text, kind: 'keyword', note: '' })),
  ];
}

function columnsOf(table, schema) {
  return (tablesOf(schema)[table]?.columns ?? []).map(({ name, type, unit, doc }) => ({
    text: name === 'where' ? '"where"' : name,
    kind: 'column',
    note: `${type.toLowerCase()}${unit ? ' ' + unit : ''} · ${table}: ${doc}`,
  }));
}

// Tables named after FROM and JOIN, each with its alias.
export function reach(all) {
  const told = all.filter(({ kind }) => kind !== 'space' && kind !== 'comment');
  const found = [];
  told.forEach(({ text }, i) => {
    if (!['FROM', 'JOIN'].includes(text.toUpperCase())) return;
    let at = i + 1;
    do {
      if (told[at]?.kind !== 'name') return;
      const table = told[at].text;
      let next = told[at + 1];
      if (next?.text.toUpperCase() === 'AS') next = told[++at + 1];
      const alias = next?.kind === 'name' ? next.text : table;
      found.push({ table, alias });
      at += alias === table ? 1 : 2;
    } while (told[at]?.text === ',' && at++);
  });
  return found;
}

const owner = (name, all) =>
  reach(all).find(({ alias }) => alias.toLowerCase() === name.toLowerCase())?.table ?? name;

function cteNames(all) {
  const told = all.filter(({ kind }) => kind !== 'space');
  return told
    .filter(
      ({ kind }, i) =>
        kind === 'name' && /^as$/i.test(told[i + 1]?.text ?? '') && told[i + 2]?.text === '(',
    )
    .map(({ text }) => text);
}

// Beginnings before middles, the given order within each; each text once.
function rank(offers, word) {
  const low = word.toLowerCase();
  const seen = new Set();
  const of = (test) =>
    offers.filter(({ text }) => {
      if (seen.has(text) || !test(text.toLowerCase())) return false;
      seen.add(text);
      return true;
    });
  const first = of((text) => text.startsWith(low));
  const then = low.length > 1 ? of((text) => text.includes(low)) : [];
  return [...first, ...then].slice(0, OFFERS_MOST);
}
