// The lesson: attention in eight steps on the chosen layer, head and query, with switches for scale, mask and temperature.
import { byId, h, onClick, say, visibleLabel } from "./dom.js";
import { cssColour } from "./colour.js";
import { digits, massShown, percent } from "./reading.js";

const KEYS_LISTED = 8;

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

function spreadOf(values) {
  const mean = values.reduce((sum, x) => sum + x, 0) / values.length;
  return Math.sqrt(values.reduce((sum, x) => sum + (x - mean) ** 2, 0) / values.length);
}

export class LessonMode {
  constructor(page) {
    this.page = page;
    const { store } = page;
    onClick("lesson-open", () => store.set({ lesson: "1" }));
    onClick("lesson-close", () => byId("lesson").close());
    byId("lesson").addEventListener("close", () => store.set({ lesson: "" }));
    for (const id of ["lesson-scale", "lesson-mask", "lesson-heat"]) byId(id).addEventListener("input", () => this.fill());
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
    if (opened === null) say(byId("lesson-steps"), page.whyClosed(layer));
    if (!dialog.open) dialog.showModal();
    if (opened === null) return;
    const [{ check, weights, score }, cell, mixed, ranges] = await Promise.all([opened.row(query, signal), opened.cell(query, key, signal), opened.values(query, key, signal), data.ranges(layer)]);
    if (!check.ok) return say(byId("lesson-steps"), t("disagree_row", { a: digits(check.recomputed), b: digits(check.recorded), t: digits(check.tolerance) }));
    const others = [];
    for (const each of meta.heads) {
      const reading = await page.joined(await data.head(layer, each), layer, each, "reads", [query], signal, page.allUnits.token);
      others.push([each, reading]);
    }
    signal.throwIfAborted();
    const info = data.layer(layer), { softcap, scale } = info;
    const products = Float64Array.from(weights, (_, j) => (softcap === null ? score(j) : softcap * Math.atanh(score(j) / softcap)) / scale);
    const seen = Array.from(weights, (_, j) => (ranges ? j >= ranges.first[query] && j < ranges.stop[query] : score(j) > -Infinity));
    const all = products.every(Number.isFinite); // a source may know the scores of what is seen only
    byId("lesson-mask").disabled = !all || seen.every(Boolean);
    this.now = { state, weights, products, seen, cell, mixed, others, info, sink: info.sinks ? info.sinks[data.slot(head)] : null };
    this.fill();
  }

  fill() {
    if (!this.now) return;
    const { t, meta, colours, scale: colour } = this.page, { labels } = meta.tokens;
    const { state: { query, key }, weights, products, seen, cell, mixed, others, info, sink } = this.now;
    const own = byId("lesson-scale").checked && byId("lesson-mask").checked && byId("lesson-heat").value === "0";
    const temperature = 2 ** Number(byId("lesson-heat").value);
    const visible = byId("lesson-mask").checked || byId("lesson-mask").disabled ? seen : seen.map(() => true);
    const made = (on, heat = 1, keys = visible) => softmaxRow(products, keys, { scale: on ? info.scale : 1, softcap: info.softcap, sink, temperature: heat });
    const row = own ? { ...made(true), weights } : made(byId("lesson-scale").checked, temperature);
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
    const [raw, scaled] = [false, true].map((on) => made(on));
    const heads = h("ul", { class: "heads" }, ...others.map(([head, { bad, list }]) => h("li", {}, `${t("head")} ${head}: ${bad ? "×" : list.slice(0, 2).map(({ token, weight }) => `${visibleLabel(labels[token])} ${digits(weight)}`).join(" · ") || "–"}`)));
    const words = {
      n: labels.length, i: query, token: visibleLabel(labels[query]), key: visibleLabel(labels[key]), d: cell.q.length, q: size(cell.q), k: size(cell.k), v: mixed ? size(mixed.v) : "–",
      cos: digits(cell.product / (Math.hypot(...cell.q) * Math.hypot(...cell.k) || 1)), dot: digits(cell.product), scale: digits(info.scale),
      a: digits(spreadOf(shown.map((j) => raw.scores[j]))), b: digits(spreadOf(shown.map((j) => scaled.scores[j]))),
      x: percent(Math.max(...raw.weights)), y: percent(Math.max(...scaled.weights)), seen: seen.filter(Boolean).length,
      sum: digits(row.weights.reduce((sum, w) => sum + w, 0)), entropy: digits(entropyOf(row.weights)), z: mixed ? size(mixed.output) : "–", heads: meta.heads.length,
    };
    say(byId("lesson-now"), t(own ? "lesson_own" : "lesson_if", { t: digits(temperature) }));
    byId("lesson-steps").replaceChildren(...Array.from({ length: 8 }, (_, n) => h("li", {}, h("h3", {}, t(`step_${n + 1}`)), h("p", {}, t(`step_${n + 1}_text`, words)), n === 5 ? h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": t("step_6") }, table) : n === 7 ? heads : null)));
  }
}
