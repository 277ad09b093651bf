// Pictures of one head, made in slices: first one pass over all its rows (which also checks L), pooled
// to at most BASE pixels a side; then sharper tiles when somebody zooms in. Runs in a worker, or in
// idle slices of the page where a worker cannot be had.
import { Head } from "./head.js";
import { TILE, baseZoom } from "./levels.js";

/** Pool rows rowStart..rowStop-1 and keys keyStart..keyStop-1 into blocks of block x block cells.
    mass: mean over queries, sum over keys, so a pixel row sums to the share of its queries' weight
    that lies in the picture. peak: the largest weight. check(i, sum of the row's weights) if wanted. */
export function poolBlocks(head, rowStart, rowStop, keyStart, keyStop, block, check = null) {
  const rows = Math.ceil((rowStop - rowStart) / block);
  const cols = Math.ceil((keyStop - keyStart) / block);
  const mass = new Float32Array(rows * cols);
  const peak = new Float32Array(rows * cols);
  const sums = new Float64Array(cols);
  const weights = new Float64Array(keyStop);
  for (let r = 0; r < rows; r += 1) {
    const begin = rowStart + r * block;
    const end = Math.min(rowStop, begin + block);
    sums.fill(0);
    for (let i = begin; i < end; i += 1) {
      const from = Math.max(keyStart, head.first[i]);
      const to = Math.min(keyStop, head.stop[i]);
      let rowSum = 0;
      head.fillRow(i, from, to, weights);
      for (let j = from; j < to; j += 1) {
        const weight = weights[j];
        const c = ((j - keyStart) / block) | 0;
        sums[c] += weight;
        rowSum += weight;
        if (weight > peak[r * cols + c] || weight !== weight) peak[r * cols + c] = weight; // a NaN stays
      }
      if (check) check(i, rowSum);
    }
    for (let c = 0; c < cols; c += 1) mass[r * cols + c] = sums[c] / (end - begin);
  }
  return { rows, cols, mass, peak };
}

export class Engine {
  /** send(message, transfer) receives bands, the check and tiles. */
  constructor(send) {
    this.send = send;
    this.tiles = [];
    this.pass = null;
    this.head = null;
    this.id = null;
    this.bad = new Set(); // rows whose L was not confirmed: never drawn
  }

  receive(message) {
    if (message.type === "open") {
      this.id = message.id; // whatever was under way for another head is stale now
      this.head = new Head(message.parts);
      this.tiles = [];
      this.bad = new Set();
      this.pass = { row: 0, zoom: baseZoom(Math.max(this.head.queries, this.head.keys)), worst: 0 };
    } else if (message.type === "want") {
      this.tiles = message.id === this.id ? [...message.tiles] : []; // these, and no longer what was wanted before
    }
  }

  get busy() {
    return this.tiles.length > 0 || this.pass !== null;
  }

  /** One slice of about 25 million multiplications; tiles go before the pass. */
  step() {
    if (this.tiles.length > 0) this.drawTile(this.tiles.shift());
    else if (this.pass !== null) this.advance();
  }

  drawTile({ zoom, row, col }) {
    const block = 2 ** zoom;
    const side = TILE * block;
    const head = this.head;
    const rows = [row * side, Math.min(head.queries, (row + 1) * side)];
    const keys = [col * side, Math.min(head.keys, (col + 1) * side)];
    const picture = this.withoutBadRows(poolBlocks(head, ...rows, ...keys, block), rows[0], block);
    this.send({ type: "tile", id: this.id, zoom, row, col, ...picture }, [picture.mass.buffer, picture.peak.buffer]);
  }

  advance() {
    const { head, pass } = this;
    const block = 2 ** pass.zoom;
    const rows = Math.max(1, Math.floor(25e6 / (head.dim * Math.max(1, head.keys) * block))) * block;
    const begin = pass.row;
    const end = Math.min(head.queries, begin + rows);
    const check = (i, sum) => {
      const off = this.rowError(i, sum);
      if (off > pass.worst) pass.worst = off;
      if (!(off <= head.tolerance(i))) this.bad.add(i);
    };
    const picture = this.withoutBadRows(poolBlocks(head, begin, end, 0, head.keys, block, check), begin, block);
    this.send({ type: "band", id: this.id, zoom: pass.zoom, row: begin / block, ...picture }, [picture.mass.buffer, picture.peak.buffer]);
    pass.row = end;
    if (end >= head.queries) {
      this.send({ type: "checked", id: this.id, zoom: pass.zoom, bad: [...this.bad], worst: pass.worst }, []);
      this.pass = null;
    }
  }

  /** NaN, which nothing paints, over every pixel row that holds a refused row. */
  withoutBadRows(picture, rowStart, block) {
    for (const i of this.bad) {
      const r = Math.floor((i - rowStart) / block);
      if (r < 0 || r >= picture.rows) continue;
      picture.mass.fill(NaN, r * picture.cols, (r + 1) * picture.cols);
      picture.peak.fill(NaN, r * picture.cols, (r + 1) * picture.cols);
    }
    return picture;
  }

  /** |recomputed L - recorded L|, from the sum of the row's weights. */
  rowError(i, sum) {
    const { head } = this;
    if (head.lse[i] === -Infinity) return head.stop[i] > head.first[i] ? Infinity : 0;
    const total = head.sink === null ? sum : sum + Math.exp(head.sink - head.lse[i]);
    return Math.abs(Math.log(total));
  }
}
