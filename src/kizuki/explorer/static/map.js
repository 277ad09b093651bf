// The matrix of one head as a picture to pan and zoom: queries downwards, keys to the right, with the
// weight each key received on top and a statistic of each row on the left.
import { byId, cssVariable, perFrame, sizeCanvas, visibleLabel } from "./dom.js";
import { TILE } from "./levels.js";
import { attachGestures } from "./gestures.js";

const SMALLEST_VIEW = 6; // cells across at the closest zoom
const NAMED = 12; // pixels a cell from which on tokens have their names beside it

export class MatrixMap {
  /** on: { hover({query, key} | null), choose({query, key}), view(text) } ; pictures: Pictures */
  constructor(meta, pictures, on) {
    this.meta = meta;
    this.pictures = pictures;
    this.on = on;
    this.canvas = byId("map");
    this.cells = Math.max(meta.queries, meta.keys);
    this.view = { x: 0, y: 0, size: this.cells }; // in cells: left key, top query, cells across
    this.hovered = null;
    this.mini = null; // where the whole matrix stands in small, while only a part is seen
    this.draw = perFrame(() => this.paint());
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    attachGestures(this);
  }

  /** What to draw: { state, ranges, margins { received, receivedTop, row, rowTop }, table, scale }. */
  show(what) {
    const restyled = what.table !== this.table || what.scale !== this.scale || what.ranges !== this.ranges;
    Object.assign(this, what);
    if (restyled) this.pictures.painted.clear();
    this.draw();
  }

  geometry() {
    const width = this.canvas.parentElement.clientWidth;
    const narrow = width < 420;
    const left = narrow ? 56 : 88, top = narrow ? 52 : 66, margin = narrow ? 22 : 34;
    const tallest = Math.max(220, Math.min(900, window.innerHeight * 0.78 - top - margin));
    const side = Math.max(120, Math.min(width - left - margin - 14, tallest));
    return { left, top, margin, side, x0: left + margin, y0: top + margin, width: left + margin + side + 14, height: top + margin + side + 4 };
  }

  get cellSize() {
    return this.geometry().side / this.view.size;
  }

  /** Screen place -> cell; beside the picture, on the tokens' names, their query or key with the chosen other one;
      null anywhere else. */
  cellAt(x, y, names = false) {
    const g = this.geometry();
    if (names && this.cellSize >= NAMED && !this.overMini(x, y)) {
      const key = Math.floor(this.view.x + (x - g.x0) / this.cellSize), query = Math.floor(this.view.y + (y - g.y0) / this.cellSize);
      if (y < g.top && x >= g.x0 && x < g.x0 + g.side && key < this.meta.keys) return { query: this.state.query, key };
      if (x < g.left && y >= g.y0 && y < g.y0 + g.side && query < this.meta.queries) return { query, key: this.state.key };
    }
    if (x < g.x0 || y < g.y0 || x >= g.x0 + g.side || y >= g.y0 + g.side) return null;
    const key = Math.floor(this.view.x + (x - g.x0) / this.cellSize);
    const query = Math.floor(this.view.y + (y - g.y0) / this.cellSize);
    if (key < 0 || query < 0 || key >= this.meta.keys || query >= this.meta.queries) return null;
    return { query, key };
  }

  setView(x, y, size) {
    const limited = Math.max(Math.min(SMALLEST_VIEW, this.cells), Math.min(this.cells, size));
    const within = (value) => Math.max(0, Math.min(this.cells - limited, value));
    this.view = { x: within(x), y: within(y), size: limited };
    this.on.view(this.viewText());
    this.canvas.style.touchAction = limited < this.cells ? "none" : "pan-y";
    this.draw();
  }

  /** The view for the URL, empty for the whole matrix; and back. */
  viewText() {
    const { x, y, size } = this.view;
    return size >= this.cells ? "" : [x, y, size].map((n) => Number(n.toFixed(2))).join("_");
  }

  restore(text) {
    if (text === this.viewText()) return;
    if (text === "") this.fit();
    else this.setView(...text.split("_").map(Number));
  }

  /** Move the view by parts of itself. */
  pan(right, down) {
    const { x, y, size } = this.view;
    this.setView(x + right * size, y + down * size, size);
  }

  /** A place on the small picture of the whole: the view goes there. */
  overMini(x, y) {
    const m = this.mini;
    return m !== null && x >= m.x && y >= m.y && x < m.x + m.side && y < m.y + m.side;
  }

  goMini(x, y) {
    const m = this.mini, { size } = this.view;
    this.setView(((x - m.x) / m.side) * this.cells - size / 2, ((y - m.y) / m.side) * this.cells - size / 2, size);
  }

  /** Zoom by `factor` (> 1 is closer) around a screen place, or around the chosen cell. */
  zoom(factor, x = null, y = null) {
    const g = this.geometry();
    const size = Math.max(Math.min(SMALLEST_VIEW, this.cells), Math.min(this.cells, this.view.size / factor));
    if (x === null) {
      this.setView(this.state.key + 0.5 - size / 2, this.state.query + 0.5 - size / 2, size);
      return;
    }
    const u = (x - g.x0) / g.side, v = (y - g.y0) / g.side;
    this.setView(this.view.x + u * (this.view.size - size), this.view.y + v * (this.view.size - size), size);
  }

  fit() {
    this.setView(0, 0, this.cells);
  }

  /** Bring the chosen cell into view after it moved. */
  follow() {
    const { x, y, size } = this.view;
    const { query, key } = this.state;
    const into = (start, at) => (at < start || at >= start + size ? at + 0.5 - size / 2 : start);
    this.setView(into(x, key), into(y, query), size);
  }

  paint(given = null) {
    if (!this.state) return;
    const g = this.geometry();
    const context = given ?? sizeCanvas(this.canvas, g.width, g.height);
    context.clearRect(0, 0, g.width, g.height);
    this.paintGround(context, g);
    context.save();
    context.beginPath();
    context.rect(g.x0, g.y0, g.side, g.side);
    context.clip();
    context.imageSmoothingEnabled = false;
    this.paintPicture(context, g);
    this.paintCross(context, g);
    context.restore();
    this.paintMargins(context, g);
    this.paintLabels(context, g);
    this.paintMini(context, g);
    context.strokeStyle = cssVariable("--line");
    context.strokeRect(g.x0 - 0.5, g.y0 - 0.5, g.side + 1, g.side + 1);
  }

  /** A quiet hatch: what stays hatched is not visible to its query (or not drawn). */
  paintGround(context, g) {
    const hatch = document.createElement("canvas");
    hatch.width = hatch.height = 8;
    const c = hatch.getContext("2d");
    c.fillStyle = cssVariable("--hatch0");
    c.fillRect(0, 0, 8, 8);
    c.strokeStyle = cssVariable("--hatch1");
    c.beginPath();
    for (const shift of [-8, 0, 8]) {
      c.moveTo(shift, 8);
      c.lineTo(shift + 8, 0);
    }
    c.stroke();
    context.fillStyle = context.createPattern(hatch, "repeat");
    context.fillRect(g.x0, g.y0, g.side, g.side);
  }

  place(g, x, y, wide, tall) {
    const cell = this.cellSize;
    return [g.x0 + (x - this.view.x) * cell, g.y0 + (y - this.view.y) * cell, wide * cell, tall * cell];
  }

  /** Colours one pixel of blocks of blockRows x blockCols cells that starts at (row0, col0). */
  pixelPainter(row0, col0, blockRows, blockCols) {
    const { first, stop } = this.ranges ?? { first: null, stop: null };
    const { table, scale } = this;
    const limits = new Map();
    const limitsOf = (r) => {
      if (!limits.has(r)) {
        let low = Infinity, high = 0;
        const end = Math.min(this.meta.queries, Math.ceil(row0 + (r + 1) * blockRows));
        for (let i = Math.floor(row0 + r * blockRows); i < end; i += 1) {
          if (stop[i] <= first[i]) continue;
          low = Math.min(low, first[i]);
          high = Math.max(high, stop[i]);
        }
        limits.set(r, [low, high]);
      }
      return limits.get(r);
    };
    return (bytes, at, value, r, c) => {
      if (value !== value) return; // refused, or not computed yet
      if (first !== null) {
        const [low, high] = limitsOf(r);
        if (col0 + c * blockCols >= high || col0 + (c + 1) * blockCols <= low) return;
      }
      const step = 3 * Math.round(255 * Math.min(1, scale.at(value)));
      bytes[at] = table[step];
      bytes[at + 1] = table[step + 1];
      bytes[at + 2] = table[step + 2];
      bytes[at + 3] = 255;
    };
  }

  paintPicture(context, g) {
    const p = this.pictures;
    const { pool } = this.state;
    if (p.coarse && (p.head === null || p.check === null)) {
      const { rows, cols } = this.meta.picture;
      const tall = this.meta.queries / rows, wide = this.meta.keys / cols;
      const image = p.coloured("coarse", p.coarse, rows, cols, this.pixelPainter(0, 0, tall, wide));
      context.drawImage(image, ...this.place(g, 0, 0, this.meta.keys, this.meta.queries));
    }
    if (p.head === null) return;
    const ratio = window.devicePixelRatio || 1;
    const wanted = p.zoomFor(1 / (this.cellSize * ratio), Math.min(this.view.y + this.view.size, this.meta.queries));
    const zoom = Math.max(wanted, p.base);
    const level = p.levels.get(zoom);
    const block = 2 ** zoom;
    const image = p.coloured(`${zoom} ${pool}`, level[pool], level.rows, level.cols, this.pixelPainter(0, 0, block, block));
    context.drawImage(image, ...this.place(g, 0, 0, level.cols * block, level.rows * block));
    if (wanted >= p.base) return;
    const { x, y, size } = this.view;
    const side = TILE * 2 ** wanted;
    for (const { name, row, col, picture } of p.tilesFor(wanted, y, y + size, x, x + size)) {
      const fine = 2 ** wanted;
      const tile = p.coloured(`${name} ${pool}`, picture[pool], picture.rows, picture.cols, this.pixelPainter(row * side, col * side, fine, fine));
      context.drawImage(tile, ...this.place(g, col * side, row * side, picture.cols * fine, picture.rows * fine));
    }
  }

  paintCross(context, g) {
    const { query, key } = this.state;
    const [x, y, cell] = this.place(g, key, query, 1, 1);
    context.strokeStyle = cssVariable("--accent");
    context.globalAlpha = 0.75;
    if (cell >= 3) {
      context.strokeRect(g.x0, y, g.side, cell);
      context.strokeRect(x, g.y0, cell, g.side);
    } else {
      context.beginPath();
      context.moveTo(g.x0, y + cell / 2);
      context.lineTo(g.x0 + g.side, y + cell / 2);
      context.moveTo(x + cell / 2, g.y0);
      context.lineTo(x + cell / 2, g.y0 + g.side);
      context.stroke();
    }
    context.globalAlpha = 1;
    context.lineWidth = 2;
    const box = Math.max(cell, 7);
    context.strokeRect(x + cell / 2 - box / 2, y + cell / 2 - box / 2, box, box);
    if (this.hovered) {
      const [hx, hy] = this.place(g, this.hovered.key, this.hovered.query, 1, 1);
      context.strokeStyle = cssVariable("--ink");
      context.lineWidth = 1;
      context.strokeRect(hx, hy, Math.max(cell, 3), Math.max(cell, 3));
    }
    context.lineWidth = 1;
  }

  /** Bars for each screen pixel: the largest value among the tokens it covers. */
  paintMargins(context, g) {
    const { received, receivedTop, row, rowTop } = this.margins;
    context.fillStyle = cssVariable("--bar");
    const bars = (values, start, top, draw) => {
      const count = values.length;
      const cell = this.cellSize;
      const steps = cell >= 1 ? Math.ceil(this.view.size) + 1 : Math.ceil(g.side);
      for (let step = 0; step < steps; step += 1) {
        const from = cell >= 1 ? Math.floor(start) + step : Math.floor(start + step / cell);
        const to = cell >= 1 ? from + 1 : Math.max(from + 1, Math.floor(start + (step + 1) / cell));
        let value = 0;
        for (let i = from; i < to && i < count; i += 1) if (values[i] > value) value = values[i];
        const at = cell >= 1 ? (from - start) * cell : step;
        const wide = cell >= 1 ? Math.max(1, cell - (cell > 4 ? 1 : 0)) : 1;
        if (at + wide > 0 && at < g.side) draw(Math.max(0, at), Math.min(wide, g.side - at), Math.min(1, value / top));
      }
    };
    const deep = g.margin - 6;
    if (received) bars(received, this.view.x, receivedTop, (at, wide, share) => context.fillRect(g.x0 + at, g.y0 - 3 - deep * share, wide, deep * share));
    if (row) bars(row, this.view.y, rowTop, (at, wide, share) => context.fillRect(g.x0 - 3 - deep * share, g.y0 + at, deep * share, wide));
    context.strokeStyle = cssVariable("--line");
    context.strokeRect(g.x0 - 0.5, g.y0 - 3 - deep, g.side, deep);
    context.strokeRect(g.x0 - 3 - deep, g.y0 - 0.5, deep, g.side);
  }

  paintLabels(context, g) {
    const cell = this.cellSize;
    const { labels } = this.meta.tokens;
    context.fillStyle = cssVariable("--muted");
    context.font = "11px system-ui, 'Noto Sans CJK JP', sans-serif";
    context.textBaseline = "middle";
    const step = cell >= NAMED ? 1 : niceStep(40 / cell);
    const name = (i, limit) => (cell >= NAMED ? shorten(visibleLabel(labels[i], 12), context, limit) : String(i));
    const firstOf = (start) => Math.ceil(start / step) * step;
    context.textAlign = "right";
    for (let i = firstOf(this.view.y); i < Math.min(this.meta.queries, this.view.y + this.view.size); i += step) {
      const y = g.y0 + (i + 0.5 - this.view.y) * cell;
      if (y < g.y0 || y >= g.y0 + g.side) continue;
      if (cell >= NAMED) this.band(context, 0, y - cell / 2, g.left, cell - 1, i === this.state.query);
      this.label(context, name(i, g.left - 8), g.left - 4, y, i === this.state.query);
    }
    context.textAlign = "left";
    for (let j = firstOf(this.view.x); j < Math.min(this.meta.keys, this.view.x + this.view.size); j += step) {
      const x = g.x0 + (j + 0.5 - this.view.x) * cell;
      if (x < g.x0 || x >= g.x0 + g.side) continue;
      if (cell >= NAMED && !this.overMini(x - cell / 2, 4)) this.band(context, x - cell / 2, 0, cell - 1, g.top, j === this.state.key);
      context.save();
      context.translate(x, g.top - 4);
      if (cell >= NAMED) context.rotate(-Math.PI / 2);
      else context.textAlign = "center";
      this.label(context, name(j, g.top - 8), 0, 0, j === this.state.key);
      context.restore();
    }
  }

  /** The strip of a token that can be chosen by its name. */
  band(context, x, y, wide, tall, chosen) {
    context.globalAlpha = chosen ? 0.3 : 0.6;
    context.fillStyle = cssVariable(chosen ? "--accent" : "--button");
    context.fillRect(x, y, wide, tall);
    context.globalAlpha = 1;
  }

  /** The whole matrix in the corner, with a frame around what is seen. */
  paintMini(context, g) {
    this.mini = null;
    if (this.view.size >= this.cells) return;
    const p = this.pictures, { pool } = this.state;
    const zoom = p.head && p.check ? Math.max(...p.levels.keys()) : null;
    const level = zoom === null ? null : p.levels.get(zoom);
    const image = zoom !== null ? p.coloured(`${zoom} ${pool}`, level[pool], level.rows, level.cols, this.pixelPainter(0, 0, 2 ** zoom, 2 ** zoom))
      : p.coarse ? p.coloured("coarse", p.coarse, this.meta.picture.rows, this.meta.picture.cols, this.pixelPainter(0, 0, this.meta.queries / this.meta.picture.rows, this.meta.keys / this.meta.picture.cols)) : null;
    const m = { x: 2, y: 2, side: Math.min(g.x0, g.y0) - 10 };
    this.mini = m;
    context.fillStyle = cssVariable("--panel");
    context.fillRect(m.x, m.y, m.side, m.side);
    const cell = m.side / this.cells;
    if (image) context.drawImage(image, m.x, m.y, m.side * (zoom !== null ? (level.cols * 2 ** zoom) / this.cells : 1), m.side * (zoom !== null ? (level.rows * 2 ** zoom) / this.cells : 1));
    context.strokeStyle = cssVariable("--line");
    context.strokeRect(m.x - 0.5, m.y - 0.5, m.side + 1, m.side + 1);
    context.strokeStyle = cssVariable("--accent");
    context.lineWidth = 2;
    const seen = Math.max(4, this.view.size * cell);
    context.strokeRect(m.x + this.view.x * cell, m.y + this.view.y * cell, seen, seen);
    context.lineWidth = 1;
  }

  label(context, text, x, y, chosen) {
    context.fillStyle = cssVariable(chosen ? "--accent" : "--muted");
    context.fillText(text, x, y);
  }
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => s >= least) ?? 10 * power;
}

function shorten(text, context, width) {
  if (context.measureText(text).width <= width) return text;
  const letters = [...text];
  while (letters.length > 1 && context.measureText(`${letters.join("")}…`).width > width) letters.pop();
  return `${letters.join("")}…`;
}
