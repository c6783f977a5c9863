// Owns: the word under the pointer. A mark says what it is in data-says; without this script its
// <title> says it. Nothing else on the page needs a script.
(() => {
  const room = 12;
  const box = document.createElement('div');
  box.id = 'says';
  box.hidden = true;
  document.body.append(box);
  for (const title of document.querySelectorAll('[data-says] > title')) title.remove();
  document.addEventListener('pointermove', ({ target, clientX, clientY }) => {
    const mark = target instanceof Element ? target.closest('[data-says]') : null;
    box.hidden = mark === null;
    if (mark === null) return;
    box.textContent = mark.dataset.says;
    const beyond = clientX + room + box.offsetWidth > window.innerWidth;
    const left = Math.max(4, beyond ? clientX - room - box.offsetWidth : clientX + room);
    box.style.translate = `${left}px ${clientY + room}px`;
  });
  document.documentElement.addEventListener('pointerleave', () => (box.hidden = true));
})();
