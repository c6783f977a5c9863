// Owns: which picture an answer makes: what a named query says of itself, or what the columns of
// free SQL look like. Called by: plot.js. Pure: an answer in, a model of series out, or null where
// a table tells more.

const NUMBER = /^(U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|DOUBLE|FLOAT|DECIMAL.*|REAL)$/;
const BARS_MOST = 24;
const SERIES_MOST = 8;
const WORDS_MOST = 60; // bars of the first few of thousands would tell nothing
const LINES_LEAST = 2;

const isNumber = ({ type }) => NUMBER.test(type);
const isInstant = ({ name, type }) =>
  /(^|_)unix_us$/.test(name) || type.startsWith('TIMESTAMP') || type === 'DATE';

// {kind, x, labels?, time, series: [{name, values}], left_out}
export function chartOf(answer, asked = null, unit = '') {
  const { columns, rows } = answer;
  if (!rows.length || columns.length < 2) return null;
  const kind = asked && asked !== 'table' ? asked : asked === 'table' ? null : guess(columns, rows);
  if (kind === 'lines' || kind === 'stacked') return lines(kind, answer, unit);
  if (kind === 'bars') return bars(answer);
  return kind === 'scatter' ? scatter(answer) : null;
}

function guess(columns, rows) {
  const [first, ...rest] = columns;
  const measured = rest.some(isNumber);
  if (!measured) return null;
  if (isInstant(first)) return rows.length >= LINES_LEAST ? 'lines' : null;
  if (first.type === 'VARCHAR' && isNumber(rest[0])) {
    return rows.length > 1 && rows.length <= WORDS_MOST ? 'bars' : null;
  }
  if (!isNumber(first) || rows.length < 3) return null;
  return rising(rows.map((row) => row[0])) ? 'lines' : 'scatter';
}

const rising = (values) => values.every((v, i) => i === 0 || v > values[i - 1]);

// Instants become seconds since 1970, which is what the axis speaks.
function place(value, column) {
  if (value === null) return null;
  if (!isInstant(column)) return Number(value);
  if (typeof value === 'number') return value / 1e6;
  return Date.parse(/Z|[+-]\d\d(:\d\d)?$/.test(value) ? value : value + 'Z') / 1e3;
}

// Where some columns are named after the unit, the others are on another scale.
function lines(kind, { columns, rows }, unit) {
  const [first] = columns;
  const sorted = rows
    .map((row) => [place(row[0], first), row])
    .filter(([x]) => Number.isFinite(x))
    .sort((a, b) => a[0] - b[0]);
  const measured = columns
    .map((column, i) => ({ ...column, i }))
    .slice(1)
    .filter(isNumber);
  const told = measured.filter(({ i }) => sorted.some(([, row]) => row[i] !== null));
  const named = told.filter(({ name }) => unit && name.endsWith(`_${unit}`));
  const shown = named.length ? named : told.filter(({ name }) => !/_share$/.test(name));
  const scale = shown.slice(0, SERIES_MOST);
  if (!scale.length) return null;
  return {
    kind,
    time: isInstant(first),
    x: sorted.map(([x]) => x),
    series: scale.map(({ name, i }) => ({ name, values: sorted.map(([, row]) => row[i]) })),
    left_out: shown.length - scale.length,
  };
}

function bars({ columns, rows }) {
  const at = columns.findIndex((column, i) => i > 0 && isNumber(column));
  if (at < 0) return null;
  const shown = rows.slice(0, BARS_MOST);
  return {
    kind: 'bars',
    time: false,
    x: shown.map((_, i) => i),
    labels: shown.map((row) => (row[0] === null ? '–' : String(row[0]))),
    series: [{ name: columns[at].name, values: shown.map((row) => row[at]) }],
    left_out: rows.length - shown.length,
  };
}

function scatter({ columns, rows }) {
  if (!isNumber(columns[0]) || !isNumber(columns[1])) return null;
  const points = rows
    .filter((row) => row[0] !== null && row[1] !== null)
    .sort((a, b) => a[0] - b[0]);
  return {
    kind: 'scatter',
    time: false,
    x: points.map((row) => row[0]),
    series: [{ name: columns[1].name, values: points.map((row) => row[1]) }],
    left_out: 0,
  };
}
