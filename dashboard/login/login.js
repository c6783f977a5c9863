// Owns: signing in and out at /session. Called by: login/index.html, which the server shows to a
// browser without a session. It must never keep a key: it is sent once and the field is emptied.

const byId = (id) => document.getElementById(id);
const SESSION = new URL('../../session', import.meta.url);
const PAGE = new URL('../', import.meta.url);

// A view is a link: what stood behind the # comes along to the page.
function goOn() {
  location.replace(PAGE.href + location.hash);
}

async function ask(method, body) {
  try {
    const answer = await fetch(SESSION, { method, body, cache: 'no-store' });
    return { ok: answer.ok, ...(await answer.json()) };
  } catch {
    return { ok: false, error: { message: 'the server does not answer' } };
  }
}

function show({ ok, error, key_needed, signed_in, name }) {
  byId('said').textContent = ok ? '' : error.message;
  if (ok && key_needed === false) byId('said').textContent = 'This server needs no key.';
  byId('sign-in').hidden = !ok || signed_in || key_needed === false;
  byId('signed-in').hidden = !ok || !signed_in;
  byId('name').textContent = name ?? '';
  if (!byId('sign-in').hidden) byId('key').focus();
}

byId('sign-in').addEventListener('submit', async (event) => {
  event.preventDefault();
  const key = byId('key').value.trim();
  byId('key').value = '';
  const said = await ask('POST', JSON.stringify({ key }));
  if (said.ok) goOn();
  else byId('said').textContent = said.error.message;
});

byId('sign-out').addEventListener('click', async () => {
  await ask('DELETE');
  show(await ask('GET'));
});

byId('page').addEventListener('click', (event) => {
  event.preventDefault();
  goOn();
});

const state = await ask('GET');
// A link from another site brings no cookie along: one that is signed in only passes through here.
const sent = new URLSearchParams(location.search).has('from');
if (state.ok && state.signed_in && sent) goOn();
else show(state);
