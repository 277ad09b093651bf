// What a panel shows, as a file: PNG and SVG of its picture, CSV and JSON of its numbers. Made here, sent nowhere.
import { byId, cssVariable, h, visibleLabel } from "./dom.js";
import { cssColour, inkOn } from "./colour.js";
import { massShown, percent } from "./reading.js";
import { formatHash } from "./store.js";
import { SvgContext } from "./svg.js";

const FONT = "12px system-ui, 'Noto Sans CJK JP', sans-serif";
const PAD = 14, LINE = 18, WIDE = 820;

export class Save {
  constructor(page) {
    this.page = page;
    const panels = { text: "text-panel", atlas: "atlas-panel", map: "map-panel", scope: "scope-panel", compare: "compare-panel", ...(page.meta.live && { cause: "cause-panel" }) };
    for (const [what, panel] of Object.entries(panels)) {
      const buttons = (what === "cause" ? ["CSV", "JSON"] : ["PNG", "SVG", "CSV", "JSON"]).map((kind) => h("button", { "data-save": `${what} ${kind}`, onclick: () => this.save(what, kind.toLowerCase()) }, kind));
      byId(panel).querySelector("h2").after(h("details", { class: "save" }, h("summary", { "data-t": "save" }), h("div", {}, ...buttons)));
    }
  }

  async save(what, kind) {
    const { page } = this;
    try {
      const made = this.there(what) && (kind === "csv" || kind === "json" ? this.numbers(what) : this.picture(what));
      if (!made) return page.say("save_nothing");
      const { model } = page.meta, { layer, head } = page.store.state;
      const name = `kizuki-${model.replace(/[^\w.-]+/g, "-")}-L${layer}H${head}-${what}.${kind}`;
      const blob = { csv: () => new Blob([csv(made)], { type: "text/csv" }), json: () => new Blob([JSON.stringify(made, finite)], { type: "application/json" }), svg: () => new Blob([made.svg], { type: "image/svg+xml" }), png: () => png(made) };
      const address = URL.createObjectURL(await blob[kind]());
      h("a", { href: address, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(address), 60000);
      page.say("saved", { name });
    } catch (error) {
      page.fail(error);
    }
  }

  /** Whether the panel shows something. */
  there(what) {
    const { shown, microscope, compare, cause } = this.page;
    return { cause: cause?.found, text: shown && !shown.reading.bad, scope: microscope.now, compare: compare.now && !compare.now.bad && compare.now.alike }[what] ?? true;
  }

  /** { what, model, selection, notes, columns, rows }, numbers in full. */
  numbers(what) {
    const { page } = this, { meta, store } = page, { state } = store, { labels } = meta.tokens;
    const made = { what, model: meta.model, selection: formatHash(state).slice(1), caution: page.t("caution") };
    if (what === "text") {
      const { reading, layer, head, direction, subjects, units } = page.shown;
      const list = reading.dense ? Array.from(reading.dense, (weight, token) => ({ token, weight })) : reading.list;
      return { ...made, layer, head, direction, tokens: subjects, exact: reading.exact, total: reading.total, columns: ["token", "label", "weight"], rows: list.map(({ token, weight }) => [token, units.label(token), weight]) };
    }
    if (what === "cause") return { ...made, ...page.cause.numbers() };
    if (what === "atlas") {
      const rows = meta.layers.flatMap(({ layer }, n) => meta.heads.map((head, m) => [layer, head, ...Object.keys(meta.means).map((name) => meta.means[name][n][m])]));
      return { ...made, queries: meta.queries, columns: ["layer", "head", ...Object.keys(meta.means)], rows };
    }
    if (what === "scope") {
      const { cell, steps, state: { layer, head, query, key } } = page.microscope.now;
      const { products, ...chain } = steps;
      return { ...made, layer, head, query, key, labels: [labels[query], labels[key]], scale: cell.scale, lse: cell.lse, ...chain, ...page.microscope.table() };
    }
    if (what === "compare") return { ...made, heads: page.compare.now.names, exact: page.compare.now.between.exact, columns: ["token", "label", "A", "B", "A - B"], rows: page.compare.now.between.rows.map((row) => [row.token, page.compare.nameOf(row.token), row.a, row.b, row.difference]) };
    return { ...made, ...this.matrix() };
  }

  /** The blocks in view, a row for each: their first query, then a number for each column's first key. */
  matrix() {
    const { map, pictures, meta, store: { state } } = this.page, { x, y, size } = map.view;
    const zoom = pictures.head === null ? null : Math.min(pictures.base, Math.max(...pictures.levels.keys()));
    const level = zoom === null ? { ...meta.picture, mass: pictures.coarse } : pictures.levels.get(zoom);
    const tall = zoom === null ? meta.queries / level.rows : 2 ** zoom, wide = zoom === null ? meta.keys / level.cols : 2 ** zoom;
    const values = level[zoom === null ? "mass" : state.pool];
    const span = (start, block, count) => [Math.max(0, Math.floor(start / block)), Math.min(count, Math.ceil((start + size) / block))];
    const [r0, r1] = span(y, tall, level.rows), [c0, c1] = span(x, wide, level.cols);
    const keys = Array.from({ length: c1 - c0 }, (_, c) => Math.ceil((c0 + c) * wide));
    const rows = Array.from({ length: r1 - r0 }, (_, r) => [Math.ceil((r0 + r) * tall), ...values.subarray((r0 + r) * level.cols + c0, (r0 + r) * level.cols + c1)]);
    return { pool: zoom === null ? "mass" : state.pool, queries_per_row: tall, keys_per_column: wide, columns: ["query", ...keys], rows };
  }

  /** { svg, width, height }: title, picture, legend and the caution. */
  picture(what) {
    const { page } = this, { t } = page, ink = cssVariable("--ink"), muted = cssVariable("--muted");
    const context = new SvgContext();
    const { canvas, lines, legends, width, height } = this.drawing(what);
    let y = PAD;
    const write = (text, colour, font = FONT) => {
      Object.assign(context, { font, fillStyle: colour, textAlign: "left", textBaseline: "top", globalAlpha: 1 });
      context.fillText(text, PAD, y);
      y += LINE;
    };
    const most = Math.max(width, 560);
    lines.forEach((line, n) => wrapped(context, line, most, n === 0 ? `bold ${FONT}` : FONT).forEach((part) => write(part, n === 0 ? ink : muted, n === 0 ? `bold ${FONT}` : FONT)));
    context.save();
    context.translate(PAD, y + 4);
    canvas(context);
    context.restore();
    y += height + 10;
    for (const { table, ticks } of legends) {
      const wide = Math.min(360, most);
      for (let step = 0; step < 64; step += 1) {
        context.fillStyle = cssColour(table, step / 63);
        context.fillRect(PAD + (step * wide) / 64, y, wide / 64 + 0.5, 10);
      }
      Object.assign(context, { font: FONT, fillStyle: muted, textBaseline: "top" });
      for (const [place, text] of ticks) {
        context.textAlign = place > 0.97 ? "right" : place < 0.03 ? "left" : "center";
        context.fillText(text, PAD + place * wide, y + 13);
      }
      y += 34;
    }
    wrapped(context, `${t("caution")} ${page.meta.model} · kizuki`, most, FONT).forEach((part) => write(part, muted));
    const [w, tall] = [most + 2 * PAD, y + PAD];
    return { svg: context.text(w, tall, cssVariable("--panel")), width: w, height: tall };
  }

  /** What is drawn for a panel, and the words above it. */
  drawing(what) {
    const { page } = this, { t, scale, colours, signed } = page;
    const ticks = scale.ticks.map((w) => [Math.max(0, scale.at(w)), String(w)]);
    const weights = { table: colours, ticks };
    const place = `${t("layer")} ${page.store.state.layer} · ${t("head")} ${page.store.state.head}`;
    const said = (id) => byId(id).textContent;
    if (what === "text") {
      const laid = this.layText();
      return { ...laid, lines: [`${place} · ${said("reading-title")}`, [said("mass"), said("text-note")].join(" ")], legends: [weights] };
    }
    if (what === "map") return { canvas: (context) => page.map.paint(context), ...page.map.geometry(), lines: [`${t("map")} · ${place}`, said("map-note"), said("map-status")], legends: [weights] };
    if (what === "cause") return { ...made, ...page.cause.numbers() };
    if (what === "atlas") {
      const g = page.atlas.geometry();
      return { canvas: (context) => page.atlas.paint(context), ...g, lines: [`${t("atlas")} · ${t(page.store.state.measure)}`, said("atlas-note")], legends: [{ table: colours, ticks: page.atlas.ticks }] };
    }
    if (what === "scope") {
      const { strips } = page.microscope;
      const steps = [...byId("chain").children].map((li) => [...li.children].map((part) => part.textContent).join(": "));
      return { canvas: (context) => strips.paint(context), width: strips.width(), height: strips.height(), lines: [`${t("scope")} · ${said("scope-title")}`, ...steps, said("scope-check")], legends: [{ table: signed, ticks: [[0, "−max"], [0.5, "0"], [1, "+max"]] }] };
    }
    const { compare } = page, g = compare.geometry(), { strips, ticks: signs } = compare;
    const draw = (context) => {
      compare.paint(context);
      context.translate(0, g.height + 6);
      strips.paint(context);
    };
    return { canvas: draw, width: Math.max(g.width, strips.width()), height: g.height + 6 + strips.height(), lines: [`${t("compare")} · ${said("compare-title")}`, said("compare-note")], legends: [weights, { table: signed, ticks: signs }] };
  }

  /** The text with its colours, laid out in lines of WIDE pixels. */
  layText() {
    const { page } = this, { units, scale, colours } = page, { texts, gaps, labels, chips, starts } = units;
    const measure = new SvgContext();
    measure.font = FONT.replace("12", "14");
    const weight = new Map(page.shown.reading.list.map((entry) => [entry.token, entry.weight]));
    const placed = [];
    let x = 0, y = 0;
    const put = (text, first) => {
      text.split("\n").forEach((part, n) => {
        if (n > 0) [x, y] = [0, y + 24];
        const wide = measure.measureText(part).width;
        if (x + wide > WIDE && x > 0) [x, y] = [0, y + 24];
        if (part !== "") placed.push({ x, y, wide, part, t: first === null ? 0 : scale.at(weight.get(first) ?? 0) });
        x += wide;
      });
    };
    starts.forEach((first, unit) => {
      if (gaps[unit]) put(gaps[unit], null);
      put(chips[unit] ? `‹${visibleLabel(labels[unit])}›` : texts[unit] || "∅", first);
    });
    const canvas = (context) => {
      Object.assign(context, { font: measure.font, textAlign: "left", textBaseline: "top" });
      for (const { x: left, y: top, wide, part, t } of placed) {
        if (t > 0) {
          context.fillStyle = cssColour(colours, t);
          context.fillRect(left, top, wide, 21);
        }
        context.fillStyle = t > 0 ? inkOn(colours, t) : cssVariable("--ink");
        context.fillText(part, left, top + 3);
      }
    };
    return { canvas, width: WIDE, height: y + 28 };
  }
}

/** A line broken at spaces (or, in writing without them, anywhere) so that it fits. */
function wrapped(context, text, width, font) {
  context.font = font;
  const lines = [];
  let line = "";
  for (const part of text.match(/[\x21-\u2fff]+\s*|\s+|./gu) ?? []) {
    if (line !== "" && context.measureText(line + part).width > width) {
      lines.push(line);
      line = "";
    }
    line += part;
  }
  return [...lines, line].filter((each) => each.trim() !== "");
}

/** RFC 4180, with a line of notes first. Text that a spreadsheet would run as a formula is kept text. */
export function csv({ columns, rows, ...about }) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    const kept = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(kept) ? `"${kept.replace(/"/g, '""')}"` : kept;
  };
  const { what, model, selection, ...rest } = about;
  const notes = [`# ${what}`, model, selection, ...Object.entries(rest).map(([name, value]) => `${name}=${Array.isArray(value) ? value.join(" ") : value}`)];
  return [notes, columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n");
}

/** JSON has no word for these numbers; they are written as text. */
function finite(_, value) {
  return typeof value === "number" && !Number.isFinite(value) ? String(value) : ArrayBuffer.isView(value) ? [...value].map((x) => (Number.isFinite(x) ? x : String(x))) : value;
}

async function png({ svg, width, height }) {
  const image = h("img", { src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}` });
  await image.decode();
  const canvas = h("canvas", { width: Math.round(2 * width), height: Math.round(2 * height) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve, reject) => canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("this browser made no PNG of the picture"))), "image/png"));
}
