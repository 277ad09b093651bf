// The file's data, by layer and head. Light readings (Python's) exist for every head; q, k and L only
// for the layers that fit the file, and those become a Head that can compute any cell.
import { block } from "./decode.js";
import { Head } from "./head.js";

const KEPT_HEADS = 16; // decoded heads kept at hand; the oldest goes first

export class Data {
  constructor(meta) {
    this.meta = meta;
    this.cache = new Map();
    this.byLayer = new Map(meta.layers.map((layer) => [layer.layer, layer]));
  }

  layer(layer) {
    return this.byLayer.get(layer);
  }

  slot(head) {
    return this.meta.heads.indexOf(head);
  }

  isFull(layer) {
    return this.layer(layer).full;
  }

  remember(name, make) {
    if (!this.cache.has(name)) {
      const promise = make();
      promise.catch(() => this.cache.delete(name)); // a failed read may be tried again
      this.cache.set(name, promise);
    }
    return this.cache.get(name);
  }

  /** Array `name` of a layer, [heads, length], cut to one head. */
  async lightOf(layer, head, name, kind, length) {
    const heads = this.meta.heads.length;
    const all = await this.remember(`${name}-${layer}`, () => block(`kz-${name}-${layer}`, kind, heads * length));
    const slot = this.slot(head);
    return all.subarray(slot * length, (slot + 1) * length);
  }

  received(layer, head) {
    return this.lightOf(layer, head, "received", "f4", this.meta.keys);
  }

  picture(layer, head) {
    const { rows, cols } = this.meta.picture;
    return this.lightOf(layer, head, "picture", "f4", rows * cols);
  }

  /** A statistic of every row, or null where the file leaves it out. Unit as in measures. */
  async rowStatistic(layer, head, name) {
    const stored = name === "effective" ? "entropy" : name;
    if (!this.isFull(layer) && !this.meta.rows.includes(stored)) return null;
    const values = await this.lightOf(layer, head, stored, "f4", this.meta.queries);
    return name === "effective" ? Float32Array.from(values, Math.exp) : values;
  }

  async top(layer, head) {
    const k = this.meta.top;
    if (k === 0) return null;
    const length = this.meta.queries * k;
    const weights = await this.lightOf(layer, head, "topw", "f4", length);
    const keys = await this.lightOf(layer, head, "topk", this.meta.top_kind, length);
    return { k, weights, keys, none: this.meta.top_kind === "u2" ? 65535 : -1 };
  }

  async ranges(layer) {
    const { ranges } = this.layer(layer);
    if (ranges === null) return null;
    const both = await this.remember(`ranges-${ranges}`, () => block(`kz-ranges-${ranges}`, "i4", 2 * this.meta.queries));
    return { first: both.subarray(0, this.meta.queries), stop: both.subarray(this.meta.queries) };
  }

  /** The parts a Head is made of, or null where the file has no q and k of this layer. */
  async parts(layer, head) {
    const info = this.layer(layer);
    if (!info.full) return null;
    const { queries, keys } = this.meta;
    const slot = this.slot(head);
    const kvHead = this.meta.kv_of[slot];
    const [q, k, lse, range] = await Promise.all([
      block(`kz-q-${layer}-${head}`, "f4", queries * info.dim),
      block(`kz-k-${layer}-${kvHead}`, "f4", keys * info.dim),
      this.lightOf(layer, head, "lse", "f4", queries),
      this.ranges(layer),
    ]);
    return {
      queries, keys, dim: info.dim, q, k,
      lse: lse.slice(), first: range.first, stop: range.stop,
      scale: info.scale, softcap: info.softcap, sink: info.sinks === null ? null : info.sinks[slot],
    };
  }

  /** The Head, or null; decoded once, kept for a while. */
  async head(layer, head) {
    const name = `head-${layer}-${head}`;
    const kept = this.cache.get(name);
    if (kept) {
      this.cache.delete(name); // move it to the young end
      this.cache.set(name, kept);
      return kept;
    }
    const promise = this.remember(name, async () => {
      const parts = await this.parts(layer, head);
      return parts === null ? null : new Head(parts);
    });
    const heads = [...this.cache.keys()].filter((key) => key.startsWith("head-"));
    for (const old of heads.slice(0, Math.max(0, heads.length - KEPT_HEADS))) this.cache.delete(old);
    return promise;
  }
}
