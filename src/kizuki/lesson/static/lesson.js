// The page's data: a lesson's q, k, v, mask and matrices as Python packed them (page.py), and what follows from them.
import { dots, logits, mixRow, softmax, softmaxRow } from "./formula.js";

/** Base64 of little-endian float32 -> Float32Array. */
export function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

function rowsOf(packed) {
  if (packed === null) return null;
  const flat = unpack(packed.data);
  const width = packed.shape[packed.shape.length - 1];
  return Array.from({ length: width ? flat.length / width : 0 }, (_, i) => flat.subarray(i * width, (i + 1) * width));
}

export class Lesson {
  constructor(packed) {
    Object.assign(this, packed.facts);
    this.n = this.labels.length;
    const grouped = (all, heads) => Array.from({ length: heads }, (_, h) => all.slice(h * this.n, (h + 1) * this.n));
    this.query = grouped(rowsOf(packed.query), this.heads);
    this.key = grouped(rowsOf(packed.key), this.kv_heads);
    this.value = grouped(rowsOf(packed.value), this.kv_heads);
    this.seen = packed.seen.map((row) => Array.from(row, (c) => (c === "1" ? 1 : 0)));
    this.everything = this.seen.map((row) => row.map(() => 1));
    this.around = null;
    if (packed.projection !== null) {
      this.around = {};
      for (const [name, each] of Object.entries(packed.projection)) this.around[name] = rowsOf(each);
    }
    this.planes = packed.planes === undefined ? null : {
      query: rowsOf(packed.planes.query), residual: rowsOf(packed.planes.residual),
      along: grouped(rowsOf(packed.planes.along), this.heads), beside: grouped(rowsOf(packed.planes.beside), this.heads),
    };
    this.made = new Map();
  }

  group(head) {
    return Math.floor(head / (this.heads / this.kv_heads));
  }

  q(head) {
    return this.query[head];
  }

  k(head) {
    return this.key[this.group(head)];
  }

  v(head) {
    return this.value[this.group(head)];
  }

  dots(head) {
    if (!this.made.has(head)) this.made.set(head, dots(this.q(head).map((r) => [...r]), this.k(head).map((r) => [...r])));
    return this.made.get(head);
  }

  visible(mask) {
    return mask ? this.seen : this.everything;
  }

  scores(head, { scale, mask, temperature }) {
    return logits(this.dots(head), scale ? this.scale : 1, temperature, this.visible(mask));
  }

  /** The switches as the model has them. */
  own() {
    return { scale: true, mask: this.masked, temperature: 1 };
  }

  weights(head, switches = this.own()) {
    return softmax(this.scores(head, switches));
  }

  /** One row of `weights`. */
  row(head, i, { scale, mask, temperature } = this.own()) {
    return softmaxRow(logits([this.dots(head)[i]], scale ? this.scale : 1, temperature, [this.visible(mask)[i]])[0]);
  }

  output(head, i, switches = this.own()) {
    return mixRow(this.row(head, i, switches), this.v(head));
  }

  /** Whether W of this head is here. */
  open(head) {
    return this.around !== null && head === this.head;
  }
}
