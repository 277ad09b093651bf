// The text, token by token, painted with the weights of one reading; a rail beside it shows all of it at once.
import { byId, h, perFrame, sizeCanvas, visibleLabel } from "./dom.js";
import { cssColour, inkOn } from "./colour.js";

export class TextPanel {
  /** on: { hover(token | null), choose(token, how), drag(from, to) }; how: "only", "toggle", "extend", "other" */
  constructor(units, on) {
    this.on = on;
    this.list = byId("tokens");
    this.rail = byId("rail");
    this.painted = [];
    this.weights = new Map();
    this.listen();
    this.drawRail = perFrame(() => this.paintRail());
    this.show(units);
    new ResizeObserver(() => this.drawRail()).observe(this.list);
  }

  /** Show the text as these units; what was painted has to be painted again. */
  show(units) {
    if (units === this.units) return;
    this.units = units;
    const { texts, gaps, chips, labels, starts } = units;
    this.spans = starts.map((first, unit) => {
      const [kind, shown] = look(labels[unit], texts[unit], chips[unit]);
      const span = h("span", { class: kind, id: `t${first}`, role: "option", "aria-selected": "false" }, shown);
      if (chips[unit] || shown.trim() === "") span.setAttribute("aria-label", visibleLabel(labels[unit]));
      span.token = first;
      return span;
    });
    const whole = document.createDocumentFragment(); // one by one: 100,000 are too many for one call's arguments
    for (const [unit, span] of this.spans.entries()) whole.append(gaps[unit], span);
    whole.append(units.tail);
    this.list.replaceChildren(whole);
    this.painted = [];
    this.weights.clear();
    this.drawRail();
  }

  span(token) {
    return this.spans[this.units.of[token]];
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
    this.rail.addEventListener("pointerdown", (event) => {
      const share = event.offsetY / this.rail.clientHeight;
      this.list.scrollTop = share * this.list.scrollHeight - this.list.clientHeight / 2;
    });
    this.list.addEventListener("scroll", () => this.drawRail(), { passive: true });
  }

  /** The token one line up (by = -1) or down (by = 1) from `token`, nearest to it sideways. */
  neighbourLine(token, by) {
    const from = this.span(token).getBoundingClientRect();
    const middle = from.left + from.width / 2;
    let best = token, bestGap = Infinity, line = null;
    for (let unit = this.units.of[token] + by; unit >= 0 && unit < this.spans.length; unit += by) {
      const box = this.spans[unit].getBoundingClientRect();
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
    this.weights.clear();
    for (const { token, weight } of entries) {
      const t = scale.at(weight);
      if (!(t > 0)) continue;
      const span = this.span(token);
      span.style.backgroundColor = cssColour(table, t);
      span.style.color = inkOn(table, t);
      this.painted.push(span);
      this.weights.set(token, t);
    }
    this.table = table;
    this.drawRail();
  }

  /** Outline the locked query and key, the tokens selected together, and the previewed token. */
  mark({ query, key, preview, chosen, selected }) {
    for (const name of ["query", "key", "preview", "several"]) {
      for (const old of this.list.querySelectorAll(`.${name}`)) old.classList.remove(name);
    }
    for (const old of this.list.querySelectorAll("[aria-selected=true]")) old.setAttribute("aria-selected", "false");
    this.span(query).classList.add("query");
    this.span(key).classList.add("key");
    if (preview !== null) this.span(preview).classList.add("preview");
    for (const token of selected) {
      this.span(token).setAttribute("aria-selected", "true");
      if (selected.length > 1) this.span(token).classList.add("several");
    }
    this.list.setAttribute("aria-activedescendant", this.span(chosen).id);
    this.chosen = chosen;
    this.drawRail();
  }

  reveal(token) {
    const span = this.span(token);
    const top = span.offsetTop - this.list.offsetTop;
    const { scrollTop, clientHeight } = this.list;
    if (top < scrollTop + 8 || top + span.offsetHeight > scrollTop + clientHeight - 8) this.list.scrollTop = top - clientHeight / 3;
  }

  setFound(tokens) {
    for (const old of this.list.querySelectorAll(".found")) old.classList.remove("found");
    for (const i of tokens) this.span(i).classList.add("found");
  }

  paintRail() {
    const { clientWidth: width, clientHeight: height } = this.rail.parentElement;
    if (width === 0 || height === 0) return;
    const context = sizeCanvas(this.rail, width, height);
    context.clearRect(0, 0, width, height);
    const whole = this.list.scrollHeight;
    const ordered = [...this.weights].sort((a, b) => a[1] - b[1]); // the largest weight on top
    const bar = (token) => {
      const span = this.span(token);
      return [((span.offsetTop - this.list.offsetTop) / whole) * height, Math.max(2, (span.offsetHeight / whole) * height)];
    };
    for (const [token, t] of ordered) {
      const [y, tall] = bar(token);
      context.fillStyle = cssColour(this.table, t);
      context.fillRect(0, y, width - 4, tall);
    }
    const style = getComputedStyle(this.rail);
    context.fillStyle = style.color;
    if (this.chosen !== undefined) context.fillRect(width - 4, bar(this.chosen)[0], 4, 3);
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
