// The text, token by token, painted with the weights of one reading; a rail beside it shows all of it at once.
import { byId, h, perFrame, sizeCanvas, visibleLabel } from "./dom.js";
import { Scroller, blocksOf } from "./blocks.js";
import { cssColour, inkOn } from "./colour.js";

export class TextPanel {
  /** on: { hover(token | null), choose(token, how), drag(from, to) }; how: "only", "toggle", "extend", "other" */
  constructor(units, on) {
    this.on = on;
    this.list = byId("tokens");
    this.rail = byId("rail");
    this.spans = new Map(); // unit -> its element, of those that are in the document
    this.painted = [];
    this.tones = new Map(); // unit -> place in the colour map
    this.marked = { selected: new Set() };
    this.found = new Set();
    this.scroller = new Scroller(this.list, { make: (block) => this.make(block), drop: (block) => this.drop(block) });
    this.listen();
    this.drawRail = perFrame(() => this.paintRail());
    this.show(units);
    new ResizeObserver(() => this.drawRail()).observe(this.list);
  }

  /** Show the text as these units; what was painted and marked has to be painted and marked again. */
  show(units) {
    if (units === this.units) return;
    this.units = units;
    this.bounds = blocksOf(units);
    this.spans.clear();
    this.painted = [];
    this.tones.clear();
    this.marked = { selected: new Set() };
    this.found = new Set();
    const { texts, gaps } = units;
    const lengths = this.bounds.slice(1).map((stop, block) => {
      let letters = 1;
      for (let unit = this.bounds[block]; unit < stop; unit += 1) letters += texts[unit].length + gaps[unit].length;
      return letters;
    });
    this.scroller.show(lengths, this.bounds);
    this.drawRail();
  }

  /** A block's element. What stands before its first token is the end of the block before it, for it may end its line. */
  make(block) {
    const { texts, gaps, chips, labels, starts, tail } = this.units;
    const first = this.bounds[block], stop = this.bounds[block + 1], whole = h("div", { role: "none" });
    if (first === 0) whole.append(gaps[0]);
    for (let unit = first; unit < stop; unit += 1) {
      const [kind, shown] = look(labels[unit], texts[unit], chips[unit]);
      const span = h("span", { id: `t${starts[unit]}`, role: "option" }, shown);
      if (chips[unit] || shown.trim() === "") span.setAttribute("aria-label", visibleLabel(labels[unit]));
      if (!this.scroller.whole) for (const [name, value] of [["posinset", unit + 1], ["setsize", starts.length]]) span.setAttribute(`aria-${name}`, value);
      Object.assign(span, { token: starts[unit], kind });
      this.spans.set(unit, span);
      this.dress(unit, span);
      this.tint(unit, span);
      whole.append(span, unit + 1 < starts.length ? gaps[unit + 1] : tail);
    }
    return whole;
  }

  drop(block) {
    for (let unit = this.bounds[block]; unit < this.bounds[block + 1]; unit += 1) this.spans.delete(unit);
    this.painted = this.painted.filter((span) => span.isConnected);
  }

  /** The element of a token, or undefined while it is far from the view. */
  span(token) {
    return this.spans.get(this.units.of[token]);
  }

  listen() {
    const tokenAt = (event) => (event.target.token === undefined ? null : event.target.token);
    let over = null, from = null, dragged = false;
    this.list.addEventListener("pointerdown", (event) => {
      dragged = false;
      from = event.pointerType === "touch" || event.button !== 0 ? null : tokenAt(event);
    });
    this.list.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch") return;
      const token = tokenAt(event);
      if (from !== null && (event.buttons & 1) === 0) from = null; // let go outside
      if (from !== null) {
        if (token === null || (token === from && !dragged) || token === over) return;
        dragged = true;
        over = token;
        this.on.drag(from, token);
      } else if (token !== over) this.on.hover((over = token));
    });
    this.list.addEventListener("pointerleave", () => this.on.hover((over = null)));
    this.list.addEventListener("click", (event) => {
      const token = tokenAt(event);
      if (token === null || dragged) return;
      this.on.choose(token, event.altKey ? "other" : event.shiftKey ? "extend" : event.ctrlKey || event.metaKey ? "toggle" : "only");
    });
    this.list.addEventListener("focus", () => { // reached by keyboard: it begins where the selection is
      if (this.chosen !== undefined && this.list.matches(":focus-visible")) this.reveal(this.chosen);
    });
    this.rail.addEventListener("pointerdown", (event) => {
      const share = event.offsetY / this.rail.clientHeight;
      this.list.scrollTop = share * this.list.scrollHeight - this.list.clientHeight / 2;
    });
    this.list.addEventListener("scroll", () => {
      this.pointOut();
      this.drawRail();
    }, { passive: true });
  }

  /** The token one line up (by = -1) or down (by = 1) from `token`, nearest to it sideways. */
  neighbourLine(token, by) {
    this.scroller.bring(this.units.of[token]);
    const from = this.span(token).getBoundingClientRect();
    const middle = from.left + from.width / 2;
    let best = token, bestGap = Infinity, line = null;
    for (let unit = this.units.of[token] + by; this.spans.has(unit); unit += by) {
      const box = this.spans.get(unit).getBoundingClientRect();
      if (Math.abs(box.top - from.top) < 4) continue;
      if (line === null) line = box.top;
      if (Math.abs(box.top - line) > 4) break;
      const gap = Math.abs(box.left + box.width / 2 - middle);
      if (gap < bestGap) [best, bestGap] = [this.units.starts[unit], gap];
    }
    return best;
  }

  /** Paint `entries` [{ token, weight }] with `scale`; everything else is left unpainted. */
  paint(entries, scale, table) {
    for (const span of this.painted) {
      span.style.backgroundColor = "";
      span.style.color = "";
    }
    this.painted = [];
    this.tones.clear();
    this.table = table;
    for (const { token, weight } of entries) {
      const t = scale.at(weight);
      if (t > 0) this.tones.set(this.units.of[token], t);
    }
    for (const [unit, span] of this.spans) this.tint(unit, span);
    this.drawRail();
  }

  tint(unit, span) {
    const t = this.tones.get(unit);
    if (t === undefined) return;
    span.style.backgroundColor = cssColour(this.table, t);
    span.style.color = inkOn(this.table, t);
    this.painted.push(span);
  }

  /** Outline the locked query and key, the tokens selected together, and the previewed token. */
  mark({ query, key, preview, chosen, selected }) {
    const { of } = this.units;
    this.marked = {
      query: of[query], key: of[key], preview: preview === null ? null : of[preview],
      several: selected.length > 1, selected: new Set(selected.map((token) => of[token])),
    };
    this.chosen = chosen;
    this.dressAll();
    this.pointOut();
    this.drawRail();
  }

  setFound(tokens) {
    this.found = new Set(tokens.map((token) => this.units.of[token]));
    this.dressAll();
  }

  dressAll() {
    for (const [unit, span] of this.spans) this.dress(unit, span);
  }

  /** A unit's classes, and whether it is selected; set only where they change. */
  dress(unit, span) {
    const { query, key, preview, selected, several } = this.marked, chosen = selected.has(unit);
    let name = span.kind;
    if (unit === query) name += " query";
    if (unit === key) name += " key";
    if (unit === preview) name += " preview";
    if (several && chosen) name += " several";
    if (this.found.has(unit)) name += " found";
    if (span.className !== name) span.className = name;
    if (span.getAttribute("aria-selected") !== String(chosen)) span.setAttribute("aria-selected", chosen);
  }

  /** Name the chosen token as the active one, while it is in the document. */
  pointOut() {
    const span = this.chosen === undefined ? undefined : this.span(this.chosen);
    if (span === undefined) this.list.removeAttribute("aria-activedescendant");
    else if (this.list.getAttribute("aria-activedescendant") !== span.id) this.list.setAttribute("aria-activedescendant", span.id);
  }

  reveal(token) {
    this.scroller.bring(this.units.of[token]);
    const { offsetTop: top, offsetHeight: tall } = this.span(token);
    const { scrollTop, clientHeight } = this.list;
    if (top < scrollTop + 8 || top + tall > scrollTop + clientHeight - 8) this.list.scrollTop = top - clientHeight / 3;
  }

  /** All of the text in small: of each line of pixels the largest weight, the chosen token, and the part that is seen. */
  paintRail() {
    const { clientWidth: width, clientHeight: height } = this.rail.parentElement;
    if (width === 0 || height === 0) return;
    const context = sizeCanvas(this.rail, width, height);
    context.clearRect(0, 0, width, height);
    const whole = this.list.scrollHeight;
    const bar = (unit) => {
      const span = this.spans.get(unit);
      return Math.floor(((span ? span.offsetTop : this.scroller.placeOf(unit)) / whole) * height);
    };
    const tall = Math.max(2, Math.round((26 / whole) * height)); // a line of text
    const lines = new Float32Array(height);
    for (const [unit, t] of this.tones) {
      const y = bar(unit);
      for (let line = y; line < Math.min(height, y + tall); line += 1) if (t > lines[line]) lines[line] = t;
    }
    lines.forEach((t, y) => {
      if (t === 0) return;
      context.fillStyle = cssColour(this.table, t);
      context.fillRect(0, y, width - 4, 1);
    });
    const style = getComputedStyle(this.rail);
    context.fillStyle = style.color;
    if (this.chosen !== undefined) context.fillRect(width - 4, bar(this.units.of[this.chosen]), 4, 3);
    context.strokeStyle = style.color;
    context.globalAlpha = 0.5;
    context.strokeRect(0.5, (this.list.scrollTop / whole) * height + 0.5, width - 1, (this.list.clientHeight / whole) * height - 1);
    context.globalAlpha = 1;
  }
}

/** Class and text of a token. Of a character cut into pieces the first piece shows it, the others their number. */
function look(label, text, chip) {
  if (chip === "special") return ["t chip", visibleLabel(label)];
  if (chip === "piece" && text === "") return ["t piece", /(\d+)\/\d+$/.exec(label)?.[1] ?? "·"];
  return ["t", text === "" ? "∅" : text.replace(/\n/g, "⏎\n")];
}
