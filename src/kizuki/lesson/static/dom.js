// Building blocks of the page. Text only ever becomes text nodes, never markup.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A number as people read it: about four digits, a real minus sign. */
export function show(number, digits = 4) {
  if (number === -Infinity) return "−∞";
  const size = Math.abs(number);
  let text;
  if (number === 0) text = "0";
  else if (size >= 1e5 || size < 1e-4) text = number.toExponential(digits - 2);
  else text = size >= 1000 ? number.toFixed(1) : size >= 1 ? number.toPrecision(digits) : number.toFixed(digits);
  return text.replace(/-/g, "−");
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** A token in a table, its spaces made visible; and in a sentence, without them. */
export const shownLabel = (label) => label.replace(/^ /, "␣").replace(/ $/, "␣") || "∅";
export const spokenLabel = (label) => label.trim() || shownLabel(label);

/** A number that opens: a button with its name. */
export function opener(name, number, digits = 4) {
  return h("button", { class: "num", type: "button", "data-open": name, title: name }, show(number, digits));
}

export function fill(template, values) {
  return template.replace(/\{(\w+)\}/g, (_, name) => String(values[name]));
}

/** A canvas at the screen's own resolution; its context, in CSS pixels. */
export function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

export function theme() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  return { ink: get("--ink"), muted: get("--muted"), line: get("--line"), accent: get("--accent"), panel: get("--panel"),
    plus: get("--plus"), minus: get("--minus"), font: getComputedStyle(document.body).fontFamily };
}

/** How strongly a weight, or a signed number out of `most`, is painted: the square root, so that small ones show. */
export const strength = (number, most) => Math.sqrt(Math.min(1, Math.abs(number) / (most || 1)));
