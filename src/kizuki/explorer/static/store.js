// What is selected and how it is shown: one object, kept in the URL's hash, listened to by every panel.
import { formatTokens, parseTokens } from "./selection.js";

export const MEASURES = ["entropy", "effective", "max", "distance", "other_distance", "first_key", "previous"];
const NUMBERS = { l: "layer", h: "head", q: "query", k: "key" };
const CHOICES = {
  dir: ["direction", ["reads", "readers"]],
  m: ["measure", MEASURES],
  r: ["row", MEASURES],
  pool: ["pool", ["mass", "peak"]],
  scale: ["scale", ["log", "linear"]],
  u: ["unit", ["token", "word"]],
};
// What is empty at first and then left out of the URL.
const OPTIONAL = {
  t: ["several", /^\d{1,9}(-\d{1,9})?(\.\d{1,9}(-\d{1,9})?)*$/], // tokens selected together, besides the one
  c: ["against", /^(\d{1,9}\.\d{1,9}|other)$/], // layer.head that is compared, or the same head in the other input
  i: ["there", /^\d{1,9}$/], // the token of the other input, where it is not the same place
  z: ["view", /^\d+(\.\d+)?_\d+(\.\d+)?_\d+(\.\d+)?$/], // left key, top query, cells across
  p: ["pins", /^[\w.-]+(~[\w.-]+)*$/],
  o: ["tour", /^\d{1,2}$/], // the step of the tour
  e: ["lesson", /^1$/], // whether the lesson is open
};
export const BLANK = Object.fromEntries(Object.values(OPTIONAL).map(([name]) => [name, ""]));
export const DEFAULTS = { direction: "reads", measure: "entropy", row: "entropy", pool: "mass", scale: "log", unit: "token", ...BLANK };
const PINNED = ["layer", "head", "query", "key", "direction", "unit"]; // and several

/** "#l=5&h=3&q=17" -> { layer: 5, head: 3, query: 17 }; what is not understood is left out. */
export function parseHash(hash) {
  const found = {};
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (NUMBERS[name] && /^\d{1,9}$/.test(value)) found[NUMBERS[name]] = Number(value);
    else if (CHOICES[name] && CHOICES[name][1].includes(value)) found[CHOICES[name][0]] = value;
    else if (OPTIONAL[name] && OPTIONAL[name][1].test(value)) found[OPTIONAL[name][0]] = value;
  }
  return found;
}

export function formatHash(state) {
  const parts = Object.entries(NUMBERS).map(([short, name]) => `${short}=${state[name]}`);
  for (const [short, [name]] of Object.entries(CHOICES)) parts.push(`${short}=${state[name]}`);
  for (const [short, [name]] of Object.entries(OPTIONAL)) if (state[name]) parts.push(`${short}=${state[name]}`);
  return `#${parts.join("&")}`;
}

/** A selection as one word for the list of pins, "5_3_17_2_reads_token_3-7", and back; null for anything else. */
export function formatPin(state) {
  return [...PINNED.map((name) => state[name]), ...(state.several ? [state.several] : [])].join("_");
}

export function parsePin(text) {
  const [layer, head, query, key, direction, unit, several = ""] = text.split("_");
  const found = parseHash(`#l=${layer}&h=${head}&q=${query}&k=${key}&dir=${direction}&u=${unit}${several && `&t=${several}`}`);
  return PINNED.every((name) => name in found) ? { several: "", ...found } : null;
}

/** Keep a selection inside what the file holds: layers and heads it has, tokens it has. */
export function fit(state, shape) {
  const nearest = (list, value) => list.reduce((best, x) => (Math.abs(x - value) < Math.abs(best - value) ? x : best), list[0]);
  const within = (value, count) => Math.max(0, Math.min(count - 1, value));
  const fitted = {
    ...state,
    layer: nearest(shape.layers, state.layer),
    head: nearest(shape.heads, state.head),
    query: within(state.query, shape.queries),
    key: within(state.key, shape.keys),
  };
  if (state.several) fitted.several = formatTokens(parseTokens(state.several, Math.min(shape.queries, shape.keys)));
  if (state.unit === "word" && shape.words === false) fitted.unit = "token";
  if (state.against === "other") fitted.against = shape.other ? "other" : "";
  else if (state.against) {
    const [layer, head] = state.against.split(".").map(Number);
    fitted.against = `${nearest(shape.layers, layer)}.${nearest(shape.heads, head)}`;
  }
  if (state.pins) fitted.pins = state.pins.split("~").filter((pin) => parsePin(pin) !== null).join("~");
  return fitted;
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

  /** Change some fields; listeners get (state, set of the fields that really changed). Another token alone
      ends a selection of several. */
  set(changes) {
    const chosen = this.state.direction === "reads" ? "query" : "key";
    const moved = chosen in changes && changes[chosen] !== this.state[chosen];
    const alone = moved && !("several" in changes) ? { several: "" } : {};
    const next = fit({ ...this.state, ...alone, ...changes }, this.shape);
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
