// Owns: SQL cut into tokens for colour and for completion: every character is in exactly one, so
// the text can be put together again. Called by: editor.js, suggest.js. Pure. It must never judge:
// what is wrong SQL is for the database to say.

export const KEYWORDS = Object.freeze(
  (
    'SELECT FROM WHERE GROUP BY ORDER LIMIT OFFSET AS ON USING JOIN LEFT RIGHT FULL INNER CROSS ' +
    'SEMI ANTI ASOF LATERAL NATURAL UNION ALL INTERSECT EXCEPT WITH RECURSIVE MATERIALIZED ' +
    'DISTINCT HAVING QUALIFY WINDOW OVER PARTITION ROWS RANGE BETWEEN UNBOUNDED PRECEDING ' +
    'FOLLOWING CURRENT ROW FILTER CASE WHEN THEN ELSE END AND OR NOT IN IS NULL LIKE ILIKE ' +
    'EXISTS CAST INTERVAL ASC DESC NULLS FIRST LAST TRUE FALSE VALUES EXCLUDE REPLACE PIVOT'
  ).split(' '),
);
const KNOWN = new Set(KEYWORDS);

const PATTERN = new RegExp(
  [
    '(?<comment>--[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$))',
    "(?<text>'(?:[^']|'')*(?:'|$))",
    '(?<quoted>"(?:[^"]|"")*(?:"|$))',
    '(?<parameter>\\$\\w+)',
    '(?<number>\\d+(?:\\.\\d*)?(?:e[+-]?\\d+)?|\\.\\d+)',
    '(?<word>[\\p{L}_][\\p{L}\\p{N}_]*)',
    '(?<space>\\s+)',
    '(?<other>[\\s\\S])',
  ].join('|'),
  'giu',
);

// [{kind, text, at}]; kind is comment, text, name, parameter, number, keyword, call, space, other.
export function tokens(sql) {
  const found = [];
  for (const match of sql.matchAll(PATTERN)) {
    const [name] = Object.entries(match.groups).find(([, text]) => text !== undefined);
    found.push({ kind: name, text: match[0], at: match.index });
  }
  found.forEach((token, i) => {
    if (token.kind === 'quoted') token.kind = 'name';
    if (token.kind !== 'word') return;
    const next = found.slice(i + 1).find(({ kind }) => kind !== 'space');
    if (KNOWN.has(token.text.toUpperCase())) token.kind = 'keyword';
    else token.kind = next?.text === '(' ? 'call' : 'name';
  });
  return found;
}
