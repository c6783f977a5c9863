// Owns: a named query's parameters as inputs: which are asked of people, what each may be, and what
// is sent. Called by: console.js. Pure. The window's own parameters are not asked for: the picker
// above gives them.

const OF_WINDOW = ['from_unix_us', 'to_unix_us', 'last_s', 'run_id'];

// [{name, doc, kind: number|text, value, step, min, max, required, placeholder}]
export function inputsOf(query, values = {}) {
  return query.parameters
    .filter(({ name }) => !OF_WINDOW.includes(name))
    .map((parameter) => ({
      name: parameter.name,
      doc: parameter.doc,
      kind: parameter.type === 'text' ? 'text' : 'number',
      value:
        values[parameter.name] ?? (parameter.default === null ? '' : String(parameter.default)),
      step: parameter.type === 'integer' ? '1' : 'any',
      min: parameter.min,
      max: parameter.max,
      required: parameter.required,
      placeholder: parameter.required ? 'needed' : 'none',
    }));
}

// Why a text cannot be sent; null if it can.
export function faultOf(input, text) {
  if (text === '') return input.required ? `${input.name} is needed: ${input.doc}` : null;
  if (input.kind === 'text') return null;
  const number = Number(text);
  if (!Number.isFinite(number)) return `${input.name} must be a number`;
  if (input.step === '1' && !Number.isInteger(number)) return `${input.name} must be whole`;
  if (input.min !== null && number < input.min) return `${input.name} is at least ${input.min}`;
  if (input.max !== null && number > input.max) return `${input.name} is at most ${input.max}`;
  return null;
}

// The body of POST /telemetry/queries/{name}.
export function bodyOf(query, values, { from_us, to_us, run }) {
  const body = {};
  for (const { name, type } of query.parameters) {
    const text = values[name];
    if (text === undefined || text === '' || OF_WINDOW.includes(name)) continue;
    body[name] = type === 'text' ? text : Number(text);
  }
  if (!query.windowed) return body;
  if (from_us !== null && to_us !== null) {
    body.from_unix_us = Math.floor(from_us);
    body.to_unix_us = Math.ceil(to_us);
  }
  if (run) body.run_id = run;
  return body;
}
