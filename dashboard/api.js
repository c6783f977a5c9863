// Owns: asking the server for JSON: the address under whatever prefix the page came from, and an
// error with its status, code and a sentence. Called by: every view that asks. It must never
// swallow an error, nor retry: whoever asks knows whether asking again is right.

const ROOT = new URL('../', import.meta.url);

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, position = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, position });
  }
}

export const urlOf = (path) => new URL(path, ROOT).href;

// Resolves to the answer's JSON. `status` 0 of an error: the server was not reached at all.
export async function ask(method, path, body, { signal, send = fetch } = {}) {
  const answer = await answerOf(method, path, body, { signal, send });
  try {
    return await answer.json();
  } catch {
    throw new ApiError('The server’s answer was cut short.', { status: answer.status });
  }
}

// Resolves to the answer itself, for what is no JSON; rejects as `ask` does.
export async function answerOf(method, path, body, { signal, send = fetch, headers = {} } = {}) {
  const given = body === undefined ? {} : { 'content-type': 'application/json' };
  const content = body === undefined ? undefined : JSON.stringify(body);
  let answer;
  try {
    answer = await send(urlOf(path), {
      method,
      body: content,
      headers: { ...given, ...headers },
      cache: 'no-store',
      signal,
    });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ApiError('The server does not answer.');
  }
  if (!answer.ok) throw errorOf(answer.status, await answer.text().catch(() => ''));
  return answer;
}

export function errorOf(status, text) {
  try {
    const { error } = JSON.parse(text);
    if (error?.message) return new ApiError(error.message, { ...error, status });
  } catch {
    // Not JSON: a proxy's page, say. The status is all there is to tell.
  }
  return new ApiError(`The server answered ${status}.`, { status });
}
