// The keyboard: arrows act on the panel that has the focus, letters anywhere outside an input.
import { byId } from "./dom.js";
import { MEASURES } from "./store.js";

const PANELS = { 1: "tokens", 2: "atlas", 3: "map", 4: "strips", 5: "compare-open", 6: "pin", 7: "cause-kind" };

export function attachKeys(page) {
  const { store } = page;

  /** Arrows move; with shift they draw the selection out, with ctrl they leave it, and space adds or takes one. */
  function inText(key, event = {}) {
    const { units, field } = page;
    const at = store.state[field];
    const unit = units.of[at];
    const last = page.meta.tokens.labels.length - 1;
    if (key === " ") {
      page.chooseToken(at, "toggle");
      return true;
    }
    if (key === "Escape" && store.state.several) {
      store.set({ several: "" });
      return true;
    }
    const next = {
      ArrowLeft: () => units.starts[Math.max(0, unit - 1)],
      ArrowRight: () => units.starts[Math.min(units.starts.length - 1, unit + 1)],
      ArrowUp: () => page.text.neighbourLine(at, -1),
      ArrowDown: () => page.text.neighbourLine(at, 1),
      Home: () => 0,
      End: () => last,
    }[key];
    if (!next) return false;
    page.chooseToken(Math.max(0, Math.min(last, next())), event.shiftKey ? "extend" : event.ctrlKey || event.metaKey ? "move" : "only");
    return true;
  }

  function inAtlas(key) {
    const step = { ArrowLeft: ["layer", -1], ArrowRight: ["layer", 1], ArrowUp: ["head", -1], ArrowDown: ["head", 1] }[key];
    if (!step) return false;
    store.step(...step);
    return true;
  }

  function inMap(key, event) {
    const { query, key: at } = store.state;
    const pan = event.shiftKey && { ArrowLeft: [-0.25, 0], ArrowRight: [0.25, 0], ArrowUp: [0, -0.25], ArrowDown: [0, 0.25] }[key];
    if (pan) {
      page.map.pan(...pan);
      return true;
    }
    if (key === "ArrowLeft") store.set({ key: at - 1 });
    else if (key === "ArrowRight") store.set({ key: at + 1 });
    else if (key === "ArrowUp") store.set({ query: query - 1 });
    else if (key === "ArrowDown") store.set({ query: query + 1 });
    else if (key === "+" || key === "=") page.map.zoom(1.6);
    else if (key === "-" || key === "−") page.map.zoom(1 / 1.6);
    else if (key === "0") page.map.fit();
    else return false;
    return true;
  }

  function anywhere(key) {
    if (key === "[") store.step("layer", -1);
    else if (key === "]") store.step("layer", 1);
    else if (key === ",") store.step("head", -1);
    else if (key === ".") store.step("head", 1);
    else if (key === "r") page.turnTo(store.state.direction === "reads" ? "readers" : "reads");
    else if (key === "m") store.set({ measure: MEASURES[(MEASURES.indexOf(store.state.measure) + 1) % MEASURES.length] });
    else if (key === "p" || key === "P") page.pins.toggle();
    else if (key === "c") page.compare.toggle();
    else if (key === "w" && store.shape.words) store.set({ unit: store.state.unit === "word" ? "token" : "word" });
    else if (key === "l") store.set({ lesson: "1" });
    else if (key === "t") page.tour.go(Number(store.state.tour) + 1);
    else if (key === "Escape" && store.state.tour) page.tour.end();
    else if (key === "/") page.search.open();
    else if (key === "?") page.openHelp();
    else if (PANELS[key]) byId(PANELS[key]).focus();
    else return false;
    return true;
  }

  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.isComposing || document.querySelector("dialog[open]")) return;
    const { target } = event;
    const held = event.ctrlKey || event.metaKey;
    if (held && !(target.id === "tokens" && (event.key.startsWith("Arrow") || event.key === " "))) return;
    if (target.closest("input, select, textarea")) return;
    const panel = target.id;
    const loose = target === document.body;
    const handled =
      (panel === "atlas" && inAtlas(event.key)) ||
      (panel === "map" && inMap(event.key, event)) ||
      (panel === "tokens" && inText(event.key, event)) ||
      (loose && (event.key === "ArrowLeft" || event.key === "ArrowRight") && inText(event.key)) ||
      anywhere(event.key);
    if (handled) event.preventDefault();
  });
}
