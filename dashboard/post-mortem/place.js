// Owns: where in a query an error is: the server counts characters, the editor counts UTF-16 units,
// people count lines. Called by: editor.js and console.js. Pure.

// {index, line, column, length} of the character at `position`; null where nobody knows.
export function placeOf(sql, position) {
  if (!Number.isInteger(position) || position < 0) return null;
  let index = 0,
    passed = 0;
  for (const character of sql) {
    if (passed === position) break;
    index += character.length;
    passed++;
  }
  const before = sql.slice(0, index);
  const line = before.split('\n').length;
  const word = /^[\p{L}\p{N}_$]+|^[\s\S]/u.exec(sql.slice(index));
  return {
    index,
    line,
    column: index - before.lastIndexOf('\n'),
    length: word ? word[0].length : 0,
  };
}
