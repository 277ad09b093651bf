// A source whose numbers Python computes when they are asked for: the server's, and the notebook's.
import { baseZoom } from "./levels.js";
import { tileName } from "./pictures.js";
import { formatTokens } from "./selection.js";

const KEPT = 64; // answers about heads (margins, rows, columns) kept at hand; the oldest goes first
const AGAIN_MS = 1500; // how often is asked which layers have been read meanwhile

export class Remote {
  constructor(meta, transport, atlas = true) {
    this.meta = meta;
    this.transport = transport;
    this.cache = new Map();
    this.heads = new Map();
    this.byLayer = new Map(meta.layers.map((layer) => [layer.layer, layer]));
    this.listeners = [];
    if (atlas && meta.read < meta.layers.length) this.follow();
  }

  layer(layer) {
    return this.byLayer.get(layer);
  }

  slot(head) {
    return this.meta.heads.indexOf(head);
  }

  isFull() {
    return true;
  }

  listen(changed) {
    this.listeners.push(changed);
  }

  /** An answer that stays the same, kept for a while; one that was taken back or failed is asked again. */
  kept(what, parameters) {
    const name = `${what} ${Object.values(parameters).join(" ")}`;
    const found = this.cache.get(name);
    this.cache.delete(name); // to the young end
    const promise = found ?? this.transport.ask(what, parameters);
    this.cache.set(name, promise);
    if (!found) promise.catch(() => this.cache.delete(name));
    for (const old of [...this.cache.keys()].slice(0, Math.max(0, this.cache.size - KEPT))) this.cache.delete(old);
    return promise;
  }

  async received(layer, head) {
    return (await this.kept("rows", { layer, head })).received;
  }

  async rowStatistic(layer, head, name) {
    const rows = await this.kept("rows", { layer, head });
    return name === "effective" ? Float32Array.from(rows.entropy, Math.exp) : rows[name];
  }

  async words() {
    const { labels, starts } = await this.kept("words", {});
    return labels === null ? null : { labels, starts };
  }

  async next(query) {
    return this.meta.predictions ? this.kept("next", { query }) : null;
  }

  /** What there is to know of a layer; of a long text Python opens one when it is first looked at. */
  async opened(layer) {
    const info = this.layer(layer);
    if (info.dim === undefined) {
      const { info: more, controls, bound } = await this.kept("layer", { layer });
      Object.assign(info, more);
      Object.assign(this.meta, { controls, bound });
    }
    return info;
  }

  async ranges(layer) {
    const { ranges } = await this.opened(layer);
    return ranges === null ? null : this.kept("ranges", { number: ranges });
  }

  async picture() {
    return null;
  }

  async top() {
    return null;
  }

  async head(layer, head) {
    await this.opened(layer);
    const name = `${layer} ${head}`; // one object a head: the panels tell by it whether a head is open already
    if (!this.heads.has(name)) this.heads.set(name, new RemoteHead(this, layer, head));
    return this.heads.get(name);
  }

  /** What an intervention does; asked.kind and the rest are those of answers.py. */
  cause(asked, signal) {
    return this.transport.ask("cause", asked, signal);
  }

  engine(receive) {
    return new RemoteEngine(this, receive);
  }

  /** Ask for the atlas until every layer is read. */
  async follow() {
    for (;;) {
      await new Promise((resume) => setTimeout(resume, AGAIN_MS));
      if (document.hidden) continue;
      const { atlas } = await this.transport.ask("atlas", {});
      const grown = ["read", "missing"].some((name) => JSON.stringify(atlas[name]) !== JSON.stringify(this.meta[name])) || atlas.trouble;
      Object.assign(this.meta, atlas);
      if (grown) for (const changed of this.listeners) changed();
      if (atlas.read === this.meta.layers.length || atlas.trouble) return;
    }
  }
}

class RemoteHead {
  constructor(source, layer, head) {
    Object.assign(this, { source, layer, head, queries: source.meta.queries, keys: source.meta.keys });
  }

  ask(what, parameters, signal) {
    return this.source.transport.ask(what, { layer: this.layer, head: this.head, ...parameters }, signal);
  }

  async row(query, signal) {
    const { weights, scores, ...check } = await this.ask("row", { query }, signal);
    return { check, weights: check.ok ? weights : null, score: (j) => scores[j] };
  }

  async column(key, refused, signal) {
    const { weights, scores, bad } = await this.ask("column", { key }, signal);
    for (const i of [...(refused ?? []), ...bad]) weights[i] = 0;
    return { weights, score: (i) => scores[i] };
  }

  /** The sum of what these queries read: as row(). */
  async rowSum(queries, signal) {
    const { weights, ...check } = await this.ask("rowsum", { tokens: formatTokens(queries) }, signal);
    return { check, weights: check.ok ? weights : null, score: null };
  }

  /** Of who reads these keys: as column(). */
  async columnSum(keys, refused, signal) {
    const { weights, bad } = await this.ask("columnsum", { tokens: formatTokens(keys) }, signal);
    for (const i of [...(refused ?? []), ...bad]) weights[i] = 0;
    return { weights, score: null };
  }

  cell(query, key, signal) {
    return this.ask("cell", { query, key }, signal);
  }

  async block(i0, i1, j0, j1, signal) {
    const { weights, bad } = await this.ask("block", { i0, i1, j0, j1 }, signal);
    return { weights, refused: new Set(bad) };
  }

  async bare(query, signal) {
    const { products, weights = null, ...plane } = await this.ask("bare", { query }, signal);
    return { products, weights, plane };
  }

  values(query, key, signal) {
    return this.ask("values", { query, key }, signal);
  }
}

/** Pictures as in engine.js, made by Python: bands of the far picture one after another, tiles when wanted. */
class RemoteEngine {
  constructor(source, receive) {
    this.source = source;
    this.receive = receive;
    this.inWorker = false;
    this.tiles = new Map(); // name -> AbortController of a tile that is under way
  }

  send(message) {
    if (message.type === "open") this.open(message);
    else if (message.type === "want") this.want(message);
  }

  async open({ id, head }) {
    this.bands?.abort();
    this.want({ id, tiles: [] });
    this.head = head;
    this.bands = new AbortController();
    const { signal } = this.bands;
    const zoom = baseZoom(Math.max(head.queries, head.keys));
    const check = { bad: [], worst: 0 };
    try {
      for (let row = 0; row * 2 ** zoom < head.queries; ) {
        const band = await head.ask("band", { zoom, row }, signal);
        this.receive({ type: "band", id, zoom, row, ...band });
        check.bad.push(...band.bad);
        check.worst = Math.max(check.worst, band.worst);
        row += band.rows;
      }
      this.receive({ type: "checked", id, zoom, ...check });
    } catch (error) {
      if (!signal.aborted) this.receive({ type: "failed", id, error });
    }
  }

  /** These tiles and no others: what is under way for another view is taken back. */
  want({ id, tiles }) {
    const names = new Map(tiles.map((tile) => [tileName(tile), tile]));
    for (const [name, control] of this.tiles) {
      if (names.has(name)) continue;
      control.abort();
      this.tiles.delete(name);
    }
    for (const [name, tile] of names) if (!this.tiles.has(name)) this.draw(id, name, tile);
  }

  async draw(id, name, { zoom, row, col }) {
    const control = new AbortController();
    this.tiles.set(name, control);
    try {
      const tile = await this.head.ask("tile", { zoom, row, col, pool: zoom === 0 ? "mass" : "both" }, control.signal);
      this.receive({ type: "tile", id, zoom, row, col, ...tile, peak: tile.peak ?? tile.mass }); // one cell a pixel: they are the same
    } catch (error) {
      if (!control.signal.aborted) this.receive({ type: "failed", id, tile: name, error });
    } finally {
      if (this.tiles.get(name) === control) this.tiles.delete(name);
    }
  }
}
