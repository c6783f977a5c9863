// Owns: the word under the pointer. A mark says what it is in data-says; without this script its
// <title> says it. Nothing else on the page needs a script.
(() => {
  const box = document.createElement('div');
  box.id = 'says';
  box.hidden = true;
  document.body.append(box);
  for (const title of document.querySelectorAll('[data-says] > title')) title.remove();
  const place = (x, y) => {
    const room = 12;
    const left = x + room + box.offsetWidth > window.innerWidth ? x - room - box.offsetWidth : x + room;
    box.animate([{ transform: `translate(${Math.max(4, left)}px, ${y + room}px)` }], {
      fill: 'forwards',
    });
  };
  document.addEventListener('pointermove', (event) => {
    const mark = event.target instanceof Element ? event.target.closest('[data-says]') : null;
    box.hidden = mark === null;
    if (mark === null) return;
    box.textContent = mark.dataset.says;
    place(event.clientX, event.clientY);
  });
  document.addEventListener('pointerleave', () => (box.hidden = true));
})();
