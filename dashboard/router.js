// Owns: which page is shown: pages by name in the address's hash (`#/live`, `#/request/ID`,
// `#/post-mortem?from=..&to=..`), the links of the header, and the change from one to another.
// Called by: main.js, which gives it its table. An address it cannot read is the first page.

import { make, put } from './dom.js';

// '#/request/req-7?zoom=2' -> {name: 'request', params: {id: 'req-7', zoom: '2'}}; null otherwise.
export function parse(hash) {
  const [, name, rest, query = ''] = /^#\/([a-z-]+)(?:\/([^?]*))?(?:\?(.*))?$/.exec(hash) ?? [];
  if (!name) return null;
  const params = Object.fromEntries(new URLSearchParams(query));
  try {
    if (rest) params.id = decodeURIComponent(rest);
  } catch {
    return null; // half an escape: a link that was cut
  }
  return { name, params };
}

export function addressOf(name, { id, ...rest } = {}) {
  const given = Object.entries(rest).filter(([, value]) => value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  return `#/${name}${id ? '/' + encodeURIComponent(id) : ''}${query ? '?' + query : ''}`;
}

export class Router {
  // pages: [{name, title, create(), keeps}]; one that keeps its address is come back to as it was
  // left, and its own link begins it anew. A page is created when it is first shown, has `element`,
  // `enter(params)`, `leave()`, `frame(now_ms, elapsed_ms)`, `theme(colours)` and `resize()`.
  // address: {read() -> hash, write(hash, replaces)}; onShow(name, title) tells the page around it.
  constructor({ pages, host, nav, address, onShow }) {
    Object.assign(this, { pages, host, address, onShow });
    this.made = new Map();
    this.left = new Map(); // name -> the address it was left at
    this.name = this.page = null;
    this.links = pages.map(({ name, title }) =>
      make('a', { href: addressOf(name), text: title, 'data-page': name }),
    );
    put(nav, this.links);
  }

  // Shows what the address says.
  show(colours) {
    const asked = parse(this.address.read());
    const known = this.pages.find(({ name }) => name === asked?.name) ?? this.pages[0];
    const params = known.name === asked?.name ? asked.params : {};
    this.page?.leave();
    if (known.keeps) this.left.set(known.name, this.address.read());
    if (known.name !== this.name) this.change(known);
    this.page.theme(colours);
    this.page.enter(params);
    this.onShow(known.name, known.title);
  }

  change({ name, create }) {
    if (!this.made.has(name)) this.made.set(name, create());
    this.page = this.made.get(name);
    this.name = name;
    put(this.host, this.page.element);
    for (const link of this.links) {
      const other = link.dataset.page;
      link.href = other === name ? addressOf(name) : this.back(other);
      if (other === name) link.setAttribute('aria-current', 'page');
      else link.removeAttribute('aria-current');
    }
    this.page.resize();
  }

  // A page's own state in the address, without entering it anew: `replaces` adds no step back.
  note(params, { replaces = true } = {}) {
    this.address.write(addressOf(this.name, params), replaces);
    if (this.left.has(this.name)) this.left.set(this.name, addressOf(this.name, params));
  }

  // The address at which a page is come back to.
  back(name) {
    return this.left.get(name) ?? addressOf(name);
  }

  visit(name) {
    this.address.write(this.name === name ? addressOf(name) : this.back(name), false);
  }

  go(name, params) {
    this.address.write(addressOf(name, params), false);
  }
}
