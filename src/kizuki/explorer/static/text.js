// The text, token by token, painted with the weights of one reading; a rail beside it shows all of it at once.
import { byId, h, perFrame, sizeCanvas, visibleLabel } from "./dom.js";
import { cssColour, inkOn } from "./colour.js";

export class TextPanel {
  /** on: { hover(token | null), choose(token), move(from, "up" | "down" | ...) } */
  constructor(tokens, on) {
    this.tokens = tokens;
    this.on = on;
    this.list = byId("tokens");
    this.rail = byId("rail");
    this.painted = [];
    this.weights = new Map();
    this.spans = [];
    this.build();
    this.listen();
    this.drawRail = perFrame(() => this.paintRail());
    new ResizeObserver(() => this.drawRail()).observe(this.list);
  }

  build() {
    const { labels, texts, gaps, chips, tail } = this.tokens;
    const parts = [];
    for (let i = 0; i < labels.length; i += 1) {
      if (gaps[i]) parts.push(gaps[i]);
      const [kind, shown] = look(labels[i], texts[i], chips[i]);
      const span = h("span", { class: kind, id: `t${i}`, role: "option", "aria-selected": "false" }, shown);
      if (chips[i]) span.setAttribute("aria-label", labels[i]);
      span.token = i;
      this.spans.push(span);
      parts.push(span);
    }
    if (tail) parts.push(tail);
    this.list.replaceChildren(...parts);
  }

  listen() {
    const tokenAt = (event) => (event.target.token === undefined ? null : event.target.token);
    let over = null;
    this.list.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch") return;
      const token = tokenAt(event);
      if (token !== over) this.on.hover((over = token));
    });
    this.list.addEventListener("pointerleave", () => this.on.hover((over = null)));
    this.list.addEventListener("click", (event) => {
      const token = tokenAt(event);
      if (token !== null) this.on.choose(token, event.shiftKey);
    });
    this.rail.addEventListener("pointerdown", (event) => {
      const share = event.offsetY / this.rail.clientHeight;
      this.list.scrollTop = share * this.list.scrollHeight - this.list.clientHeight / 2;
    });
    this.list.addEventListener("scroll", () => this.drawRail(), { passive: true });
  }

  /** The token one line up (by = -1) or down (by = 1) from `token`, nearest to it sideways. */
  neighbourLine(token, by) {
    const from = this.spans[token].getBoundingClientRect();
    const middle = from.left + from.width / 2;
    let best = token, bestGap = Infinity, line = null;
    for (let i = token + by; i >= 0 && i < this.spans.length; i += by) {
      const box = this.spans[i].getBoundingClientRect();
      if (Math.abs(box.top - from.top) < 4) continue;
      if (line === null) line = box.top;
      if (Math.abs(box.top - line) > 4) break;
      const gap = Math.abs(box.left + box.width / 2 - middle);
      if (gap < bestGap) [best, bestGap] = [i, gap];
    }
    return best;
  }

  /** Paint `entries` [{ token, weight }] with `scale`; everything else is left unpainted. */
  paint(entries, scale, table) {
    for (const i of this.painted) {
      this.spans[i].style.backgroundColor = "";
      this.spans[i].style.color = "";
    }
    this.painted = [];
    this.weights.clear();
    for (const { token, weight } of entries) {
      const t = scale.at(weight);
      if (!(t > 0)) continue;
      const span = this.spans[token];
      span.style.backgroundColor = cssColour(table, t);
      span.style.color = inkOn(table, t);
      this.painted.push(token);
      this.weights.set(token, t);
    }
    this.table = table;
    this.drawRail();
  }

  /** Outline the locked query and key, and the previewed token. */
  mark({ query, key, preview, direction }) {
    for (const name of ["query", "key", "preview"]) {
      for (const old of this.list.querySelectorAll(`.${name}`)) old.classList.remove(name);
    }
    const chosen = direction === "reads" ? query : key;
    this.spans[query].classList.add("query");
    this.spans[key].classList.add("key");
    if (preview !== null) this.spans[preview].classList.add("preview");
    const old = this.list.querySelector("[aria-selected=true]");
    if (old) old.setAttribute("aria-selected", "false");
    this.spans[chosen].setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", `t${chosen}`);
    this.chosen = chosen;
    this.drawRail();
  }

  reveal(token) {
    const span = this.spans[token];
    const top = span.offsetTop - this.list.offsetTop;
    const { scrollTop, clientHeight } = this.list;
    if (top < scrollTop + 8 || top + span.offsetHeight > scrollTop + clientHeight - 8) this.list.scrollTop = top - clientHeight / 3;
  }

  setFound(tokens) {
    for (const old of this.list.querySelectorAll(".found")) old.classList.remove("found");
    for (const i of tokens) this.spans[i].classList.add("found");
  }

  paintRail() {
    const { clientWidth: width, clientHeight: height } = this.rail.parentElement;
    if (width === 0 || height === 0) return;
    const context = sizeCanvas(this.rail, width, height);
    context.clearRect(0, 0, width, height);
    const whole = this.list.scrollHeight;
    const ordered = [...this.weights].sort((a, b) => a[1] - b[1]); // the largest weight on top
    const bar = (token) => {
      const span = this.spans[token];
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
