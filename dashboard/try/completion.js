// Owns: one streamed request to the OpenAI-compatible API: sending it, reading its events, and
// telling an error in words. Called by: box.js. It knows nothing of the page.
// It must never swallow an error: each comes out as one Error with a sentence.

// The `data:` payloads of a server-sent event stream, whatever the network's chunks were.
export async function* readEvents(stream) {
  const decoder = new TextDecoder();
  let rest = '';
  const reader = stream.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const lines = rest.split(/\r\n|\n|\r/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith('data:')) yield line.slice(5).trimStart();
    if (done) return;
  }
}

export function errorWords(status, text) {
  try {
    const { error } = JSON.parse(text);
    if (error && error.message) return error.message;
  } catch {
    // Not JSON: a proxy's page, say. The status is all there is to tell.
  }
  return `The server answered ${status}.`;
}

// Calls onStart(requestId) with the headers, onText(text, choice) as text comes, and resolves
// to {finish: [per choice], tokens: count of text events}.
export async function complete({ url, body, signal, onStart, onText, send = fetch }) {
  const response = await send(url, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) throw new Error(errorWords(response.status, await response.text()));
  onStart(response.headers.get('x-iterscope-request-id'));
  const finish = [];
  let ended = false;
  for await (const data of readEvents(response.body)) {
    if (data === '[DONE]') {
      ended = true;
      break;
    }
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message ?? 'The request ended with an error.');
    for (const choice of event.choices ?? []) {
      const text = choice.delta ? choice.delta.content : choice.text;
      if (text) onText(text, choice.index);
      if (choice.finish_reason) finish[choice.index] = choice.finish_reason;
    }
  }
  if (!ended) throw new Error('The connection was lost before the answer ended.');
  return { finish };
}

// 16 different prompts in four requests, since a browser opens six connections to a host at most
// and the record stream holds one. Lengths are spread so that prefill and decode meet in steps.
export function burst(run) {
  const base =
    'Continuous batching decides again at every step which sequences the model computes. ' +
    'A sequence joins when there is room and leaves the moment it ends. ';
  const lengths = [24, 160, 40, 700, 90, 300, 24, 1500, 60, 200, 32, 450, 120, 24, 900, 75];
  const limits = [48, 96, 144, 192];
  return limits.map((wanted, i) => {
    const most = Math.max(1, Math.min(wanted, Math.floor(run.model_len_max / 4)));
    const room = Math.max(8, run.model_len_max - most - 16); // a token is a character at worst
    const prompts = lengths.slice(i * 4, i * 4 + 4).map((wish, k) => {
      const length = Math.min(wish, room);
      const text = `Story ${i * 4 + k + 1}. ` + base.repeat(Math.ceil(length / base.length));
      return text.slice(0, length);
    });
    return { model: run.model, prompt: prompts, max_tokens: most, temperature: 1 };
  });
}
