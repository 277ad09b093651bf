// What is selected and how it is shown: one object, kept in the URL's hash, listened to by every panel.

const NUMBERS = { l: "layer", h: "head", q: "query", k: "key" };
const CHOICES = {
  dir: ["direction", ["reads", "readers"]],
  m: ["measure", ["entropy", "effective", "max", "distance", "other_distance", "first_key", "previous"]],
  r: ["row", ["entropy", "effective", "max", "distance", "other_distance", "first_key", "previous"]],
  pool: ["pool", ["mass", "peak"]],
  scale: ["scale", ["log", "linear"]],
};

/** "#l=5&h=3&q=17" -> { layer: 5, head: 3, query: 17 }; what is not understood is left out. */
export function parseHash(hash) {
  const found = {};
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (NUMBERS[name] && /^\d{1,9}$/.test(value)) found[NUMBERS[name]] = Number(value);
    else if (CHOICES[name] && CHOICES[name][1].includes(value)) found[CHOICES[name][0]] = value;
  }
  return found;
}

export function formatHash(state) {
  const parts = Object.entries(NUMBERS).map(([short, name]) => `${short}=${state[name]}`);
  for (const [short, [name]] of Object.entries(CHOICES)) parts.push(`${short}=${state[name]}`);
  return `#${parts.join("&")}`;
}

/** Keep a selection inside what the file holds: layers and heads it has, tokens it has. */
export function fit(state, shape) {
  const nearest = (list, value) => list.reduce((best, x) => (Math.abs(x - value) < Math.abs(best - value) ? x : best), list[0]);
  const within = (value, count) => Math.max(0, Math.min(count - 1, value));
  return {
    ...state,
    layer: nearest(shape.layers, state.layer),
    head: nearest(shape.heads, state.head),
    query: within(state.query, shape.queries),
    key: within(state.key, shape.keys),
  };
}

export class Store {
  constructor(state, shape) {
    this.shape = shape;
    this.state = fit(state, shape);
    this.listeners = [];
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  /** Change some fields; listeners get (state, set of the fields that really changed). */
  set(changes) {
    const next = fit({ ...this.state, ...changes }, this.shape);
    const changed = new Set(Object.keys(next).filter((name) => next[name] !== this.state[name]));
    if (changed.size === 0) return;
    this.state = next;
    for (const listener of this.listeners) listener(next, changed);
  }

  /** The layer (or head) `by` places further along the list of those in the file. */
  step(field, by) {
    const list = field === "layer" ? this.shape.layers : this.shape.heads;
    const at = list.indexOf(this.state[field]) + by;
    if (at >= 0 && at < list.length) this.set({ [field]: list[at] });
  }
}
