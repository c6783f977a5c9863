// Owns: the few lines every view needs to make elements. Called by: every view. textContent only,
// so nothing a record says can become markup; styles go through classes or the CSSOM, so the
// strict Content-Security-Policy holds. It must never parse HTML.

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === 'class') element.className = value;
    else if (key === 'text') element.textContent = value;
    else if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? '' : value);
  }
  for (const child of children.flat()) if (child || child === 0) element.append(child);
  return element;
}

export function put(element, ...children) {
  element.replaceChildren(...children.flat().filter(Boolean));
}

// Writes only what changed, so that a figure that stands still costs no layout.
export function write(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

// A canvas at device resolution; returns its context, scaled so that one unit is one CSS px.
export function surface(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const w = Math.round(width * ratio),
    t = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== t) {
    canvas.width = w;
    canvas.height = t;
    canvas.style.width = width + 'px';
    canvas.style.height = height + 'px';
  }
  const ctx = canvas.getContext('2d');
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  return ctx;
}
