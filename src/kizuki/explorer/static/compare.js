// Two heads side by side: their matrices and their signed difference, and one reading under both.
import { byId, cssVariable, h, legend, onClick, perFrame, say, sizeCanvas, visibleLabel } from "./dom.js";
import { cssColour, signedColour } from "./colour.js";
import { Pictures } from "./pictures.js";
import { digits, percent } from "./reading.js";
import { Strips } from "./strips.js";

const DIFFERENCES = 12;

/** a − b of two readings: { rows: [{ token, a, b, difference }] by falling size, dense or null, moved }. moved: the
    share of weight that lies on other tokens, half the sum of the sizes; null where a reading is partial, of which
    only the tokens in both are compared. */
export function difference(a, b) {
  const exact = a.exact && b.exact;
  const of = ({ list }) => new Map(list.map(({ token, weight }) => [token, weight]));
  const left = of(a), right = of(b);
  const tokens = exact ? new Set([...left.keys(), ...right.keys()]) : [...left.keys()].filter((token) => right.has(token));
  const rows = [...tokens].map((token) => {
    const [x, y] = [left.get(token) ?? 0, right.get(token) ?? 0];
    return { token, a: x, b: y, difference: x - y };
  });
  rows.sort((x, y) => Math.abs(y.difference) - Math.abs(x.difference) || x.token - y.token);
  return { rows, exact, moved: exact ? rows.reduce((sum, row) => sum + Math.abs(row.difference), 0) / 2 : null };
}

export class Compare {
  constructor(page) {
    this.page = page;
    this.strips = new Strips("compare-strips", { point: (place) => this.tellToken(place) });
    this.draw = perFrame(() => this.paint());
    this.canvas = byId("compare-maps");
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    const { store } = page;
    const choose = () => store.set({ against: `${byId("against-layer").value}.${byId("against-head").value}` });
    for (const [id, list] of [["against-layer", store.shape.layers], ["against-head", store.shape.heads]]) {
      byId(id).replaceChildren(...list.map((n) => h("option", { value: n }, String(n))));
      byId(id).addEventListener("change", choose);
    }
    onClick("compare-open", () => this.toggle());
    onClick("compare-swap", () => this.swap());
    this.canvas.addEventListener("pointermove", (event) => this.tellBlock(this.blockAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.tellBlock(null));
    this.canvas.addEventListener("click", (event) => {
      const at = this.blockAt(event);
      if (at) store.set({ query: at.query, key: at.key });
    });
  }

  /** With another head: the next one of this layer, or where there is none of the next layer. */
  toggle() {
    const { store } = this.page, { layers, heads } = store.shape, { state } = store;
    if (state.against) return store.set({ against: "" });
    const next = heads[(heads.indexOf(state.head) + 1) % heads.length];
    const layer = heads.length > 1 ? state.layer : layers[(layers.indexOf(state.layer) + 1) % layers.length];
    return store.set({ against: `${layer}.${next}` });
  }

  swap() {
    const { store } = this.page, { state } = store;
    const [layer, head] = state.against.split(".").map(Number);
    store.set({ layer, head, against: `${state.layer}.${state.head}` });
  }

  /** What the chosen head and the other one read of the same tokens; `opened`: the chosen head, or null. */
  async show(opened, state, signal) {
    const { page } = this, { t, data } = page;
    byId("compare").hidden = state.against === "";
    say(byId("compare-open"), t(state.against ? "compare_close" : "compare_start"));
    byId("compare-open").setAttribute("aria-expanded", String(state.against !== ""));
    this.now = null;
    if (state.against === "") return;
    const [layer, head] = state.against.split(".").map(Number);
    byId("against-layer").value = String(layer);
    byId("against-head").value = String(head);
    const subjects = page.selected();
    const [other, coarse, own] = await Promise.all([data.head(layer, head), data.picture(layer, head), data.picture(state.layer, state.head)]);
    const mine = await page.joined(opened, state.layer, state.head, state.direction, subjects, signal);
    const theirs = await page.joined(other, layer, head, state.direction, subjects, signal);
    signal.throwIfAborted();
    const names = [`${state.layer} · ${state.head}`, `${layer} · ${head}`];
    this.now = { mine, theirs, names, other, opened, own, coarse, bad: mine.bad ?? theirs.bad, between: difference(mine, theirs) };
    this.open(other, coarse);
    this.showReadings(subjects, state);
    this.draw();
  }

  open(head, coarse) {
    if (this.pictures && this.pictures.head === head && this.pictures.coarse === coarse) return;
    if (!this.pictures) {
      const engine = this.page.data.engine((message) => this.pictures.receive(message));
      this.pictures = new Pictures((message) => engine.send(message), () => this.draw(), (error) => this.page.fail(error));
    }
    this.pictures.open(head, coarse);
  }

  showReadings(subjects, state) {
    const { t, units, scale, colours, signed } = this.page;
    const { mine, theirs, names, bad, between } = this.now;
    const first = visibleLabel(units.label(subjects[0]));
    const whose = subjects.length > 1 && new Set(subjects.map((token) => units.of[token])).size > 1 ? t("quoted", { token: `${first} …` }) : t("quoted", { token: first });
    say(byId("compare-title"), t(state.direction === "reads" ? "compare_reads" : "compare_readers", { token: whose }));
    say(byId("compare-note"), bad ? t("compare_bad") : between.exact ? t("compare_moved", { p: percent(between.moved / Math.max(mine.total ?? 1, theirs.total ?? 1, 1e-300)) }) : t("compare_partial", { n: between.rows.length }));
    byId("compare-readings").hidden = bad !== null;
    if (bad) return;
    const spread = ({ list }) => {
      const values = new Float64Array(units.starts.length);
      for (const { token, weight } of list) values[units.of[token]] = weight;
      return values;
    };
    const apart = new Float64Array(units.starts.length);
    for (const { token, difference: by } of between.rows) apart[units.of[token]] = by;
    this.top = Math.max(1e-9, Math.abs(between.rows[0]?.difference ?? 0));
    const weight = (value) => (scale.at(value) > 0 ? cssColour(colours, scale.at(value)) : null);
    this.strips.show([
      { name: names[0], values: spread(mine), colour: weight, end: "0…1" },
      { name: names[1], values: spread(theirs), colour: weight, end: "0…1" },
      { name: "A − B", values: apart, colour: (value) => (value === 0 ? null : signedColour(signed, rooted(value / this.top))), end: `±${digits(this.top)}` },
    ], signed);
    const head = h("tr", {}, h("th", { scope: "col" }, t("token")), h("th", { scope: "col", class: "n" }, t("position")),
      ...[`A = ${names[0]}`, `B = ${names[1]}`, "A − B"].map((name) => h("th", { scope: "col", class: "n" }, name)));
    const rows = between.rows.slice(0, DIFFERENCES).map((row) => h("tr", {}, h("td", { class: "label" }, visibleLabel(units.label(row.token))), h("td", { class: "n" }, String(row.token)),
      ...[row.a, row.b, row.difference].map((x) => h("td", { class: "n" }, digits(x)))));
    byId("compare-table").replaceChildren(h("table", { class: "reading" }, h("caption", {}, t("compare_rows", { n: rows.length, all: between.rows.length })), h("thead", {}, head), h("tbody", {}, ...rows)));
    this.tellToken(this.strips.at);
  }

  tellToken(place) {
    if (!this.now || this.now.bad) return;
    const { t, units } = this.page;
    const row = place === null || place >= units.starts.length ? null : this.now.between.rows.find(({ token }) => units.of[token] === place) ?? { a: 0, b: 0, difference: 0 };
    const text = row === null ? t("compare_hint") : `${units.starts[place]} ${t("quoted", { token: visibleLabel(units.labels[place]) })}: A ${digits(row.a)} · B ${digits(row.b)} · A − B ${digits(row.difference)}`;
    say(byId("compare-cell"), text);
    byId("compare-strips").setAttribute("aria-label", text);
  }

  /** The two pictures of the same blocks, or null while one is not ready: { a, b, rows, cols }. */
  both() {
    const { page, now } = this;
    if (!now) return null;
    const { pool } = page.store.state, { picture } = page.meta;
    if (now.opened === null || now.other === null) {
      return now.own && now.coarse ? { a: now.own, b: now.coarse, ...picture } : null; // the file's own pictures, of masses
    }
    // no finer than the screen: pixels that are left out would take thin stripes with them
    const room = this.geometry().side * (window.devicePixelRatio || 1);
    const [a, b] = [page.pictures, this.pictures].map(({ check, head, levels }) => {
      if (!check || !head) return null;
      const fits = [...levels.keys()].sort((x, y) => x - y).find((zoom) => Math.max(levels.get(zoom).rows, levels.get(zoom).cols) <= room);
      return levels.get(fits ?? Math.max(...levels.keys()));
    });
    return a && b && page.pictures.head === now.opened && this.pictures.head === now.other ? { a: a[pool], b: b[pool], rows: a.rows, cols: a.cols } : null;
  }

  geometry() {
    const width = this.canvas.parentElement.clientWidth;
    const across = width < 460 ? 1 : 3;
    const side = Math.floor(Math.min(340, (width - 10 * (across - 1)) / across));
    return { across, side, width: across * (side + 10) - 10, height: (across === 3 ? 1 : 3) * (side + 24) };
  }

  place(g, n) {
    return g.across === 3 ? [n * (g.side + 10), 20] : [0, 20 + n * (g.side + 24)];
  }

  blockAt(event) {
    const g = this.geometry(), found = this.both(), { queries, keys } = this.page.meta;
    for (let n = 0; found && n < 3; n += 1) {
      const [x0, y0] = this.place(g, n);
      const u = (event.offsetX - x0) / g.side, v = (event.offsetY - y0) / g.side;
      if (u < 0 || v < 0 || u >= 1 || v >= 1) continue;
      const r = Math.floor(v * found.rows), c = Math.floor(u * found.cols);
      return { ...found, r, c, query: Math.min(queries - 1, Math.floor((r * queries) / found.rows)), key: Math.min(keys - 1, Math.floor((c * keys) / found.cols)) };
    }
    return null;
  }

  tellBlock(at) {
    const { t } = this.page;
    if (!at) return say(byId("compare-block"), t("compare_maps_hint"));
    const [x, y] = [at.a, at.b].map((values) => values[at.r * at.cols + at.c]);
    return say(byId("compare-block"), `${t("query")} ${at.query}, ${t("key")} ${at.key}: A ${digits(x)} · B ${digits(y)} · A − B ${digits(x - y)}`);
  }

  paint(given = null) {
    if (!this.now) return;
    const g = this.geometry(), found = this.both(), { scale, colours, signed, t } = this.page;
    const context = given ?? sizeCanvas(this.canvas, g.width, g.height);
    context.clearRect(0, 0, g.width, g.height);
    context.font = "12px system-ui, 'Noto Sans CJK JP', sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.imageSmoothingEnabled = false;
    let top = 0;
    if (found) for (let i = 0; i < found.a.length; i += 1) top = Math.max(top, Math.abs(found.a[i] - found.b[i]) || 0);
    top ||= 1;
    const weight = (i, values) => (scale.at(values[i]) > 0 ? cssColour(colours, scale.at(values[i])) : null);
    const apart = (i) => (found.a[i] === found.b[i] || Number.isNaN(found.a[i] - found.b[i]) ? null : signedColour(signed, rooted((found.a[i] - found.b[i]) / top)));
    const colour = [(i) => weight(i, found.a), (i) => weight(i, found.b), apart];
    [`A = ${this.now.names[0]}`, `B = ${this.now.names[1]}`, "A − B"].forEach((name, n) => {
      const [x, y] = this.place(g, n);
      context.fillStyle = cssVariable("--ink");
      context.fillText(name, x, y - 10);
      if (found) context.drawImage(blocks(found, colour[n]), x, y, g.side, g.side);
      context.strokeStyle = cssVariable("--line");
      context.strokeRect(x + 0.5, y + 0.5, g.side - 1, g.side - 1);
    });
    const ticks = scale.ticks.map((w) => [Math.max(0, scale.at(w)), String(w)]);
    const [quarter, whole] = [digits(top / 4), digits(top)];
    this.ticks = [[0, `−${whole}`], [0.25, `−${quarter}`], [0.5, "0"], [0.75, `+${quarter}`], [1, `+${whole}`]];
    byId("compare-legends").replaceChildren(legend(colours, ticks, t("weight")), legend(signed, this.ticks, t("compare_difference")));
    if (!this.said) this.tellBlock(null);
    this.said = true;
  }
}

/** The square root keeps small differences in sight; the legend has the numbers at their places. */
function rooted(x) {
  return Math.sign(x) * Math.sqrt(Math.abs(x));
}

/** A canvas with one pixel a block; colour(i) may leave one out. */
function blocks({ rows, cols }, colour) {
  const canvas = document.createElement("canvas");
  canvas.width = cols;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  for (let r = 0; r < rows; r += 1) {
    for (let c = 0; c < cols; c += 1) {
      const fill = colour(r * cols + c);
      if (fill === null) continue;
      context.fillStyle = fill;
      context.fillRect(c, r, 1, 1);
    }
  }
  return canvas;
}
