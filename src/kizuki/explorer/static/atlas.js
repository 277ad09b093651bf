// The overview: one cell a head, layers to the right, heads downwards, coloured by a chosen measure.
import { byId, cssVariable, h, legend, perFrame, sizeCanvas } from "./dom.js";
import { cssColour } from "./colour.js";
import { digits } from "./reading.js";

const FROM_ZERO_TO_ONE = new Set(["max", "first_key", "previous"]);

/** The value that gets the last colour: a bound where the measure has one, else the largest there is. */
export function measureTop(meta, measure) {
  if (FROM_ZERO_TO_ONE.has(measure)) return 1;
  if (measure === "entropy" && meta.bound > 0) return meta.bound;
  let top = 0;
  for (const row of meta.means[measure]) for (const value of row) if (value !== null && value > top) top = value;
  return top > 0 ? top : 1;
}

export class Atlas {
  /** on: { hover({layer, head} | null), choose({layer, head}) } */
  constructor(meta, on) {
    this.meta = meta;
    this.on = on;
    this.canvas = byId("atlas");
    this.measure = "entropy";
    this.draw = perFrame(() => this.paint());
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    this.listen();
  }

  listen() {
    let over = "";
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch") return;
      const cell = this.cellAt(event);
      const name = cell ? `${cell.layer} ${cell.head}` : "";
      if (name !== over) {
        over = name;
        this.on.hover(cell);
      }
    });
    this.canvas.addEventListener("pointerleave", () => {
      over = "";
      this.on.hover(null);
    });
    this.canvas.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) this.on.choose(cell);
    });
  }

  geometry() {
    const left = 26, top = 4, bottom = 18;
    const columns = this.meta.layers.length, rows = this.meta.heads.length;
    const width = this.canvas.parentElement.clientWidth;
    const cellWidth = Math.max(5, Math.min(44, (width - left - 2) / columns));
    const cellHeight = Math.max(8, Math.min(28, Math.max(cellWidth * 0.8, 15), 320 / rows));
    return { left, top, bottom, columns, rows, cellWidth, cellHeight, width: left + columns * cellWidth + 2, height: top + rows * cellHeight + bottom };
  }

  cellAt(event) {
    const g = this.geometry();
    const column = Math.floor((event.offsetX - g.left) / g.cellWidth);
    const row = Math.floor((event.offsetY - g.top) / g.cellHeight);
    if (column < 0 || row < 0 || column >= g.columns || row >= g.rows) return null;
    return { layer: this.meta.layers[column].layer, head: this.meta.heads[row] };
  }

  /** null: not defined here; undefined: not read yet, where Python reads while the page is open. */
  value(layer, head, measure = this.measure) {
    if (this.meta.done && !this.meta.done.includes(layer)) return undefined;
    const column = this.meta.layers.findIndex((info) => info.layer === layer);
    return this.meta.means[measure][column][this.meta.heads.indexOf(head)];
  }

  show({ measure, layer, head, table, t, preview }) {
    Object.assign(this, { measure, layer, head, table, t, preview });
    const top = measureTop(this.meta, measure);
    const unit = t(`${measure}_unit`);
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((place) => [place, digits(place * top) + (place === 1 && unit ? ` ${unit}` : "")]);
    this.ticks = ticks;
    byId("atlas-legend").replaceChildren(legend(table, ticks, t(measure)));
    this.draw();
  }

  paint(given = null) {
    const g = this.geometry();
    const context = given ?? sizeCanvas(this.canvas, g.width, g.height);
    const ink = cssVariable("--muted");
    const top = measureTop(this.meta, this.measure);
    context.clearRect(0, 0, g.width, g.height);
    context.font = "11px system-ui, sans-serif";
    for (let column = 0; column < g.columns; column += 1) {
      const info = this.meta.layers[column];
      for (let row = 0; row < g.rows; row += 1) {
        const value = this.meta.means[this.measure][column][row];
        const x = g.left + column * g.cellWidth, y = g.top + row * g.cellHeight;
        const w = g.cellWidth - 1, tall = g.cellHeight - 1;
        if (value === null) {
          context.strokeStyle = ink;
          context.strokeRect(x + 0.5, y + 0.5, w - 1, tall - 1);
          continue;
        }
        context.fillStyle = cssColour(this.table, value / top);
        context.beginPath();
        const cut = info.full ? 0 : Math.min(w, tall) * 0.45; // q and k are not in the file
        context.moveTo(x, y);
        context.lineTo(x + w - cut, y);
        context.lineTo(x + w, y + cut);
        context.lineTo(x + w, y + tall);
        context.lineTo(x, y + tall);
        context.fill();
      }
    }
    this.paintLabels(context, g, ink);
    this.outline(context, g, { layer: this.layer, head: this.head }, cssVariable("--accent"), 2.5);
    if (this.preview) this.outline(context, g, this.preview, cssVariable("--ink"), 1.5);
  }

  paintLabels(context, g, ink) {
    context.fillStyle = ink;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const rowStep = Math.ceil(12 / g.cellHeight);
    for (let row = 0; row < g.rows; row += rowStep) context.fillText(String(this.meta.heads[row]), g.left - 5, g.top + (row + 0.5) * g.cellHeight);
    context.textAlign = "center";
    context.textBaseline = "top";
    const columnStep = Math.ceil(20 / g.cellWidth);
    for (let column = 0; column < g.columns; column += columnStep) {
      context.fillText(String(this.meta.layers[column].layer), g.left + (column + 0.5) * g.cellWidth, g.top + g.rows * g.cellHeight + 3);
    }
  }

  outline(context, g, { layer, head }, colour, width) {
    const column = this.meta.layers.findIndex((info) => info.layer === layer);
    const row = this.meta.heads.indexOf(head);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(g.left + column * g.cellWidth - 0.5, g.top + row * g.cellHeight - 0.5, g.cellWidth, g.cellHeight);
    context.lineWidth = 1;
  }

  /** The same numbers as a table: a row for each layer, a column for each head. */
  twin(t) {
    const head = h("tr", {}, h("th", { scope: "col" }, t("layer")), ...this.meta.heads.map((n) => h("th", { scope: "col" }, String(n))));
    const rows = this.meta.layers.map((info, column) => h("tr", {}, h("th", { scope: "row" }, String(info.layer)),
      ...this.meta.means[this.measure][column].map((value) => h("td", {}, digits(value)))));
    return h("table", { class: "numbers" }, h("caption", {}, `${t(this.measure)}${t(`${this.measure}_unit`) ? ` (${t(`${this.measure}_unit`)})` : ""}`), h("thead", {}, head), h("tbody", {}, ...rows));
  }
}
