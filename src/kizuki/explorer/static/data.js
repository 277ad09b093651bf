// The embedded source (source.js): this file's own data, by layer and head. Light readings (Python's) exist for
// every head; q, k and L only for the layers that fit the file, and those become a head that can compute any cell.
import { block } from "./decode.js";
import { Head, dot } from "./head.js";
import { planeOf } from "./axes.js";
import { startEngine } from "./runner.js";

const KEPT_HEADS = 16; // decoded heads kept at hand; the oldest goes first

export class Data {
  /** `worker` is the script that draws pictures beside the page; `mark` is before the names of this input's blocks. */
  constructor(meta, worker, mark = "kz-") {
    this.mark = mark;
    this.meta = meta;
    this.worker = worker;
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
    const all = await this.remember(`${name}-${layer}`, () => block(`${this.mark}${name}-${layer}`, kind, heads * length));
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

  async words() {
    return null; // meta has them
  }

  async next(token) {
    const { predictions, tokens } = this.meta;
    if (!predictions) return null;
    const { names, choices, probabilities, ids } = predictions, own = choices[token];
    const actual = tokens.ids[token + 1];
    return { names: own.map((choice) => names[choice]), probabilities: probabilities[token], here: own.map((choice) => ids[choice] === actual) };
  }

  async ranges(layer) {
    const { ranges } = this.layer(layer);
    if (ranges === null) return null;
    const both = await this.remember(`ranges-${ranges}`, () => block(`${this.mark}ranges-${ranges}`, "i4", 2 * this.meta.queries));
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
      block(`${this.mark}q-${layer}-${head}`, "f4", queries * info.dim),
      block(`${this.mark}k-${layer}-${kvHead}`, "f4", keys * info.dim),
      this.lightOf(layer, head, "lse", "f4", queries),
      this.ranges(layer),
    ]);
    return {
      queries, keys, dim: info.dim, q, k,
      lse: lse.slice(), first: range.first, stop: range.stop,
      scale: info.scale, softcap: info.softcap, sink: info.sinks === null ? null : info.sinks[slot],
    };
  }

  /** What reads v of a head's group, [keys, value_dim], when it is asked for; null where the file has none. */
  valueOf(layer, head) {
    const dim = this.layer(layer).value_dim ?? null;
    if (dim === null) return null;
    const kvHead = this.meta.kv_of[this.slot(head)];
    return async () => ({ dim, v: await block(`${this.mark}v-${layer}-${kvHead}`, "f4", this.meta.keys * dim) });
  }

  listen() {} // everything is there from the beginning

  engine(receive) {
    return startEngine(this.worker, receive);
  }

  /** The open head, or null; decoded once, kept for a while. */
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
      return parts === null ? null : new LocalHead(layer, head, new Head(parts), this.valueOf(layer, head));
    });
    const heads = [...this.cache.keys()].filter((key) => key.startsWith("head-"));
    for (const old of heads.slice(0, Math.max(0, heads.length - KEPT_HEADS))) this.cache.delete(old);
    return promise;
  }
}

/** A head whose q, k and L the page holds. Every number of it can also be had at once, from `model`. */
export class LocalHead {
  constructor(layer, head, model, value = null) {
    Object.assign(this, { layer, head, model, value, queries: model.queries, keys: model.keys });
  }

  async row(query) {
    const check = this.model.checkRow(query);
    return { check, weights: check.ok ? this.model.row(query) : null, score: (j) => this.model.score(query, j) };
  }

  /** `refused`: the rows whose L was refuted, once all were checked; until then those that weigh most are checked
      here, so that no weight of a refused row is ever shown among them. */
  async column(key, refused) {
    const weights = this.model.column(key);
    for (const i of refused ?? heaviest(weights).filter((i) => !this.model.checkRow(i).ok)) weights[i] = 0;
    return { weights, score: (i) => this.model.score(i, key) };
  }

  async cell(query, key) {
    const { dim, q, k } = this.model;
    return {
      ...this.model.cell(query, key), bias: null,
      q: q.subarray(query * dim, (query + 1) * dim), k: k.subarray(key * dim, (key + 1) * dim),
    };
  }

  /** Row `query` before its mask: its products with all keys, and the plane of both. */
  async bare(query) {
    const { dim, q, k } = this.model, own = q.subarray(query * dim, (query + 1) * dim);
    return { products: Float64Array.from({ length: this.keys }, (_, j) => dot(own, 0, k, j * dim, dim)), weights: null, plane: planeOf(own, k, dim) };
  }

  async block(i0, i1, j0, j1) {
    const weights = new Float64Array((i1 - i0) * (j1 - j0)).fill(NaN);
    const refused = new Set();
    for (let i = i0, at = 0; i < i1; i += 1) {
      if (!this.model.checkRow(i).ok) refused.add(i);
      for (let j = j0; j < j1; j += 1, at += 1) if (this.model.visible(i, j)) weights[at] = this.model.cell(i, j).weight;
    }
    return { weights, refused };
  }

  async values(query, key) {
    if (this.value === null) return null; // the file holds no v of this layer
    this.loaded ??= this.value();
    const { dim, v } = await this.loaded;
    const output = new Float64Array(dim);
    const weights = this.model.row(query);
    for (let j = this.model.first[query]; j < this.model.stop[query]; j += 1) {
      for (let c = 0; c < dim; c += 1) output[c] += weights[j] * v[j * dim + c];
    }
    return { v: v.subarray(key * dim, (key + 1) * dim), output };
  }
}

const LISTED = 12; // as many as the table of a reading lists at first

function heaviest(weights) {
  return [...weights.keys()].filter((i) => weights[i] > 0).sort((a, b) => weights[b] - weights[a] || a - b).slice(0, LISTED);
}
