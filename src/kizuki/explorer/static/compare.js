// Two heads side by side: their matrices and their signed difference, and one reading under both. Two heads of one
// text, or the same head in two texts, whose difference is defined where both have as many tokens.
import { byId, cssVariable, h, legend, onClick, perFrame, say, sizeCanvas, visibleLabel } from "./dom.js";
import { cssColour, signedColour } from "./colour.js";
import { Pictures } from "./pictures.js";
import { digits, massShown, percent } from "./reading.js";
import { Strips } from "./strips.js";

const DIFFERENCES = 12;
const OTHER = "other"; // instead of a head: the same one in the other input

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
    byId("against-input").addEventListener("change", (event) => (event.target.value ? store.set({ against: OTHER }) : this.toHead()));
    byId("against-token").addEventListener("input", ({ target }) => target.validity.valid && store.set({ there: target.value }));
    onClick("compare-open", () => this.toggle());
    onClick("compare-swap", () => this.swap());
    this.canvas.addEventListener("pointermove", (event) => this.tellBlock(this.blockAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.tellBlock(null));
    this.canvas.addEventListener("click", (event) => {
      const at = this.blockAt(event);
      if (at) store.set(at.n === 1 && !this.now.alike ? { there: String(at[page.field]) } : { query: at.query, key: at.key });
    });
  }

  toggle() {
    const { store } = this.page;
    if (store.state.against) return store.set({ against: "" });
    return store.shape.other ? store.set({ against: OTHER }) : this.toHead();
  }

  /** With another head: the next one of this layer, or where there is none of the next layer. */
  toHead() {
    const { store } = this.page, { layers, heads } = store.shape, { state } = store;
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
    say(byId("compare-heading"), t(state.against === OTHER ? "compare_inputs" : "compare"));
    say(byId("compare-open"), t(state.against ? "compare_close" : "compare_start"));
    byId("compare-open").setAttribute("aria-expanded", String(state.against !== ""));
    this.now = null;
    if (state.against === "") return;
    const across = state.against === OTHER, there = across ? data.other : data;
    const [layer, head] = across ? [state.layer, state.head] : state.against.split(".").map(Number);
    const subjects = page.selected(), theirs = across ? this.counterpart(state, subjects) : subjects;
    this.showChoices(across, layer, head, theirs[0]);
    if (!there.layer(layer) || !there.meta.heads.includes(head)) {
      byId("compare-shown").hidden = true;
      return say(byId("compare-note"), t("compare_missing", { layer, head }));
    }
    byId("compare-shown").hidden = false;
    const units = [across ? page.allUnits.token : page.units, across ? there.units : page.units];
    const [other, coarse, own] = await Promise.all([there.head(layer, head), there.picture(layer, head), data.picture(state.layer, state.head)]);
    const mine = await page.joined(opened, state.layer, state.head, state.direction, subjects, signal, units[0]);
    const their = await page.joined(other, layer, head, state.direction, theirs, signal, units[1], there);
    signal.throwIfAborted();
    const names = [`${state.layer} · ${state.head}`, `${layer} · ${head}`];
    const alike = !across || page.meta.queries === there.meta.queries; // as many tokens: then each has its counterpart
    this.now = { mine, theirs: their, names, units, other, opened, own, coarse, alike, there, bad: mine.bad ?? their.bad, between: alike ? difference(mine, their) : null };
    this.open(other, coarse);
    this.showReadings(subjects, theirs, state);
    this.draw();
  }

  /** The tokens of the other input that stand for the selected ones: the one that was named, or those of the same
      places as far as there are such. */
  counterpart(state, subjects) {
    const last = this.page.data.other.meta.queries - 1;
    const same = subjects.filter((token) => token <= last);
    return state.there ? [Math.min(last, Number(state.there))] : same.length ? same : [last];
  }

  showChoices(across, layer, head, token) {
    const { t, data, meta } = this.page, other = data.other?.meta;
    byId("against-layer").value = String(layer);
    byId("against-head").value = String(head);
    for (const id of ["against-layer", "against-head"]) byId(id).parentElement.hidden = across;
    byId("compare-swap").hidden = across;
    byId("against-input").parentElement.hidden = !other;
    byId("against-token").parentElement.hidden = !across;
    if (!other) return;
    byId("against-input").replaceChildren(h("option", { value: "" }, t("compare_this", { model: meta.model, n: meta.queries })), h("option", { value: OTHER }, t("compare_that", { model: other.model, n: other.queries })));
    byId("against-input").value = across ? OTHER : "";
    byId("against-token").max = String(other.queries - 1);
    if (document.activeElement !== byId("against-token")) byId("against-token").value = String(token);
    say(byId("against-name"), t("quoted", { token: visibleLabel(other.tokens.labels[token]) }));
  }

  open(head, coarse) {
    if (this.pictures && this.pictures.head === head && this.pictures.coarse === coarse) return;
    if (!this.pictures) {
      const engine = this.page.data.engine((message) => this.pictures.receive(message));
      this.pictures = new Pictures((message) => engine.send(message), () => this.draw(), (error) => this.page.fail(error));
    }
    this.pictures.open(head, coarse);
  }

  showReadings(subjects, theirs, state) {
    const { t, scale, colours, signed } = this.page;
    const { mine, theirs: their, names, units, there, alike, bad, between } = this.now;
    const name = (list, unit) => `${visibleLabel(unit.label(list[0]))}${new Set(list.map((token) => unit.of[token])).size > 1 ? " …" : ""}`;
    const both = [name(subjects, units[0]), name(theirs, units[1])];
    const whose = t("quoted", { token: [...new Set(both)].join(" / ") });
    say(byId("compare-title"), t(state.direction === "reads" ? "compare_reads" : "compare_readers", { token: whose }));
    const moved = () => (between.exact ? t("compare_moved", { p: percent(between.moved / Math.max(mine.total ?? 1, their.total ?? 1, 1e-300)) }) : t("compare_partial", { n: between.rows.length }));
    say(byId("compare-note"), bad ? t("compare_bad") : alike ? moved() : t("compare_uneven", { a: this.page.meta.queries, b: there.meta.queries }));
    byId("compare-readings").hidden = bad !== null;
    if (bad) return;
    const spread = ({ list }, unit) => {
      const values = new Float64Array(unit.starts.length);
      for (const { token, weight } of list) values[unit.of[token]] = weight;
      return values;
    };
    const weight = (value) => (scale.at(value) > 0 ? cssColour(colours, scale.at(value)) : null);
    const strips = [
      { name: names[0], values: spread(mine, units[0]), colour: weight, end: "0…1" },
      { name: names[1], values: spread(their, units[1]), colour: weight, end: "0…1" },
    ];
    if (alike) {
      const apart = new Float64Array(units[0].starts.length);
      for (const { token, difference: by } of between.rows) apart[units[0].of[token]] = by;
      this.top = Math.max(1e-9, Math.abs(between.rows[0]?.difference ?? 0));
      strips.push({ name: "A − B", values: apart, colour: (value) => (value === 0 ? null : signedColour(signed, rooted(value / this.top))), end: `±${digits(this.top)}` });
    }
    this.strips.show(strips, signed);
    byId("compare-table").replaceChildren(...(alike ? [this.table(between.rows)] : [mine, their].map((reading, n) => this.list(reading, n))));
    this.tellToken(this.strips.at);
  }

  /** A token's name: both of them where the other input has another word there. */
  nameOf(token) {
    const [a, b] = this.now.units.map((unit) => visibleLabel(unit.label(token)));
    return a === b ? a : `${a} / ${b}`;
  }

  table(all) {
    const { t } = this.page, { names } = this.now;
    const head = h("tr", {}, h("th", { scope: "col" }, t("token")), h("th", { scope: "col", class: "n" }, t("position")),
      ...[`A = ${names[0]}`, `B = ${names[1]}`, "A − B"].map((name) => h("th", { scope: "col", class: "n" }, name)));
    const rows = all.slice(0, DIFFERENCES).map((row) => h("tr", {}, h("td", { class: "label" }, this.nameOf(row.token)), h("td", { class: "n" }, String(row.token)),
      ...[row.a, row.b, row.difference].map((x) => h("td", { class: "n" }, digits(x)))));
    return h("table", { class: "reading" }, h("caption", {}, t("compare_rows", { n: rows.length, all: all.length })), h("thead", {}, head), h("tbody", {}, ...rows));
  }

  /** One of two readings that have no difference: its largest weights. */
  list(reading, n) {
    const { t } = this.page, { names, units } = this.now;
    const rows = reading.list.slice(0, DIFFERENCES).map(({ token, weight }) => h("tr", {}, h("td", { class: "label" }, visibleLabel(units[n].label(token))), ...[String(token), digits(weight)].map((x) => h("td", { class: "n" }, x))));
    const share = t("mass_shown", { p: percent(massShown(reading, { count: DIFFERENCES })) });
    return h("table", { class: "reading" }, h("caption", {}, `${"AB"[n]} = ${names[n]}: ${share}`), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("token")), ...["position", "weight"].map((word) => h("th", { scope: "col", class: "n" }, t(word))))), h("tbody", {}, ...rows));
  }

  tellToken(place) {
    if (!this.now || this.now.bad) return;
    const { t } = this.page, { units, mine, theirs, alike } = this.now;
    const of = ({ list }, unit) => digits(list.find(({ token }) => unit.of[token] === place)?.weight ?? 0);
    let text = t("compare_hint");
    if (place !== null && alike && place < units[0].starts.length) {
      const row = this.now.between.rows.find(({ token }) => units[0].of[token] === place) ?? { a: 0, b: 0, difference: 0 };
      text = `${units[0].starts[place]} ${t("quoted", { token: this.nameOf(units[0].starts[place]) })}: A ${digits(row.a)} · B ${digits(row.b)} · A − B ${digits(row.difference)}`;
    } else if (place !== null && !alike) {
      text = [mine, theirs].map((reading, n) => (place < units[n].starts.length ? `${"AB"[n]} ${place} ${t("quoted", { token: visibleLabel(units[n].labels[place]) })} ${of(reading, units[n])}` : null)).filter(Boolean).join(" · ");
    }
    say(byId("compare-cell"), text);
    byId("compare-strips").setAttribute("aria-label", text);
  }

  /** The two pictures of the same blocks, or null while one is not ready: { a, b, rows, cols }; of inputs that are not
      alike each has its own `sizes`, [{ rows, cols, queries, keys }]. */
  both() {
    const { page, now } = this;
    if (!now) return null;
    const { pool } = page.store.state, { picture, queries, keys } = page.meta, there = now.there.meta;
    const made = (a, b, values) => ({ a: values(a), b: values(b), rows: a.rows, cols: a.cols, sizes: [{ rows: a.rows, cols: a.cols, queries, keys }, { rows: b.rows, cols: b.cols, queries: there.queries, keys: there.keys }] });
    if (now.opened === null || now.other === null) {
      return now.own && now.coarse ? made({ ...picture, of: now.own }, { ...there.picture, of: now.coarse }, ({ of }) => of) : null; // the file's own pictures, of masses
    }
    // no finer than the screen: pixels that are left out would take thin stripes with them
    const room = this.geometry().side * (window.devicePixelRatio || 1);
    const [a, b] = [page.pictures, this.pictures].map(({ check, head, levels }) => {
      if (!check || !head) return null;
      const fits = [...levels.keys()].sort((x, y) => x - y).find((zoom) => Math.max(levels.get(zoom).rows, levels.get(zoom).cols) <= room);
      return levels.get(fits ?? Math.max(...levels.keys()));
    });
    return a && b && page.pictures.head === now.opened && this.pictures.head === now.other ? made(a, b, (level) => level[pool]) : null;
  }

  geometry() {
    const width = this.canvas.parentElement.clientWidth, count = this.now?.alike === false ? 2 : 3;
    const across = width < 460 ? 1 : count;
    const side = Math.floor(Math.min(340, (width - 10 * (across - 1)) / across));
    return { across, count, side, width: across * (side + 10) - 10, height: (count / across) * (side + 24) };
  }

  place(g, n) {
    return g.across > 1 ? [n * (g.side + 10), 20] : [0, 20 + n * (g.side + 24)];
  }

  blockAt(event) {
    const g = this.geometry(), found = this.both();
    for (let n = 0; found && n < g.count; n += 1) {
      const [x0, y0] = this.place(g, n);
      const u = (event.offsetX - x0) / g.side, v = (event.offsetY - y0) / g.side;
      if (u < 0 || v < 0 || u >= 1 || v >= 1) continue;
      const { rows, cols, queries, keys } = found.sizes[n % 2], r = Math.floor(v * rows), c = Math.floor(u * cols);
      return { ...found, n, r, c, cols, query: Math.min(queries - 1, Math.floor((r * queries) / rows)), key: Math.min(keys - 1, Math.floor((c * keys) / cols)) };
    }
    return null;
  }

  tellBlock(at) {
    const { t } = this.page, alike = this.now?.alike !== false;
    if (!at) return say(byId("compare-block"), t(alike ? "compare_maps_hint" : "compare_hint_uneven"));
    const [x, y] = [at.a, at.b].map((values) => values[at.r * at.cols + at.c]);
    const numbers = alike ? `A ${digits(x)} · B ${digits(y)} · A − B ${digits(x - y)}` : `${"AB"[at.n]} ${digits(at.n ? y : x)}`;
    return say(byId("compare-block"), `${t("query")} ${at.query}, ${t("key")} ${at.key}: ${numbers}`);
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
    if (found && g.count === 3) for (let i = 0; i < found.a.length; i += 1) top = Math.max(top, Math.abs(found.a[i] - found.b[i]) || 0);
    top ||= 1;
    const weight = (i, values) => (scale.at(values[i]) > 0 ? cssColour(colours, scale.at(values[i])) : null);
    const apart = (i) => (found.a[i] === found.b[i] || Number.isNaN(found.a[i] - found.b[i]) ? null : signedColour(signed, rooted((found.a[i] - found.b[i]) / top)));
    const colour = [(i) => weight(i, found.a), (i) => weight(i, found.b), apart];
    [`A = ${this.now.names[0]}`, `B = ${this.now.names[1]}`, "A − B"].slice(0, g.count).forEach((name, n) => {
      const [x, y] = this.place(g, n);
      context.fillStyle = cssVariable("--ink");
      context.fillText(name, x, y - 10);
      if (found) context.drawImage(blocks(found.sizes[n % 2], colour[n]), x, y, g.side, g.side);
      context.strokeStyle = cssVariable("--line");
      context.strokeRect(x + 0.5, y + 0.5, g.side - 1, g.side - 1);
    });
    const ticks = scale.ticks.map((w) => [Math.max(0, scale.at(w)), String(w)]);
    const [quarter, whole] = [digits(top / 4), digits(top)];
    this.ticks = [[0, `−${whole}`], [0.25, `−${quarter}`], [0.5, "0"], [0.75, `+${quarter}`], [1, `+${whole}`]];
    byId("compare-legends").replaceChildren(legend(colours, ticks, t("weight")), ...(g.count === 3 ? [legend(signed, this.ticks, t("compare_difference"))] : []));
    if (this.said !== g.count) this.tellBlock(null);
    this.said = g.count;
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
