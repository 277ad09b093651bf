// The pictures of one opened head: the pass's picture and coarser ones made from it, sharper tiles asked
// for when looked at, and each of them as a coloured canvas.
import { TILE, baseZoom, halve } from "./levels.js";

const KEPT_TILES = 120;

export function tileName({ zoom, row, col }) {
  return `${zoom} ${row} ${col}`;
}

export class Pictures {
  /** ask(message) sends to the engine; ready() is called whenever something new can be drawn, failed(error) when
      something cannot be. */
  constructor(ask, ready, failed) {
    Object.assign(this, { ask, ready, failed });
    this.id = 0;
    this.clear();
  }

  clear() {
    this.levels = new Map(); // zoom -> { rows, cols, mass, peak }
    this.tiles = new Map(); // "zoom row col" -> picture
    this.wanted = new Set();
    this.painted = new Map(); // coloured canvases
    this.stale = new Map(); // name of one of them -> its rows that came since it was coloured
    this.read = 0; // rows of the head whose L is checked, from the top
    this.check = null;
    this.coarse = null; // Python's pooled picture
    this.head = null;
  }

  /** Start on a head; `coarse` is what can be shown meanwhile (or, where head is null, at all). */
  open(head, coarse) {
    this.clear();
    this.id += 1;
    this.head = head;
    this.coarse = coarse;
    if (head === null) {
      this.ask({ type: "want", id: this.id, tiles: [] });
      return;
    }
    this.base = baseZoom(Math.max(head.queries, head.keys));
    const block = 2 ** this.base;
    const rows = Math.ceil(head.queries / block), cols = Math.ceil(head.keys / block);
    this.levels.set(this.base, { rows, cols, mass: new Float32Array(rows * cols).fill(NaN), peak: new Float32Array(rows * cols).fill(NaN) });
    this.ask({ type: "open", id: this.id, head });
  }

  receive(message) {
    if (message.id !== this.id) return; // for a head that is no longer open
    if (message.type === "band") {
      const level = this.levels.get(this.base);
      level.mass.set(message.mass, message.row * level.cols);
      level.peak.set(message.peak, message.row * level.cols);
      this.read = (message.row + message.rows) * 2 ** this.base;
      for (const pool of ["mass", "peak"]) {
        const name = `${this.base} ${pool}`;
        this.stale.set(name, [...(this.stale.get(name) ?? []), [message.row, message.rows]]);
      }
    } else if (message.type === "checked") {
      this.check = { bad: message.bad, badSet: new Set(message.bad), worst: message.worst };
      this.coarsen();
    } else if (message.type === "failed") {
      if (message.tile) this.wanted.delete(message.tile); // it may be tried again
      this.failed(message.error);
    } else if (message.type === "tile") {
      const name = tileName(message);
      this.wanted.delete(name);
      this.tiles.set(name, message);
      for (const old of [...this.tiles.keys()].slice(0, Math.max(0, this.tiles.size - KEPT_TILES))) this.tiles.delete(old);
    }
    this.ready();
  }

  coarsen() {
    const block = 2 ** this.base;
    let picture = this.levels.get(this.base);
    let counts = Float64Array.from({ length: picture.rows }, (_, r) => Math.min(block, this.head.queries - r * block));
    for (let zoom = this.base + 1; Math.max(picture.rows, picture.cols) > 32; zoom += 1) {
      ({ picture, counts } = halve(picture, counts));
      this.levels.set(zoom, picture);
    }
  }

  /** The zoom to draw at when one screen pixel covers `cells` cells a side; `until`: the last row in view, for nothing
      sharper is drawn than the first picture until its rows are checked. */
  zoomFor(cells, until = Infinity) {
    const zoom = Math.max(0, Math.ceil(Math.log2(Math.max(1, cells)) - 0.01));
    if (this.check === null) return until <= this.read ? Math.min(zoom, this.base) : this.base;
    return Math.min(zoom, Math.max(...this.levels.keys()));
  }

  /** Tiles of `zoom` over rows q0..q1 and keys k0..k1 that are here; the missing ones are asked for. */
  tilesFor(zoom, q0, q1, k0, k1) {
    const side = TILE * 2 ** zoom;
    const found = [];
    const missing = [];
    for (let row = Math.max(0, Math.floor(q0 / side)); row * side < Math.min(q1, this.head.queries); row += 1) {
      for (let col = Math.max(0, Math.floor(k0 / side)); col * side < Math.min(k1, this.head.keys); col += 1) {
        const name = tileName({ zoom, row, col });
        if (this.tiles.has(name)) found.push({ name, row, col, picture: this.tiles.get(name) });
        else missing.push({ zoom, row, col });
      }
    }
    const names = missing.map(tileName);
    if (names.some((name) => !this.wanted.has(name))) {
      this.wanted = new Set(names);
      this.ask({ type: "want", id: this.id, tiles: missing }); // what was wanted for another view is stale
    }
    return found;
  }

  /** Read the pooled value under a cell at a zoom that is here; null where there is none. */
  valueAt(zoom, query, key, pool) {
    const level = this.levels.get(zoom);
    if (!level) return null;
    return level[pool][Math.floor(query / 2 ** zoom) * level.cols + Math.floor(key / 2 ** zoom)];
  }

  /** A canvas with one pixel for each number: coloured, and empty where nothing is visible or nothing is known. */
  coloured(name, values, rows, cols, paintPixel) {
    const known = this.painted.get(name), canvas = known ?? document.createElement("canvas");
    const parts = known ? this.stale.get(name) ?? [] : [[0, rows]]; // of a picture that grows only what came since
    this.stale.delete(name);
    this.painted.delete(name); // to the young end
    this.painted.set(name, canvas);
    if (!known) {
      canvas.width = cols;
      canvas.height = rows;
      for (const old of [...this.painted.keys()].slice(0, Math.max(0, this.painted.size - 2 * KEPT_TILES))) this.painted.delete(old);
    }
    for (const [top, tall] of parts) {
      const context = canvas.getContext("2d"), image = context.createImageData(cols, tall);
      for (let r = 0; r < tall; r += 1) {
        for (let c = 0; c < cols; c += 1) paintPixel(image.data, 4 * (r * cols + c), values[(top + r) * cols + c], top + r, c);
      }
      context.putImageData(image, 0, top);
    }
    return canvas;
  }
}
