// Owns: the canvas colours of the theme in force, read once from the CSS variables, and the
// hatches that make each mark readable without colour. Called by: main.js when the theme or the
// pixel ratio changes. A palette is never changed after it was made.

const NAMES = [
  'bg',
  'surface',
  'line',
  'text',
  'muted',
  'faint',
  'prefill',
  'decode',
  'decode-line',
  'recompute',
  'kv',
  'wait',
  'preempted',
  'held',
  'padding',
  'device',
  'launch',
  'plan',
  'commit',
  'gap',
  'used',
  'used-alt',
  'cached',
  'free',
  'good',
  'warn',
  'bad',
  'ink',
];

export function palette() {
  const css = getComputedStyle(document.documentElement);
  const colours = {};
  for (const name of NAMES) {
    const key = name.replace(/-(\w)/g, (_, letter) => letter.toUpperCase());
    colours[key] = css.getPropertyValue('--' + name).trim();
  }
  const font = css.getPropertyValue('--font').trim();
  const ratio = window.devicePixelRatio || 1;
  return Object.freeze({ ...colours, font, ratio, pattern: patterns(colours) });
}

function patterns(c) {
  return {
    recompute: hatch({ size: 8, base: c.recompute, ink: c.ink, alpha: 0.7 }, (x) =>
      stripes(x, 8, 1.8, 1),
    ),
    kv: hatch({ size: 6, ink: c.kv }, (x) => stripes(x, 6, 1.4, 1)),
    seqs: hatch({ size: 5, ink: c.wait }, (x) => x.fillRect(1, 1.5, 2, 2)),
    wait: hatch({ size: 6, ink: c.wait }, (x) => x.fillRect(0, 0, 2.5, 6)),
    preempted: hatch({ size: 8, ink: c.preempted }, (x) => {
      stripes(x, 8, 1, 1);
      stripes(x, 8, 1, -1);
    }),
    cached: hatch({ size: 5, ink: c.cached }, (x) => stripes(x, 5, 1.2, -1)),
    lost: hatch({ size: 10, ink: c.muted }, (x) => stripes(x, 10, 1.5, 1)),
  };
}

// A pattern cell of `size` CSS px, drawn at device resolution.
function hatch({ size, base, ink, alpha = 1 }, draw) {
  const ratio = window.devicePixelRatio || 1;
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = Math.round(size * ratio);
  const ctx = canvas.getContext('2d');
  ctx.scale(canvas.width / size, canvas.height / size);
  if (base) {
    ctx.fillStyle = base;
    ctx.fillRect(0, 0, size, size);
  }
  ctx.globalAlpha = alpha;
  ctx.fillStyle = ctx.strokeStyle = ink;
  draw(ctx);
  const pattern = ctx.createPattern(canvas, 'repeat');
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

function stripes(ctx, size, width, slope) {
  ctx.lineWidth = width;
  ctx.beginPath();
  for (const shift of [-size, 0, size]) {
    ctx.moveTo(shift - 1, slope > 0 ? size + 1 : -1);
    ctx.lineTo(shift + size + 1, slope > 0 ? -1 : size + 1);
  }
  ctx.stroke();
}
