// Owns: what the two sides of a comparison may be and how they stand in the address: a run, a
// window such as 15m/10m or FROM/TO, or a recorded file. Called by: compare/page.js and whoever
// links there. Pure.

import { instantText } from '../post-mortem/address.js';

export const EMPTY = Object.freeze({ text: '', file: null });

// params: an object of texts or URLSearchParams.
export function readSides(given) {
  const of = given?.entries ? Object.fromEntries(given.entries()) : (given ?? {});
  const side = (name) => Object.freeze({ text: of[name] ?? '', file: of[name + '.file'] || null });
  return { a: side('a'), b: side('b') };
}

export function writeSides({ a, b }) {
  const out = {};
  for (const [name, { text, file }] of Object.entries({ a, b })) {
    if (text) out[name] = text;
    if (file) out[name + '.file'] = file;
  }
  return out;
}

export const isWhole = ({ text, file }) => Boolean(text || file);

const RELATIVE = /^(last|previous)$|(^|\/)(now|\d+(\.\d+)?[smhd])(\/|$)/;

// A side as what it turned out to be: `now` and `last` mean something else tomorrow.
export function pinned(side, { runs, from_unix_us, to_unix_us }) {
  if (!RELATIVE.test(side.text)) return side;
  const run = /^(last|previous)$/.test(side.text) && runs.length === 1;
  const text = run ? runs[0] : windowText(instantText(from_unix_us), instantText(to_unix_us));
  return Object.freeze({ ...side, text });
}

// The body of POST /telemetry/diff.
export function bodyOf({ a, b }) {
  const body = {};
  if (a.text) body.a = a.text;
  if (a.file) body.a_file = a.file;
  if (b.text) body.b = b.text;
  if (b.file) body.b_file = b.file;
  return body;
}

export const windowText = (fromText, toText) => `${fromText}/${toText}`;
