// Signed numbers as strips of colour: a row a vector, a column a dimension, each row with the end of its scale.
import { byId, cssVariable, perFrame, sizeCanvas } from "./dom.js";
import { signedColour } from "./colour.js";

const LEFT = 76, RIGHT = 62, TALL = 22, GAP = 6;

export class Strips {
  /** on.point(place | null): the pointer, or the arrow keys, are at a dimension. */
  constructor(id, on) {
    this.canvas = byId(id);
    this.on = on;
    this.at = null;
    this.rows = [];
    this.draw = perFrame(() => this.paint(sizeCanvas(this.canvas, this.width(), this.height())));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    this.canvas.addEventListener("pointermove", (event) => this.point(this.placeAt(event)));
    this.canvas.addEventListener("pointerdown", (event) => this.point(this.placeAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined || this.rows.length === 0) return;
      this.point(Math.max(0, Math.min(this.count - 1, (this.at ?? (step > 0 ? -1 : this.count)) + step)));
      event.preventDefault();
      event.stopPropagation();
    });
  }

  /** rows: [{ name, values, top, end }]: signed, `top` the end of the colour scale on both sides; or with
      colour(value), where null leaves a place unpainted, instead of `top`. */
  show(rows, table) {
    this.rows = rows;
    this.table = table;
    this.count = Math.max(0, ...rows.map(({ values }) => values.length));
    if (this.at !== null && this.at >= this.count) this.at = null;
    this.draw();
  }

  width() {
    return Math.max(160, this.canvas.parentElement.clientWidth);
  }

  height() {
    return Math.max(1, this.rows.length) * (TALL + GAP);
  }

  placeAt(event) {
    const cell = (this.width() - LEFT - RIGHT) / this.count;
    const place = Math.floor((event.offsetX - LEFT) / cell);
    return place >= 0 && place < this.count ? place : null;
  }

  point(place) {
    if (place === this.at) return;
    this.at = place;
    this.on.point(place);
    this.draw();
  }

  paint(context) {
    const wide = this.width() - LEFT - RIGHT;
    context.clearRect(0, 0, this.width(), this.height());
    context.font = "12px system-ui, 'Noto Sans CJK JP', sans-serif";
    context.textBaseline = "middle";
    this.rows.forEach(({ name, values, top, end, colour = (value) => signedColour(this.table, value / top) }, at) => {
      const y = at * (TALL + GAP), cell = wide / values.length;
      const columns = Math.min(values.length, Math.floor(wide)); // more numbers than pixels: the largest size of each pixel
      for (let c = 0; c < columns; c += 1) {
        let value = 0;
        const stop = Math.floor(((c + 1) * values.length) / columns);
        for (let i = Math.floor((c * values.length) / columns); i < stop; i += 1) if (Math.abs(values[i]) > Math.abs(value)) value = values[i];
        const fill = colour(value);
        if (fill === null) continue;
        context.fillStyle = fill;
        context.fillRect(LEFT + (c * wide) / columns, y, Math.max(wide / columns - (cell > 5 ? 1 : 0), 1), TALL);
      }
      context.strokeStyle = cssVariable("--line");
      context.strokeRect(LEFT - 0.5, y + 0.5, wide + 1, TALL - 1);
      context.fillStyle = cssVariable("--ink");
      context.textAlign = "right";
      context.fillText(name, LEFT - 6, y + TALL / 2);
      context.textAlign = "left";
      context.fillStyle = cssVariable("--muted");
      context.fillText(end, LEFT + wide + 6, y + TALL / 2);
      if (this.at !== null && this.at < values.length) {
        context.strokeStyle = cssVariable("--ink");
        context.lineWidth = 2;
        context.strokeRect(LEFT + this.at * cell, y, Math.max(cell, 2), TALL);
        context.lineWidth = 1;
      }
    });
  }
}
