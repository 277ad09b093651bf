// The numbers beside the pictures: the reading as a table, the chosen cell, its neighbours, the head, the prediction.
import { byId, h, onClick, say, visibleLabel } from "./dom.js";
import { MEASURES } from "./store.js";
import { digits, massShown, percent } from "./reading.js";

const FIRST_ROWS = 12, MOST_ROWS = 3072; // of a reading that has more, its file has the rest

/** The table twin of the painted text. */
export class ReadingTable {
  constructor() {
    this.count = FIRST_ROWS;
    onClick("more", () => this.grow(this.count * 4));
    onClick("fewer", () => this.grow(FIRST_ROWS));
  }

  grow(count) {
    this.count = count;
    this.show(this.last);
  }

  /** what: { reading, direction, subject, names, units, t, colour(weight), scoreOf(token) | null } */
  show(what) {
    this.last = what;
    const { reading, direction, subject, names, units, t, colour, scoreOf } = what;
    const list = names.slice(0, 5).map((name) => t("quoted", { token: visibleLabel(name) })).join(t("comma")) + (names.length > 5 ? " …" : "");
    const title = names.length === 1
      ? t(direction === "reads" ? "reads_title" : "readers_title", { token: visibleLabel(names[0]), i: subject })
      : t(direction === "reads" ? "reads_title_of" : "readers_title_of", { n: names.length, list });
    say(byId("reading-title"), title);
    const shown = reading.list.slice(0, this.count);
    let running = 0;
    const rows = shown.map(({ token, weight }, at) => {
      running += weight;
      const bar = h("span", { class: "bar" });
      bar.style.width = `${Math.max(1, 100 * Math.min(1, weight))}%`;
      bar.style.backgroundColor = colour(weight);
      return h("tr", { "data-token": token },
        h("td", { class: "n" }, String(at + 1)),
        h("td", { class: "label" }, visibleLabel(units.label(token))),
        h("td", { class: "n" }, String(token)),
        h("td", { class: "n w" }, digits(weight)),
        h("td", { class: "barcell", "aria-hidden": "true" }, bar),
        h("td", { class: "n" }, scoreOf ? digits(scoreOf(token)) : "–"),
        h("td", { class: "n" }, digits(running)));
    });
    byId("reading-rows").replaceChildren(...rows);
    byId("reading-table").hidden = rows.length === 0;
    byId("more").hidden = reading.list.length <= this.count || this.count >= MOST_ROWS;
    byId("fewer").hidden = this.count <= FIRST_ROWS || reading.list.length <= FIRST_ROWS;
    say(byId("reading-note"), this.note(reading, direction, shown.length, t));
  }

  note(reading, direction, shown, t) {
    if (reading.bad) {
      const { recomputed, recorded, tolerance } = reading.bad;
      return t("disagree_row", { a: digits(recomputed), b: digits(recorded), t: digits(tolerance) });
    }
    if (reading.total === 0) return t(direction === "reads" ? "sees_nothing" : "read_by_none");
    const p = percent(massShown(reading, { count: shown }));
    if (!reading.exact) return t("table_partial", { n: shown, p });
    return shown === reading.list.length ? t("table_all", { n: shown, p }) : t("table_cut", { n: shown, all: reading.list.length, p });
  }
}

/** One cell in the order of the formula: q·k → × scale → (softcap) → − L → weight. */
export function cellLine(cell, labels, query, key, t) {
  const where = `${t("query")} ${query} ${t("quoted", { token: visibleLabel(labels[query], 14) })} × ${t("key")} ${key} ${t("quoted", { token: visibleLabel(labels[key], 14) })}`;
  if (!cell.visible) return `${where}: ${t("not_visible")}`;
  const parts = [`${t("dot")} ${digits(cell.product)}`, `${t("times_scale")} ${digits(cell.scale)} = ${digits(cell.scaled)}`];
  if (cell.score !== cell.scaled) parts.push(`${t("cap")} ${digits(cell.score)}`);
  parts.push(`${t("score")} − ${t("lse")} = ${digits(cell.score)} − ${digits(cell.lse)} = ${digits(cell.score - cell.lse)}`);
  parts.push(`${t("weight")} ${digits(cell.weight)}`);
  return `${where}: ${parts.join(" → ")}`;
}

/** Weights of the cells around the chosen one: the table twin of the matrix. */
export async function neighbours(head, query, key, labels, t, signal) {
  const near = (at, count) => Array.from({ length: 7 }, (_, i) => Math.max(0, Math.min(count - 7, at - 3)) + i).filter((i) => i < count);
  const queries = near(query, head.queries), keys = near(key, head.keys);
  const { weights, refused } = await head.block(queries[0], queries.at(-1) + 1, keys[0], keys.at(-1) + 1, signal);
  const shown = (i, weight) => (refused.has(i) ? "×" : Number.isNaN(weight) ? "·" : digits(weight));
  const top = h("tr", {}, h("th", { scope: "col" }, `${t("query")} ＼ ${t("key")}`), ...keys.map((j) => h("th", { scope: "col" }, `${j} ${visibleLabel(labels[j], 8)}`)));
  const rows = queries.map((i, r) => h("tr", {}, h("th", { scope: "row" }, `${i} ${visibleLabel(labels[i], 8)}`),
    ...keys.map((j, c) => h("td", { class: i === query && j === key ? "chosen" : "" }, shown(i, weights[r * keys.length + c])))));
  return h("table", { class: "numbers" }, h("caption", {}, t("map_table")), h("thead", {}, top), h("tbody", {}, ...rows));
}

/** What the head and the chosen row measure. rows: measure -> value of the row, null where it is left out. */
export function showNumbers({ layer, head, means, controls, rows, visible, received, t }) {
  const line = (name, row, note = "", ...cells) => h("tr", {}, h("th", { scope: "row" }, name, note ? h("small", {}, note) : null), ...[row, ...cells, "", ""].slice(0, 3).map((cell) => h("td", { class: "n" }, cell)));
  const unit = (name) => t(`${name}_unit`);
  const withUnit = (value, name) => `${digits(value)}${unit(name) && Number.isFinite(value) ? ` ${unit(name)}` : ""}`;
  const lines = MEASURES.map((name, at) => {
    const value = rows[name];
    const row = value === null ? "–" : Number.isNaN(value) ? t("undefined") : withUnit(value, name);
    const mean = means[name] === null ? t("undefined") : withUnit(means[name], name);
    const note = name === "entropy" && visible > 0 ? `${t("bound")} ${digits(Math.log(visible))}` : name === "entropy" ? "" : t(`${name}_note`);
    return line(t(name), row, note, mean, controls[at] === null ? "–" : withUnit(controls[at], name));
  });
  lines.push(line(t("visible_keys"), visible === null ? "–" : String(visible)));
  lines.push(line(t("received_sum"), digits(received.sum)));
  lines.push(line(t("received_mean"), received.mean === null ? "–" : digits(received.mean)));
  byId("numbers-rows").replaceChildren(...lines);
  say(byId("numbers-title"), `${t("layer")} ${layer} · ${t("head")} ${head}`);
}

/** The model's most probable next tokens after `token`; `found` as a source's next() gives it. */
export function showPrediction(meta, token, found, t) {
  const box = byId("next");
  if (found === null) {
    say(byId("next-title"), "");
    box.replaceChildren(h("p", { class: "note" }, meta.note || t(meta.has_head ? "no_predictions" : "no_head")));
    return;
  }
  say(byId("next-title"), t("next_after", { token: visibleLabel(meta.tokens.labels[token]), i: token }));
  const rows = found.names.map((name, rank) => {
    const bar = h("span", { class: "bar" });
    const p = found.probabilities[rank], here = found.here[rank];
    bar.style.width = `${Math.max(1, 100 * p)}%`;
    return h("tr", { class: here ? "actual" : "" }, h("td", { class: "label" }, visibleLabel(name)), h("td", { class: "n w" }, digits(p)),
      h("td", { class: "barcell", "aria-hidden": "true" }, bar), h("td", { class: "note" }, here ? `← ${t("actual")}` : ""));
  });
  const head = h("tr", {}, h("th", { scope: "col" }, t("token")), h("th", { scope: "col", class: "n" }, t("probability")), h("td", { class: "barcell" }), h("td", {}));
  box.replaceChildren(h("table", { class: "reading" }, h("thead", {}, head), h("tbody", {}, ...rows)));
}
