// Small helpers for building the page. Text only ever becomes text nodes, never markup.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

export function onClick(id, act) {
  byId(id).addEventListener("click", act);
}

/** Set text only where it changed, so that screen readers and layout are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A canvas sized to `width` x `height` CSS pixels at the screen's own resolution; returns its 2-D context. */
export function sizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const w = Math.max(1, Math.round(width * ratio));
  const t = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== w || canvas.height !== t) {
    canvas.width = w;
    canvas.height = t;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

export function cssVariable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A token as people can see it in a table: white space made visible, long ones cut in the middle. */
export function visibleLabel(label, limit = 24) {
  const shown = label.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ /, "␣").replace(/ $/, "␣");
  const letters = [...shown];
  if (letters.length <= limit) return shown === "" ? "∅" : shown;
  const half = Math.floor(limit / 2);
  return `${letters.slice(0, half).join("")}…${letters.slice(-half).join("")}`;
}

/** Call `work` at most once a frame. */
export function perFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}

/** A horizontal legend: a strip of the colour map with its numbers below. ticks: [[place 0..1, text]]. */
export function legend(table, ticks, label) {
  const canvas = h("canvas", { width: 256, height: 1, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const image = context.createImageData(256, 1);
  for (let step = 0; step < 256; step += 1) {
    image.data.set([table[3 * step], table[3 * step + 1], table[3 * step + 2], 255], 4 * step);
  }
  context.putImageData(image, 0, 0);
  const scale = h("div", { class: "ticks" }, ...ticks.map(([place, text]) => {
    const tick = h("span", {}, text);
    tick.style.left = `${100 * place}%`;
    if (place > 0.97) tick.className = "last";
    if (place < 0.03) tick.className = "first";
    return tick;
  }));
  return h("div", { class: "legend", role: "img", "aria-label": `${label}: ${ticks.map(([, text]) => text).join(", ")}` }, canvas, scale);
}
