// What stands around the panels: search, the list of keys, language and theme, and how the page was made.
import { byId, h, onClick, say, visibleLabel } from "./dom.js";

/** Tokens whose text meets `needle`, ignoring case, in reading order: the first token of each match. */
export function findTokens(tokens, needle) {
  if (needle === "") return [];
  const starts = [];
  let whole = "";
  for (let i = 0; i < tokens.labels.length; i += 1) {
    whole += tokens.gaps[i] ?? "";
    starts.push(whole.length);
    whole += tokens.texts[i];
  }
  const folded = whole.toLowerCase();
  // a letter whose lower case has another length would shift every place behind it
  const hay = folded.length === whole.length ? folded : whole;
  const wanted = folded.length === whole.length ? needle.toLowerCase() : needle;
  const found = [];
  let token = 0;
  for (let at = hay.indexOf(wanted); at >= 0; at = hay.indexOf(wanted, at + Math.max(1, wanted.length))) {
    while (token + 1 < starts.length && starts[token + 1] <= at) token += 1;
    if (found[found.length - 1] !== token) found.push(token);
  }
  return found;
}

export class Search {
  /** on: { found(tokens), go(token), all(tokens) } */
  constructor(tokens, on, t) {
    this.tokens = tokens;
    this.on = on;
    this.t = t;
    this.matches = [];
    this.at = 0;
    this.input = byId("search-input");
    onClick("search-open", () => this.open());
    onClick("search-next", () => this.move(1));
    onClick("search-previous", () => this.move(-1));
    onClick("search-all", () => this.all());
    onClick("search-close", () => this.close());
    this.input.addEventListener("input", () => this.look());
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.all();
      else if (event.key === "Enter" && event.target === this.input) this.move(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") this.close();
    });
  }

  open() {
    byId("search").hidden = false;
    this.input.focus();
    this.input.select();
    this.look();
  }

  close() {
    byId("search").hidden = true;
    this.on.found([]);
    byId("tokens").focus({ preventScroll: true });
  }

  /** Select all matches together. */
  all() {
    if (this.matches.length > 0) this.on.all(this.matches);
  }

  look() {
    this.matches = findTokens(this.tokens, this.input.value);
    this.at = -1;
    this.on.found(this.matches);
    this.tell();
  }

  move(by) {
    if (this.matches.length === 0) return;
    this.at = this.at < 0 && by < 0 ? this.matches.length - 1 : (this.at + by + this.matches.length) % this.matches.length;
    this.on.go(this.matches[this.at]);
    this.tell();
  }

  tell() {
    const n = this.matches.length;
    const text = this.input.value === "" ? "" : n === 0 ? this.t("none_found") : this.t("found", { i: Math.max(1, this.at + 1), n });
    say(byId("search-count"), text);
  }
}

export function keyList(t) {
  const group = (title, entries) => h("section", {}, h("h3", {}, t(title)),
    h("dl", {}, ...entries.flatMap(([keys, what]) => [h("dt", {}, ...keys.map((key) => h("kbd", {}, key))), h("dd", {}, t(what))])));
  return [
    group("keys_text", [[["←", "→"], "k_arrows"], [["↑", "↓"], "k_updown"], [["Home", "End"], "k_homeend"], [["Shift", "←", "→"], "k_range"], [["Space"], "k_toggle"], [["Ctrl", "←", "→"], "k_move"]]),
    group("keys_atlas", [[["←", "→"], "k_atlas_lr"], [["↑", "↓"], "k_atlas_ud"]]),
    group("keys_map", [[["←", "→"], "k_map_lr"], [["↑", "↓"], "k_map_ud"], [["+", "−", "0"], "k_map_zoom"], [["Shift", "←", "↑", "→", "↓"], "k_map_pan"]]),
    group("keys_scope", [[["←", "→", "Home", "End"], "k_strips"]]),
    group("keys_any", [[["[", "]"], "k_layer"], [[",", "."], "k_head"], [["1", "…", "7"], "k_tab"], [["r"], "k_dir"], [["w"], "k_unit"], [["m"], "k_measure"], [["p"], "k_pin"], [["c"], "k_compare"], [["t"], "k_tour"], [["l"], "lesson"], [["/"], "k_search"], [["Ctrl", "Enter"], "search_all"], [["?"], "k_help"], [["Esc"], "k_esc"]]),
  ];
}

/** The footer: how the run was made, and what the file leaves out. */
export function showProvenance(meta, language, t) {
  const facts = meta.provenance.map((fact) => [fact[language], fact.value]);
  byId("facts").replaceChildren(...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  const out = meta.layers.filter((info) => !info.full);
  const lines = [];
  const bare = meta.layers.filter((info) => info.full && info.value_dim === null).map((info) => info.layer);
  if (out.length + meta.missing.length + bare.length === 0) lines.push(t("left_out_none"));
  if (out.length > 0) {
    const full = meta.layers.filter((info) => info.full).map((info) => info.layer).join(", ") || "–";
    const top = meta.top > 0 ? t("left_out_top", { k: meta.top }) : "";
    const unfit = out.filter((info) => info.reason === null);
    if (unfit.length > 0) lines.push(t("left_out_text", { n: unfit.length, all: meta.layers.length, limit: meta.limit_mb, full, top }));
    for (const info of out) if (info.reason !== null) lines.push(t("refused", { layer: info.layer, reason: info.reason[language] }));
    if (unfit.length > 0) lines.push(t("command", { layer: unfit[0].layer, command: commandFor(meta, unfit[0].layer) }));
  }
  if (bare.length > 0) lines.push(t("left_out_v", { layers: bare.join(", ") }));
  for (const { layer, reason } of meta.missing) lines.push(t("missing", { layer, reason }));
  const missing = ["entropy", "max", "distance", "other_distance", "first_key", "previous"].filter((name) => !meta.rows.includes(name));
  if (out.length > 0 && missing.length > 0) lines.push(t("left_out_rows", { names: missing.map((name) => t(name)).join(", ") }));
  byId("left-out").replaceChildren(...lines.map((line) => h("p", {}, line)));
}

export function commandFor(meta, layer) {
  return `kizuki look --layers ${layer} …`;
}

/** Fill every element that names its words: data-t the text, data-aria its label. */
export function fillWords(language, t) {
  document.documentElement.lang = language;
  for (const element of document.querySelectorAll("[data-t]")) say(element, t(element.dataset.t));
  for (const element of document.querySelectorAll("[data-aria]")) element.setAttribute("aria-label", t(element.dataset.aria));
}

export function liveText(reading, { layer, head, subject, direction, names, units, share }, t) {
  const list = reading.list.slice(0, 3).map(({ token, weight }) => `${visibleLabel(units.label(token))} ${weight.toFixed(2)}`).join(", ");
  const token = names.slice(0, 4).map((name) => visibleLabel(name)).join(", ") + (names.length > 4 ? ", …" : "");
  return t(direction === "reads" ? "live_reads" : "live_readers", { layer, head, i: subject, token, list: list || "–", p: share });
}
