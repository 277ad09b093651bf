// The microscope: one cell of the matrix, from q_i and k_j to its share of the output, with the numbers in the
// formula. Every number is computed here from q_i, k_j and L, and compared with what the source says of the cell.
import { byId, h, legend, say, visibleLabel } from "./dom.js";
import { chain, contribution, largestOf, largestSize } from "./chain.js";
import { digits, percent } from "./reading.js";
import { Strips } from "./strips.js";

const LARGEST = 3; // products named one by one

export class Microscope {
  constructor(page) {
    this.page = page;
    this.strips = new Strips("strips", { point: (place) => this.tell(place) });
    byId("scope-twin").addEventListener("toggle", () => this.showTwin());
  }

  /** What is known of the cell that is chosen, or why it is not. */
  async show(head, state, signal) {
    const { page } = this, { t } = page, { query, key } = state;
    const { labels } = page.meta.tokens;
    say(byId("scope-title"), `${t("layer")} ${state.layer} · ${t("head")} ${state.head} · ${t("query")} ${query} ${t("quoted", { token: visibleLabel(labels[query], 14) })} × ${t("key")} ${key} ${t("quoted", { token: visibleLabel(labels[key], 14) })}`);
    const refused = head === null ? page.whyClosed(state.layer) : page.pictures.check?.badSet.has(query) ? t("disagree", { n: 1, d: digits(page.pictures.check.worst) }) : "";
    byId("scope").hidden = refused !== "";
    byId("scope-none").hidden = refused === "";
    say(byId("scope-none"), refused);
    this.now = null;
    if (refused !== "") return;
    const [cell, mixed] = await Promise.all([head.cell(query, key, signal), head.values ? head.values(query, key, signal) : null]);
    if (signal.aborted) return;
    const { softcap } = page.data.layer(state.layer);
    const steps = chain({ ...cell, softcap });
    this.now = { state, cell, softcap, steps, mixed, out: mixed === null ? null : contribution(steps.weight, mixed.v, mixed.output) };
    this.showStrips();
    byId("chain").replaceChildren(...this.lines().map(([name, ...parts]) => h("li", {}, h("span", { class: "step" }, name), h("span", { class: "sum" }, ...parts))));
    say(byId("scope-check"), this.check());
    say(byId("scope-note"), t(mixed === null ? "scope_no_v" : "scope_v"));
    this.tell(this.strips.at);
    this.showTwin();
  }

  showStrips() {
    const { t, signed } = this.page, { cell, steps, mixed, out } = this.now;
    const end = (top) => `±${digits(top)}`;
    const of = (name, values, top) => ({ name, values, top, end: end(top) });
    const both = largestSize(cell.q, cell.k), products = largestSize(steps.products);
    const rows = [of("qᵢ", cell.q, both), of("kⱼ", cell.k, both), of("qᵢ × kⱼ", steps.products, products)];
    if (mixed) {
      const mix = largestSize(mixed.output, out.part);
      rows.push(of("vⱼ", mixed.v, largestSize(mixed.v)), of("aᵢⱼ vⱼ", out.part, mix), of("zᵢ", mixed.output, mix));
    }
    this.strips.show(rows, signed);
    byId("scope-legend").replaceChildren(legend(signed, [[0, "−max"], [0.5, "0"], [1, "+max"]], t("scope_scale")));
  }

  /** [name, formula with its numbers] of each step. */
  lines() {
    const { t } = this.page, { cell, softcap, steps, mixed, out } = this.now;
    const strong = (value) => h("strong", {}, digits(value));
    const named = largestOf(steps.products, LARGEST).map((d) => `[${d}] ${digits(steps.products[d])}`).join(", ");
    const lines = [
      ["q · k", `Σ qᵢ[c] kⱼ[c] = `, strong(steps.product), ` (${t("scope_products", { n: steps.products.length, list: named })})`],
      ["× scale", `${digits(steps.product)} × ${digits(cell.scale)} = `, strong(steps.scaled)],
    ];
    if (softcap !== null) lines.push(["softcap", `${digits(softcap)} · tanh(${digits(steps.scaled)} / ${digits(softcap)}) = `, strong(steps.capped)]);
    if (cell.bias !== null && cell.bias !== undefined) lines.push([t("scope_bias"), `${digits(steps.capped)} + ${digits(cell.bias)} = `, strong(steps.biased)]);
    lines.push([t("scope_mask"), `${digits(steps.biased)} + ${cell.visible ? "0" : "(−∞)"} = `, strong(steps.score), ` (${t(cell.visible ? "scope_seen" : "not_visible")})`]);
    if (cell.visible) lines.push(["− L", `${digits(steps.score)} − ${cell.lse < 0 ? `(${digits(cell.lse)})` : digits(cell.lse)} = `, strong(steps.exponent)]);
    lines.push([t("weight"), cell.visible ? `aᵢⱼ = exp(${digits(steps.exponent)}) = ` : "aᵢⱼ = exp(−∞) = ", strong(steps.weight)]);
    if (mixed) {
      const share = out.along === null ? "–" : percentOf(out.along);
      lines.push(["× vⱼ", `|aᵢⱼ vⱼ| = ${digits(steps.weight)} × ${digits(Math.hypot(...mixed.v))} = `, strong(out.size)]);
      lines.push(["zᵢ", `|Σⱼ aᵢⱼ vⱼ| = `, strong(out.whole), ` (${t("scope_share", { p: share })})`]);
    }
    return lines;
  }

  check() {
    const { t } = this.page, { cell, steps } = this.now;
    const off = Math.abs(steps.weight - cell.weight);
    return t(off <= 1e-5 * Math.max(cell.weight, 1e-3) ? "scope_checked" : "scope_off", {
      n: steps.products.length, a: digits(Math.abs(steps.product - cell.product)), b: digits(off),
    });
  }

  /** The numbers of one dimension. */
  tell(place) {
    if (!this.now) return;
    const { t } = this.page, { cell, steps, mixed, out } = this.now;
    let text = t("scope_hint");
    if (place !== null && place < cell.q.length) text = `[${place}] qᵢ ${digits(cell.q[place])} × kⱼ ${digits(cell.k[place])} = ${digits(steps.products[place])}`;
    if (place !== null && mixed && place < mixed.v.length) text += ` · vⱼ ${digits(mixed.v[place])} · aᵢⱼ vⱼ ${digits(out.part[place])} · zᵢ ${digits(mixed.output[place])}`;
    say(byId("scope-cell"), text);
    byId("strips").setAttribute("aria-label", text);
  }

  /** The strips as a table: { columns, rows }. */
  table() {
    const { cell, steps, mixed, out } = this.now;
    const columns = ["c", "q[c]", "k[c]", "q[c] k[c]", "running sum"];
    if (mixed) columns.push("v[c]", "weight v[c]", "z[c]");
    let sum = 0;
    const length = Math.max(cell.q.length, mixed ? mixed.v.length : 0);
    const rows = Array.from({ length }, (_, c) => {
      sum += steps.products[c] ?? 0;
      const left = c < cell.q.length ? [cell.q[c], cell.k[c], steps.products[c], sum] : [null, null, null, null];
      if (!mixed) return [c, ...left];
      return [c, ...left, ...(c < mixed.v.length ? [mixed.v[c], out.part[c], mixed.output[c]] : [null, null, null])];
    });
    return { columns, rows };
  }

  showTwin() {
    if (!byId("scope-twin").open || !this.now) return;
    const { columns, rows } = this.table();
    byId("scope-table").replaceChildren(h("table", { class: "numbers" },
      h("thead", {}, h("tr", {}, ...columns.map((name) => h("th", { scope: "col" }, name === "running sum" ? this.page.t("running") : name)))),
      h("tbody", {}, ...rows.map(([c, ...numbers]) => h("tr", {}, h("th", { scope: "row" }, String(c)), ...numbers.map((x) => h("td", {}, digits(x))))))));
  }
}

/** A share that may be negative: a part that points against the whole. */
function percentOf(share) {
  return share < 0 ? `−${percent(-share)}` : percent(share);
}
