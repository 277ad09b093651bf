// The page: one selection, four panels that follow it. Everything shown comes from its source (source.js).
import { byId, h, legend, onClick, perFrame, say, visibleLabel } from "./dom.js";
import { FLOOR, colourTable, cssColour, signedTable, weightScale } from "./colour.js";
import { translator } from "./words.js";
import { DEFAULTS, MEASURES, Store, parseHash } from "./store.js";
import { Address } from "./address.js";
import { between, formatTokens, parseTokens, toggled } from "./selection.js";
import { Units, unitsOf } from "./units.js";
import { work } from "./worker.js";
import { openSource } from "./source.js";
import { byUnits, controlOf, digits, joinColumns, joinRows, massShown, percent, readColumn, readRow, readTopColumn, readTopRow } from "./reading.js";
import { TextPanel } from "./text.js";
import { Atlas } from "./atlas.js";
import { MatrixMap } from "./map.js";
import { Pictures } from "./pictures.js";
import { ReadingTable, cellLine, neighbours, showNumbers, showPrediction } from "./tables.js";
import { Microscope } from "./microscope.js";
import { Compare } from "./compare.js";
import { Cause } from "./cause.js";
import { Pins } from "./pins.js";
import { Save } from "./save.js";
import { Tour } from "./tour.js";
import { LessonMode } from "./lesson.js";
import { Search, commandFor, fillWords, keyList, liveText, showProvenance } from "./chrome.js";
import { attachKeys } from "./keys.js";
import { darkNow, rememberChoice, startLanguage } from "./taste.js";

const TOGETHER = 256; // tokens of a selection that Python sums in one answer

class Page {
  constructor(source) {
    const { meta } = source;
    this.meta = meta;
    this.data = source;
    this.language = startLanguage();
    this.t = translator(this.language);
    this.preview = { token: null, head: null };
    this.asked = new AbortController(); // of the newest refresh: what an older one asked for is taken back
    this.cellAsked = new AbortController();
    const shape = { layers: meta.layers.map((info) => info.layer), heads: meta.heads, queries: meta.queries, keys: meta.keys };
    this.allUnits = unitsOf(meta.tokens);
    shape.words = this.allUnits.word !== null;
    shape.other = Boolean(source.other);
    this.store = new Store({ ...DEFAULTS, ...meta.start, ...parseHash(location.hash) }, shape);
    this.anchor = null; // the token from which a range is drawn out
    this.adding = false; // whether each click adds a token to the selection
    this.build();
    this.store.listen((state, changed) => this.changed(changed));
    this.address = new Address(this.store);
    this.restyle();
    this.changed(new Set(["layer", "head", "query", "key"]));
    this.map.restore(this.store.state.view);
  }

  build() {
    const { store } = this;
    this.refreshSoon = perFrame(() => this.refresh());
    this.text = new TextPanel(this.units, {
      hover: (token) => this.setPreview({ token }),
      choose: (token, how) => this.chooseToken(token, this.adding && how === "only" ? "toggle" : how),
      drag: (from, to) => this.chooseRange(from, to),
    });
    this.atlas = new Atlas(this.meta, {
      hover: (head) => this.setPreview({ head }),
      choose: (cell) => store.set(cell),
    });
    this.engine = this.data.engine((message) => {
      this.pictures.receive(message);
      if (message.type === "checked" && message.id === this.pictures.id) this.refreshSoon();
    });
    this.pictures = new Pictures((message) => this.engine.send(message), () => this.map.draw(), (error) => this.fail(error));
    this.map = new MatrixMap(this.meta, this.pictures, {
      hover: (cell) => this.showCell(cell),
      choose: (cell) => store.set(cell),
      view: (view) => store.set({ view }),
    });
    this.table = new ReadingTable();
    this.microscope = new Microscope(this);
    this.compare = new Compare(this);
    this.cause = Cause && new Cause(this); // a file has no model, and says so
    this.pins = new Pins(this);
    this.files = new Save(this);
    this.tour = new Tour(this);
    this.lesson = new LessonMode(this);
    this.search = new Search(this.meta.tokens, { found: (tokens) => this.text.setFound(tokens), go: (token) => this.goTo(token), all: (tokens) => this.chooseAll(tokens) }, (...args) => this.t(...args));
    this.buildControls();
    attachKeys(this);
    this.data.listen(() => {
      showProvenance(this.meta, this.language, this.t); // a layer may be missing
      this.refreshSoon();
    });
  }

  buildControls() {
    const { store } = this;
    byId("layer").replaceChildren(...store.shape.layers.map((n) => h("option", { value: n }, String(n))));
    byId("head").replaceChildren(...store.shape.heads.map((n) => h("option", { value: n }, String(n))));
    for (const field of ["layer", "head"]) byId(field).addEventListener("change", (event) => store.set({ [field]: Number(event.target.value) }));
    for (const field of ["measure", "row"]) byId(field).addEventListener("change", (event) => store.set({ [field]: event.target.value }));
    for (const button of document.querySelectorAll("[data-set]")) {
      const [field, value] = button.dataset.set.split(" ");
      button.addEventListener("click", () => (field === "direction" ? this.turnTo(value) : store.set({ [field]: value })));
    }
    onClick("adding", () => this.setAdding(!this.adding));
    onClick("alone", () => this.store.set({ several: "" }));
    this.offerWords();
    onClick("zoom-in", () => this.map.zoom(1.6));
    onClick("zoom-out", () => this.map.zoom(1 / 1.6));
    onClick("zoom-fit", () => this.map.fit());
    onClick("help-open", () => this.openHelp());
    onClick("help-close", () => byId("help").close());
    onClick("language", () => {
      this.language = this.language === "en" ? "ja" : "en";
      this.t = translator(this.language);
      rememberChoice("language", this.language);
      this.restyle();
    });
    onClick("theme", () => {
      document.documentElement.dataset.theme = darkNow() ? "light" : "dark";
      rememberChoice("theme", document.documentElement.dataset.theme);
      this.restyle();
    });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.restyle());
    byId("atlas-twin").addEventListener("toggle", () => this.showAtlasTwin());
    byId("map-twin").addEventListener("toggle", () => this.showMapTwin());
    onClick("reading-rows", (event) => {
      const row = event.target.closest("tr");
      if (row) store.set({ [store.state.direction === "reads" ? "key" : "query"]: Number(row.dataset.token) });
    });
  }

  offerWords() {
    document.querySelector("[data-set^='unit']").parentElement.hidden = !this.store.shape.words;
  }

  /** The words of the text, where the source hands them over later. */
  async addWords() {
    const { tokens } = this.meta, words = this.allUnits.word === null ? await this.data.words() : null;
    if (words === null) return;
    this.allUnits.word = new Units(tokens, words.starts, words.labels);
    this.store.shape.words = true;
    this.pins.shown = null; // a pin of words was named by its tokens
    this.offerWords();
    this.pins.show(this.store.state);
  }

  // -- what the visitor does -----------------------------------------------------------------------

  setPreview(change) {
    Object.assign(this.preview, change);
    this.refreshSoon();
  }

  get units() {
    return this.allUnits[this.store.state.unit];
  }

  /** The field that holds the token whose reading is shown. */
  get field() {
    return this.store.state.direction === "reads" ? "query" : "key";
  }

  /** The tokens selected by hand, in order; without `several` the unit of the one. */
  selected() {
    const { state } = this.store;
    const list = state.several ? parseTokens(state.several, this.meta.tokens.labels.length) : [state[this.field]];
    return [...new Set(list.flatMap((token) => this.units.around(token)))];
  }

  /** how: "only" this token; "toggle" it in the selection; "extend" the selection to it; "move" to it and leave
      the selection; "other": it becomes the other end, the key of what reads or the query of what is read. */
  chooseToken(token, how = "only") {
    const { field } = this;
    if (how === "other") this.store.set({ [field === "query" ? "key" : "query"]: token });
    else if (how === "extend") this.chooseRange(this.anchor ?? this.store.state[field], token);
    else if (how === "move") this.store.set({ [field]: token, several: formatTokens(this.selected()) });
    else if (how === "toggle") {
      const list = toggled(this.selected(), this.units.around(token));
      const at = list.length === 0 || list.includes(token) ? token : list[0];
      this.store.set({ [field]: at, several: this.several(list) });
    } else this.store.set({ [field]: token, several: "" });
  }

  chooseAll(tokens) {
    this.store.set({ [this.field]: tokens[0], several: this.several(tokens.flatMap((token) => this.units.around(token))) });
  }

  chooseRange(from, to) {
    this.anchor = from;
    const list = between(from, to).flatMap((token) => this.units.around(token));
    this.store.set({ [this.field]: to, several: this.several(list) });
  }

  /** A selection of one unit needs no list. */
  several(list) {
    return new Set(list.map((token) => this.units.of[token])).size > 1 ? formatTokens(list) : "";
  }

  setAdding(adding) {
    this.adding = adding;
    byId("adding").setAttribute("aria-pressed", String(adding));
  }

  /** What it reads, or who reads it: of the same token either way. */
  turnTo(direction) {
    const { state } = this.store;
    if (direction === state.direction) return;
    this.store.set({ direction, several: state.several, ...(direction === "reads" ? { query: state.key } : { key: state.query }) });
  }

  goTo(token) {
    this.chooseToken(token);
    byId("text-panel").scrollIntoView({ block: "nearest" });
  }

  openHelp() {
    byId("help-list").replaceChildren(...keyList(this.t));
    byId("help").showModal();
  }

  changed(changed) {
    if (changed.has("view")) this.map.restore(this.store.state.view);
    if (changed.size === 1 && changed.has("view")) return; // the picture follows by itself
    this.busy = true; // until a refresh has caught up
    if (changed.has(this.field) && !this.store.state.several) this.anchor = this.store.state[this.field];
    if (changed.has("unit")) this.text.show(this.units);
    if (changed.has("scale")) this.restyle();
    const { state } = this.store;
    if (changed.has(this.field) || changed.has("direction") || changed.has("unit")) this.text.reveal(state[this.field]);
    this.map.hovered = null; // what is said about the matrix follows the selection until the pointer moves again
    if ((changed.has("query") || changed.has("key")) && this.map.state) this.follow();
    this.refreshSoon();
  }

  follow() {
    this.map.state = this.store.state;
    this.map.follow();
  }

  /** Language, theme or colour scale changed: everything that is not data. */
  restyle() {
    const dark = darkNow();
    this.colours = colourTable(dark);
    this.signed = signedTable(dark);
    this.scale = weightScale(this.store.state.scale);
    fillWords(this.language, this.t);
    say(byId("theme"), this.t(dark ? "theme_light" : "theme_dark"));
    say(byId("tokens-count"), this.t("tokens", { n: this.meta.tokens.labels.length }));
    for (const id of ["measure", "row"]) {
      byId(id).replaceChildren(...MEASURES.map((name) => h("option", { value: name }, this.t(name))));
    }
    const ticks = this.scale.ticks.map((w) => [Math.max(0, this.scale.at(w)), String(w)]);
    for (const id of ["text-legend", "map-legend"]) byId(id).replaceChildren(legend(this.colours, ticks, this.t("weight")));
    showProvenance(this.meta, this.language, this.t);
    this.refreshSoon();
  }

  // -- what follows --------------------------------------------------------------------------------

  async refresh() {
    this.asked.abort();
    this.asked = new AbortController();
    const { signal } = this.asked;
    const { state } = this.store;
    const { layer, head } = this.preview.head ?? state;
    const selected = this.selected();
    const preview = selected.includes(this.preview.token) ? null : this.preview.token; // what is selected is shown anyway
    const subject = preview ?? state[this.field];
    const subjects = preview === null ? selected : this.units.around(subject);
    this.showControls(state);
    this.showAtlas(state);
    this.pins.show(state);
    this.tour.show(state);
    this.cause?.show();
    const query = state.direction === "reads" ? subject : state.query;
    this.text.mark({ query: state.query, key: state.key, preview, chosen: state[this.field], selected });
    const foretell = async () => {
      const found = await this.data.next(query);
      if (!signal.aborted) showPrediction(this.meta, query, found, this.t);
    };
    const read = async () => {
      const opened = await this.data.head(layer, head);
      const waits = (done) => this.showWaiting(done, subjects.length);
      const reading = await this.joined(opened, layer, head, state.direction, subjects, signal, this.units, this.data, waits);
      if (!signal.aborted) this.showReading(reading, { layer, head, direction: state.direction, subject, subjects });
      this.wordsAsked ??= this.addWords().catch((error) => this.fail(error)); // after the first reading, which does without
    };
    try {
      // Side by side: where Python computes, the row is there long before the margins of the matrix.
      await Promise.all([this.openMap(state, signal), read(), foretell(), this.showNumbers(layer, head, query, subject, signal)]);
      if (!signal.aborted) this.busy = false;
    } catch (error) {
      if (!signal.aborted) this.fail(error);
    }
  }

  /** The readings of all subjects as one: of words where the text is shown as words. waits(done) where it takes long. */
  async joined(opened, layer, head, direction, subjects, signal, units = this.units, data = this.data, waits = () => {}) {
    const readings = [], begun = performance.now(), apart = opened?.rowSum && subjects.length > 1 ? TOGETHER : 1;
    let rested = begun;
    for (let at = 0; at < subjects.length; at += apart) {
      if (performance.now() - rested > 40) { // thousands of rows leave the page alive
        await new Promise((resume) => setTimeout(resume, 0));
        rested = performance.now();
      }
      signal.throwIfAborted();
      if (performance.now() - begun > 300) waits(at);
      readings.push(await this.reading(opened, layer, head, direction, apart > 1 ? subjects.slice(at, at + apart) : subjects[at], signal, data));
    }
    const one = subjects.length === 1 ? readings[0] : direction === "reads" ? joinRows(readings, subjects.length) : joinColumns(readings);
    return units.joined ? byUnits(one, units, direction) : one;
  }

  /** `subject`: a token, or of a head that sums by itself a list of them. */
  async reading(opened, layer, head, direction, subject, signal, data = this.data) {
    if (opened !== null) {
      const sums = Array.isArray(subject);
      if (direction === "reads") return readRow(await opened[sums ? "rowSum" : "row"](subject, signal));
      const check = this.pictures.head === opened && this.pictures.check;
      return readColumn(await opened[sums ? "columnSum" : "column"](subject, check ? check.badSet : null, signal));
    }
    const top = await data.top(layer, head);
    const received = (await data.received(layer, head))[subject];
    if (top === null) return { exact: false, bad: null, dense: null, list: [], total: direction === "reads" ? 1 : received, score: null };
    return direction === "reads" ? readTopRow(top, subject, 1) : readTopColumn(top, subject, received);
  }

  /** Rows still on their way: what was read of other tokens does not stand under these. */
  showWaiting(done, all) {
    say(byId("reading-title"), `${this.t("reading_rows")} ${done} / ${all}`);
    for (const id of ["mass", "reading-note"]) say(byId(id), "");
    byId("reading-rows").replaceChildren();
    this.text.paint([], this.scale, this.colours);
  }

  showReading(reading, { layer, head, direction, subject, subjects }) {
    const { scale, colours, t, units } = this;
    const names = [...new Set(subjects.map((token) => units.of[token]))].map((unit) => units.labels[unit]);
    this.shown = { reading, layer, head, direction, subjects, names, units };
    byId("alone").hidden = this.store.state.several === "";
    this.text.paint(reading.list, scale, colours);
    const share = percent(massShown(reading, { floor: scale.floor }));
    say(byId("mass"), reading.bad || reading.total === 0 ? "" : t("mass_shown", { p: share }));
    const sum = names.length > 1 ? [t(direction === "reads" ? "several_reads" : "several_readers", { n: names.length })] : [];
    const notes = [...sum, t("painted", { floor: scale.floor === FLOOR ? "0.0001" : "1/256" })];
    if (!reading.exact) notes.unshift(this.meta.top > 0 ? t("partial", { k: this.meta.top, layer }) : t("partial_none", { layer }));
    if (!this.text.scroller.whole) notes.push(t("text_window"));
    say(byId("text-note"), notes.join(" "));
    this.table.show({ reading, direction, subject, names, units, t, scoreOf: reading.score, colour: (w) => cssColour(colours, scale.at(w)) });
    clearTimeout(this.liveTimer);
    if (this.preview.token === null && this.preview.head === null) {
      this.liveTimer = setTimeout(() => say(byId("live"), liveText(reading, { layer, head, subject, direction, names, units, share }, t)), 400);
    }
  }

  /** The statistics of row `query`, and what `token` receives as a key. */
  async showNumbers(layer, head, query, token, signal) {
    const [ranges, received, ...found] = await Promise.all([
      this.data.ranges(layer), this.data.received(layer, head), ...MEASURES.map((name) => this.data.rowStatistic(layer, head, name)),
    ]);
    if (signal.aborted) return;
    const rows = Object.fromEntries(MEASURES.map((name, at) => [name, found[at] === null ? null : found[at][query]]));
    const seen = ranges === null ? null : seenBy(ranges, this.meta.keys);
    const means = Object.fromEntries(MEASURES.map((name) => [name, this.atlas.value(layer, head, name)]));
    showNumbers({
      layer, head, means, rows, t: this.t, controls: MEASURES.map((name) => controlOf(this.meta, layer, name)),
      visible: ranges === null ? null : ranges.stop[query] - ranges.first[query],
      received: { sum: received[token], mean: seen === null ? null : received[token] / Math.max(1, seen[token]) },
    });
  }

  showControls(state) {
    for (const field of ["layer", "head", "measure", "row"]) if (byId(field).value !== String(state[field])) byId(field).value = String(state[field]);
    for (const button of document.querySelectorAll("[data-set]")) {
      const [field, value] = button.dataset.set.split(" ");
      button.setAttribute("aria-pressed", String(state[field] === value));
    }
  }

  showAtlas(state) {
    const { t } = this;
    this.atlas.show({ measure: state.measure, layer: state.layer, head: state.head, table: this.colours, t, preview: this.preview.head });
    const at = this.preview.head ?? state;
    const value = this.atlas.value(at.layer, at.head);
    const control = controlOf(this.meta, at.layer, state.measure);
    const beside = control === null || value === undefined ? "" : ` (${t("equal", { v: digits(control) })})`;
    const name = `${t("layer")} ${at.layer} · ${t("head")} ${at.head}: ${t(state.measure)} ${value === undefined ? t("unread") : value === null ? t("undefined") : `${digits(value)} ${t(`${state.measure}_unit`)}`.trim()}${beside}`;
    say(byId("atlas-cell"), name.trim());
    byId("atlas").setAttribute("aria-label", name);
    const notes = [t("mean_over", { n: this.meta.queries }), `${t(state.measure)}: ${t(`${state.measure}_note`, { bound: digits(this.meta.bound) })}${this.language === "ja" ? "。" : "."}`];
    if (state.measure === "first_key") {
      const all = this.meta.means.first_key.flat().filter((v) => v !== null);
      const rate = (values) => percent(values.filter((v) => v > 0.3).length / Math.max(1, values.length));
      const equal = this.meta.layers.map(({ layer }) => controlOf(this.meta, layer, "first_key")).filter((v) => v !== null);
      notes.push(t("sink_rate", { p: rate(all), c: equal.length ? rate(equal) : "–" }));
    }
    if (this.meta.layers.some((info) => !info.full)) notes.push(t("atlas_partial"));
    if (this.meta.read < this.meta.layers.length) notes.push(t("layers_read", { n: this.meta.read, m: this.meta.layers.length }));
    if (this.meta.trouble) notes.push(t("layers_trouble", { reason: this.meta.trouble }));
    say(byId("atlas-note"), notes.join(" "));
    this.showAtlasTwin();
  }

  showAtlasTwin() {
    const twin = byId("atlas-twin");
    if (!twin.open) return;
    const name = `${this.store.state.measure} ${this.language}`;
    if (twin.dataset.shown === name) return;
    twin.dataset.shown = name;
    byId("atlas-table").replaceChildren(this.atlas.twin(this.t));
  }

  /** Open the chosen head's matrix if it is not open yet, and lay its margins and words around it. */
  async openMap(state, signal) {
    const { layer, head } = state;
    const [opened, coarse, ranges] = await Promise.all([this.data.head(layer, head), this.data.picture(layer, head), this.data.ranges(layer)]);
    if (signal.aborted) return;
    const name = `${layer} ${head}`;
    if (this.opened !== name || this.pictures.head !== opened) {
      this.opened = name;
      this.pictures.open(opened, coarse);
      this.margins = { received: null, receivedTop: null, row: null, rowTop: null };
    }
    this.map.show({ state, ranges, margins: this.margins, table: this.colours, scale: this.scale });
    say(byId("map-title"), `${this.t("layer")} ${layer} · ${this.t("head")} ${head}`);
    const [received, row] = await Promise.all([this.data.received(layer, head), this.data.rowStatistic(layer, head, state.row), this.showCell(this.map.hovered), this.showMapTwin(), this.microscope.show(opened, state, signal), this.compare.show(opened, state, signal), this.lesson.show(opened, state, signal)]);
    if (signal.aborted) return;
    const seen = ranges === null ? null : seenBy(ranges, this.meta.keys);
    const mean = seen && Float32Array.from(received, (sum, j) => sum / Math.max(1, seen[j]));
    this.margins = { received: mean, receivedTop: mean && largest(mean), row, rowTop: rowTop(state.row, row, ranges, this.meta.keys) };
    this.map.show({ state, ranges, margins: this.margins, table: this.colours, scale: this.scale });
    this.showMapStatus(state);
  }

  /** Why a layer's heads do not open on this page. */
  whyClosed(layer) {
    const { reason } = this.data.layer(layer);
    if (reason) return this.t("refused", { layer, reason: reason[this.language] });
    return this.t("left_out", { layer, limit: this.meta.limit_mb, command: commandFor(this.meta, layer) });
  }

  showMapStatus(state) {
    const { t, meta, pictures } = this;
    const { layer } = state;
    const status = byId("map-status");
    document.querySelector("[data-set='pool peak']").disabled = pictures.head === null; // the file holds masses only
    status.className = "note";
    if (pictures.head === null) {
      status.className = "note warn";
      say(status, this.whyClosed(layer));
    } else if (pictures.check === null) say(status, t("reading_rows"));
    else if (pictures.check.bad.length > 0) {
      status.className = "note warn";
      say(status, t("disagree", { n: pictures.check.bad.length, d: digits(pictures.check.worst) }));
    } else say(status, t("checked", { n: meta.queries, d: digits(pictures.check.worst) }));
    const block = pictures.head === null ? t("block_of", { r: Math.round(meta.queries / meta.picture.rows), c: Math.round(meta.keys / meta.picture.cols) }) : "";
    const { receivedTop, rowTop: top, row } = this.map.margins;
    const sides = [receivedTop === null ? "" : t("top_margin", { v: digits(receivedTop) }), row === null ? "" : t("left_margin", { name: t(state.row), v: digits(top) })];
    say(byId("map-note"), [...sides, t(state.pool === "mass" || pictures.head === null ? "mass_note" : "peak_note"), block].join(" "));
  }

  async showCell(hovered) {
    this.cellAsked.abort();
    this.cellAsked = new AbortController();
    const { signal } = this.cellAsked;
    const { query, key } = hovered ?? this.store.state;
    const tell = (text) => {
      say(byId("cell"), text);
      byId("map").setAttribute("aria-label", text);
    };
    const { head, check, coarse } = this.pictures;
    if (head !== null) {
      if (check?.badSet.has(query)) return tell(this.t("disagree", { n: 1, d: digits(check.worst) }));
      try {
        const cell = await head.cell(query, key, signal);
        if (!signal.aborted) tell(cellLine(cell, this.meta.tokens.labels, query, key, this.t));
      } catch (error) {
        if (!signal.aborted) this.fail(error);
      }
      return;
    }
    if (!coarse) return;
    const { rows, cols } = this.meta.picture;
    const r = Math.floor((query * rows) / this.meta.queries), c = Math.floor((key * cols) / this.meta.keys);
    const span = (at, count, whole) => [Math.ceil((at * whole) / count), Math.ceil(((at + 1) * whole) / count) - 1];
    const [a, b] = span(r, rows, this.meta.queries), [from, to] = span(c, cols, this.meta.keys);
    tell(`${this.t("of_block", { a, b, c: from, d: to })}: ${this.t("block_mass", { v: digits(coarse[r * cols + c]) })}`);
  }

  async showMapTwin() {
    if (!byId("map-twin").open) return;
    const { query, key } = this.store.state;
    const { signal } = this.asked;
    const { head } = this.pictures;
    if (head === null) {
      byId("map-table").replaceChildren(h("p", { class: "note" }, byId("map-status").textContent));
      return;
    }
    const made = await neighbours(head, query, key, this.meta.tokens.labels, this.t, signal);
    if (!signal.aborted) byId("map-table").replaceChildren(made);
  }

  /** A short word about what has just been done. */
  say(name, values) {
    say(byId("notice"), this.t(name, values));
    clearTimeout(this.noticeTimer);
    this.noticeTimer = setTimeout(() => say(byId("notice"), ""), 6000);
  }

  fail(error) {
    byId("failure").hidden = false;
    say(byId("failure"), this.t("failed", { reason: error.message }));
  }
}

/** How many queries see each key. */
function seenBy(ranges, keys) {
  const change = new Int32Array(keys + 1);
  for (let i = 0; i < ranges.first.length; i += 1) {
    if (ranges.stop[i] <= ranges.first[i]) continue;
    change[ranges.first[i]] += 1;
    change[ranges.stop[i]] -= 1;
  }
  let now = 0;
  return change.subarray(0, keys).map((by) => (now += by));
}

function rowTop(name, row, ranges, keys) {
  if (name === "entropy") {
    let most = 1;
    if (ranges === null) most = keys;
    else for (let i = 0; i < ranges.first.length; i += 1) most = Math.max(most, ranges.stop[i] - ranges.first[i]);
    return Math.log(Math.max(2, most));
  }
  if (name === "max" || name === "first_key" || name === "previous" || row === null) return 1;
  return largest(row);
}

function largest(values) {
  let top = 0;
  for (const value of values) if (value > top) top = value;
  return top || 1;
}

if (typeof document === "undefined") work(); // this script again, beside the page
else {
  const source = await openSource();
  const { model } = source.meta;
  document.title = `${model} – kizuki`;
  say(byId("model"), model);
  globalThis.kizukiPage = new Page(source); // for people at the console, and for the tests
  globalThis.kizukiPage.visibleLabel = visibleLabel;
}
