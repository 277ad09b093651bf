// The lesson: attention in eight steps on the chosen layer, head and query, with switches for scale, mask and temperature.
import { byId, h, onClick, say, visibleLabel } from "./dom.js";
import { cssColour } from "./colour.js";
import { digits, massShown, percent } from "./reading.js";
import { drawPlane, drawnOf } from "./plane.js";

const KEYS_LISTED = 8;
const SWITCHES = ["lesson-scale", "lesson-mask", "lesson-heat"];
const SATURATED = 0.99; // a largest weight above this leaves hardly any gradient

/** Weights of one row from its products q·k; visible: which keys are seen; sink: one more logit, or null. */
export function softmaxRow(products, visible, { scale, softcap, sink, temperature }) {
  const scores = Float64Array.from(products, (product, j) => {
    if (!visible[j]) return -Infinity;
    const scaled = scale * product;
    return (softcap === null ? scaled : softcap * Math.tanh(scaled / softcap)) / temperature;
  });
  let top = sink === null ? -Infinity : sink;
  for (const score of scores) if (score > top) top = score;
  let sum = sink === null ? 0 : Math.exp(sink - top);
  for (const score of scores) if (score > -Infinity) sum += Math.exp(score - top);
  return { scores, weights: scores.map((score) => (score > -Infinity ? Math.exp(score - top) / sum : 0)) };
}

export function entropyOf(weights) {
  let sum = 0;
  for (const weight of weights) if (weight > 0) sum -= weight * Math.log(weight);
  return sum;
}

/** The size of softmax's derivative, ‖diag(a) − a aᵀ‖: no gradient reaches the scores where it is 0. */
export function slopeOf(weights) {
  let square = 0, cube = 0;
  for (const a of weights) {
    square += a ** 2;
    cube += a ** 3;
  }
  return Math.sqrt(Math.max(0, square - 2 * cube + square ** 2));
}

export function spreadOf(values) {
  const mean = values.reduce((sum, x) => sum + x, 0) / values.length;
  return Math.sqrt(values.reduce((sum, x) => sum + (x - mean) ** 2, 0) / values.length);
}

export class LessonMode {
  constructor(page) {
    this.page = page;
    this.box = byId("plane-box");
    const { store } = page;
    onClick("lesson-open", () => store.set({ lesson: "1" }));
    onClick("lesson-close", () => byId("lesson").close());
    byId("lesson").addEventListener("close", () => store.set({ lesson: "" }));
    for (const id of SWITCHES) byId(id).addEventListener("input", () => this.fill());
    byId("plane").addEventListener("click", ({ offsetX, offsetY }) => {
      const far = ([x, y]) => Math.hypot(x - offsetX, y - offsetY);
      const near = this.points.reduce((best, point) => (far(point) < far(best) ? point : best));
      if (far(near) < 26) store.set({ key: near[2] });
    });
    byId("plane").addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      store.set({ key: store.state.key + step });
    });
    new ResizeObserver(() => this.draw?.()).observe(byId("lesson"));
  }

  async show(opened, state, signal) {
    const dialog = byId("lesson"), { page } = this, { t, data, meta } = page;
    if (!state.lesson) {
      if (dialog.open) dialog.close();
      return;
    }
    const { layer, head, query, key } = state, token = visibleLabel(meta.tokens.labels[query]);
    say(byId("lesson-title"), `${t("lesson")}: ${t("layer")} ${layer} · ${t("head")} ${head} · ${query} ${t("quoted", { token })}`);
    this.now = null;
    if (opened === null) this.only(page.whyClosed(layer));
    if (!dialog.open) dialog.showModal();
    if (opened === null) return;
    const [{ check, weights, score }, cell, mixed, ranges, bare] = await Promise.all([opened.row(query, signal), opened.cell(query, key, signal), opened.values(query, key, signal), data.ranges(layer), opened.bare(query, signal)]);
    if (!check.ok) return this.only(t("disagree_row", { a: digits(check.recomputed), b: digits(check.recorded), t: digits(check.tolerance) }));
    const others = [];
    for (const each of meta.heads) {
      const reading = await page.joined(await data.head(layer, each), layer, each, "reads", [query], signal, page.allUnits.token);
      others.push([each, reading]);
    }
    signal.throwIfAborted();
    const info = data.layer(layer);
    const seen = Array.from(weights, (_, j) => (ranges ? j >= ranges.first[query] && j < ranges.stop[query] : score(j) > -Infinity));
    for (const id of SWITCHES) byId(id).disabled = Boolean(info.bent) || (id === "lesson-mask" && seen.every(Boolean));
    this.now = { state, weights, score, bare, seen, cell, mixed, others, info, sink: info.sinks ? info.sinks[data.slot(head)] : null };
    this.fill();
  }

  /** The steps; the plane's picture, which is made once, goes below the third of them. */
  steps(...steps) {
    const at = document.activeElement;
    byId("lesson").append(this.box); // it outlives the steps, and what has the focus in it keeps it
    byId("lesson-steps").replaceChildren(...steps);
    this.box.hidden = steps.length < 3;
    if (steps.length >= 3) steps[2].append(this.box);
    if (this.box.contains(at)) at.focus({ preventScroll: true });
  }

  only(why) {
    this.steps(h("li", { class: "warn" }, why));
  }

  fill() {
    if (!this.now) return;
    const { t, meta, colours, scale: colour } = this.page, { labels } = meta.tokens;
    const { state: { query, key }, weights, score, bare, seen, cell, mixed, others, info, sink } = this.now, { products, plane } = bare;
    const [scaled, masked, plain] = [byId("lesson-scale").checked, byId("lesson-mask").checked || byId("lesson-mask").disabled, byId("lesson-heat").value === "0"];
    const own = info.bent || (scaled && masked && plain);
    const temperature = 2 ** Number(byId("lesson-heat").value);
    const visible = masked ? seen : seen.map(() => true);
    const made = (on, heat = 1, keys = visible) => softmaxRow(products, keys, { scale: on ? info.scale : 1, softcap: info.softcap, sink, temperature: heat });
    const row = made(scaled, temperature);
    if (own) row.weights = weights;
    else if (scaled && plain && bare.weights) row.weights = bare.weights; // of this row without its mask, as Python computed it
    if (info.bent) row.scores = Float64Array.from(weights, (_, j) => score(j)); // with what the layer does to them
    const size = (vector) => digits(Math.hypot(...vector));
    const shown = [...products.keys()].filter((j) => visible[j]);
    const order = [...products.keys()].sort((a, b) => row.weights[b] - row.weights[a] || a - b).slice(0, KEYS_LISTED);
    const line = (j) => {
      const bar = h("span", { class: "bar" });
      bar.style.width = `${100 * row.weights[j]}%`;
      bar.style.backgroundColor = cssColour(colours, colour.at(row.weights[j]));
      return h("tr", {}, h("td", { class: "label" }, visibleLabel(labels[j])), ...[String(j), digits(products[j]), digits(row.scores[j]), digits(row.weights[j])].map((x) => h("td", { class: "n" }, x)), h("td", { class: "barcell", "aria-hidden": "true" }, bar));
    };
    const table = h("table", { class: "reading" }, h("caption", {}, t("mass_shown", { p: percent(massShown({ list: order.map((token) => ({ token, weight: row.weights[token] })), total: row.weights.reduce((sum, x) => sum + x, 0) })) })),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("token")), ...[t("position"), "q·k", t("score"), t("weight")].map((x) => h("th", { scope: "col", class: "n" }, x)), h("td", { class: "barcell" }))), h("tbody", {}, ...order.map(line)));
    const sides = [false, true].map((on) => made(on));
    const heads = h("ul", { class: "heads" }, ...others.map(([head, { bad, list }]) => h("li", {}, `${t("head")} ${head}: ${bad ? "×" : list.slice(0, 2).map(({ token, weight }) => `${visibleLabel(labels[token])} ${digits(weight)}`).join(" · ") || "–"}`)));
    const words = {
      n: labels.length, i: query, token: visibleLabel(labels[query]), key: visibleLabel(labels[key]), d: cell.q.length, q: size(cell.q), k: size(cell.k), v: mixed ? size(mixed.v) : "–",
      cos: digits(cell.product / (Math.hypot(...cell.q) * Math.hypot(...cell.k) || 1)), dot: digits(cell.product), scale: digits(info.scale),
      seen: seen.filter(Boolean).length,
      sum: digits(row.weights.reduce((sum, w) => sum + w, 0)), entropy: digits(entropyOf(row.weights)), z: mixed ? size(mixed.output) : "–", heads: meta.heads.length,
    };
    say(byId("lesson-now"), t(own ? "lesson_own" : "lesson_if", { t: digits(temperature) }));
    const below = { 3: info.bent ? h("p", { class: "note warn" }, t("lesson_bent")) : this.scales(sides, shown), 5: group(t("step_6"), table), 7: heads };
    this.steps(...Array.from({ length: 8 }, (_, n) => h("li", {}, h("h3", {}, t(`step_${n + 1}`)), h("p", {}, t(`step_${n + 1}_text`, words)), below[n])));
    this.picture(plane, { weights: row.weights, seen: visible, key, labels }, order);
  }

  /** What the scale does to this row: spread of the scores, saturation, entropy and gradient, off and on. */
  scales(sides, shown) {
    const { t } = this.page;
    const names = [t("scale_off"), t("scale_on")];
    const rows = sides.map(({ scores, weights }, n) => {
      const top = weights.reduce((a, b) => Math.max(a, b), 0);
      const cells = [digits(spreadOf(shown.map((j) => scores[j]))), `${digits(top)}${top > SATURATED ? ` (${t("saturated")})` : ""}`, digits(entropyOf(weights)), digits(slopeOf(weights))];
      return h("tr", {}, h("th", { scope: "row" }, names[n]), ...cells.map((x) => h("td", { class: "n" }, x)));
    });
    const heads = [t("spread"), t("max"), t("entropy"), t("gradient")].map((x) => h("th", { scope: "col", class: "n" }, x));
    return group(t("step_4"), h("table", { class: "reading scales" }, h("thead", {}, h("tr", {}, h("td", {}), ...heads)), h("tbody", {}, ...rows)), h("p", { class: "note" }, t("scale_note")));
  }

  /** The plane, below the third step, with its numbers as a table. */
  picture(plane, marks, order) {
    const { t } = this.page, { labels, key, weights } = marks, drawn = drawnOf(weights, key).length;
    this.draw = () => !this.box.hidden && byId("lesson").open && (this.points = drawPlane(plane, marks));
    this.draw();
    const here = `${key} ${t("quoted", { token: visibleLabel(labels[key]) })}: ${t("along")} ${digits(plane.along[key])}, ${t("beside")} ${digits(plane.beside[key])}`;
    byId("plane").setAttribute("aria-label", here);
    say(byId("plane-cell"), here);
    say(byId("plane-note"), `${t("plane_note", { p: percent(plane.residual) })}${drawn < labels.length ? ` ${t("plane_cut", { n: drawn, all: labels.length })}` : ""}`);
    const line = (name, ...cells) => h("tr", {}, h("td", { class: "label" }, name), ...cells.map((x) => h("td", { class: "n" }, x)));
    const heads = ["position", "along", "beside", "weight"].map((word) => h("th", { scope: "col", class: "n" }, t(word)));
    byId("plane-table").replaceChildren(h("table", { class: "reading" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("token")), ...heads)), h("tbody", {},
      line("q", "–", digits(plane.query), "0", "–"), ...order.map((j) => line(visibleLabel(labels[j]), String(j), digits(plane.along[j]), digits(plane.beside[j]), digits(weights[j]))))));
  }
}

function group(label, table, note = null) {
  return h("div", {}, h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, table), note);
}
