// Owns: sending a recorded file from one's own disk to the server, which opens it in its sealed
// process. Called by: page.js. The file's name stays here: the server gives it one.

import { ApiError, errorOf } from '../api.js';

export async function send(url, file) {
  let answer;
  try {
    answer = await fetch(url, { method: 'POST', body: file });
  } catch {
    throw new ApiError('The server does not answer, or the file is too large for it.');
  }
  if (!answer.ok) throw errorOf(answer.status, await answer.text().catch(() => ''));
  return answer.json();
}
