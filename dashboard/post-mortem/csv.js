// Owns: an answer as CSV (RFC 4180), as the server writes it: null is empty, lists are JSON. Called
// by: console.js for what is on screen. Pure. A cell that a spreadsheet would take for a formula
// stays what it is: it is data, and who opens it chooses how.

const cell = (value) => {
  if (value === null || value === undefined) return '';
  const text = typeof value === 'object' ? JSON.stringify(value) : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

export function csv({ columns, rows }) {
  const lines = [columns.map((column) => column.name), ...rows];
  return lines.map((line) => line.map(cell).join(',') + '\r\n').join('');
}
