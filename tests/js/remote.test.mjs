// What comes from Python: bytes into arrays, questions over a port, stale tiles taken back.
import assert from "node:assert/strict";
import test from "node:test";
import { Remote } from "../../src/kizuki/explorer/static/remote.js";
import { overPort, unpack } from "../../src/kizuki/explorer/static/transport.js";

/** An answer as Python's wire.py describes it. */
function pack(fields, arrays = {}) {
  const kinds = new Map([[Float32Array, "f4"], [Float64Array, "f8"], [Int32Array, "i4"]]);
  const listed = Object.entries(arrays).map(([name, array]) => [name, kinds.get(array.constructor), array.length]);
  const text = new TextEncoder().encode(JSON.stringify({ ...fields, arrays: listed }));
  const parts = [Uint8Array.of(text.length & 255, (text.length >> 8) & 255, text.length >> 16, 0), text];
  let size = 4 + text.length;
  for (const array of Object.values(arrays)) {
    parts.push(new Uint8Array(-size & 7), new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
    size += (-size & 7) + array.byteLength;
  }
  return new Uint8Array(parts.flatMap((part) => [...part])).buffer;
}

const soon = () => new Promise((resume) => setTimeout(resume, 0));

test("an answer is its fields and its arrays, floats that JSON has not among them", () => {
  const answer = unpack(pack({ rows: 2, bad: [1], floats: ["worst", "lse"] }, {
    floats: Float64Array.of(Infinity, -2.5), mass: Float32Array.of(1, NaN, 0.5), first: Int32Array.of(-1, 7),
  }));
  assert.deepEqual(answer, { rows: 2, bad: [1], worst: Infinity, lse: -2.5, mass: Float32Array.of(1, NaN, 0.5), first: Int32Array.of(-1, 7) });
});

test("over a port two questions are under way, and one taken back before it was sent is never asked", async () => {
  const sent = [];
  const port = { postMessage: (message) => sent.push(message) };
  const { ask } = overPort(port);
  const control = new AbortController();
  const first = ask("row", { query: 1 });
  const second = ask("row", { query: 2 });
  const third = ask("row", { query: 3 }, control.signal);
  const fourth = ask("row", { query: 4 });
  third.catch(() => {});
  assert.deepEqual(sent.map(({ parameters }) => parameters.query), [1, 2]);
  control.abort();
  await assert.rejects(third, { name: "AbortError" });
  port.onmessage({ data: { id: sent[1].id, buffer: pack({ n: 2 }) } });
  port.onmessage({ data: { id: sent[0].id, error: "query: is missing" } });
  assert.deepEqual(await second, { n: 2 });
  await assert.rejects(first, /query: is missing/);
  assert.deepEqual(sent.map(({ parameters }) => parameters.query), [1, 2, 4]);
  port.onmessage({ data: { id: sent[2].id, buffer: pack({ n: 4 }) } });
  assert.deepEqual(await fourth, { n: 4 });
});

function source(answer) {
  const meta = { queries: 2048, keys: 2048, heads: [0], layers: [{ layer: 0, ranges: 0, dim: 64 }, { layer: 7 }], read: 2 };
  const asked = [];
  const transport = {
    ask: (what, parameters, signal) => {
      asked.push({ what, parameters, signal });
      return answer(what, parameters, signal);
    },
  };
  return { remote: new Remote(meta, transport), asked };
}

test("bands are asked for one after another until every row is there, and stop when another head opens", async () => {
  const { remote, asked } = source(async (what, { row }) => ({ rows: row === 0 ? 1000 : 24, cols: 1024, bad: row ? [2040] : [], worst: row ? 0.5 : 0.1 }));
  const heard = [];
  const engine = remote.engine((message) => heard.push(message));
  engine.send({ type: "open", id: 1, head: await remote.head(0, 0) });
  for (let turn = 0; turn < 5; turn += 1) await soon();
  assert.deepEqual(asked.map(({ what, parameters }) => [what, parameters.zoom, parameters.row]), [["band", 1, 0], ["band", 1, 1000]]);
  const { type, bad, worst } = heard.at(-1);
  assert.deepEqual([type, bad, worst], ["checked", [2040], 0.5]);
  const head = await remote.head(0, 0);
  engine.send({ type: "open", id: 2, head });
  engine.send({ type: "open", id: 3, head });
  assert.ok(asked[2].signal.aborted && !asked[3].signal.aborted);
});

test("wanted tiles go on, stale ones are aborted, failures are told", async () => {
  const waiting = new Map();
  const { remote, asked } = source((what, parameters, signal) => new Promise((resolve, reject) => {
    if (what === "band") return;
    waiting.set(`${parameters.row} ${parameters.col}`, { resolve, reject });
    signal.addEventListener("abort", () => reject(signal.reason));
  }));
  const heard = [];
  const engine = remote.engine((message) => heard.push(message));
  engine.send({ type: "open", id: 1, head: await remote.head(0, 0) });
  const tile = (row, col) => ({ zoom: 0, row, col });
  engine.send({ type: "want", id: 1, tiles: [tile(0, 0), tile(0, 1)] });
  engine.send({ type: "want", id: 1, tiles: [tile(0, 1), tile(0, 2)] });
  const tiles = asked.filter(({ what }) => what === "tile");
  assert.deepEqual(tiles.map(({ parameters, signal }) => [parameters.col, signal.aborted]), [[0, true], [1, false], [2, false]]);
  waiting.get("0 1").resolve({ rows: 1, cols: 1, mass: Float32Array.of(0.25) });
  waiting.get("0 2").reject(new Error("could not be computed"));
  await soon();
  assert.deepEqual(heard.map(({ type, col, tile: name }) => [type, col ?? name]), [["tile", 1], ["failed", "0 0 2"]]);
  assert.equal(heard[0].peak, heard[0].mass); // of single cells they are the same
  assert.equal(engine.tiles.size, 0);
});

test("what stays the same is asked for once, and a failure may be tried again", async () => {
  let fails = true;
  const { remote, asked } = source(async () => {
    if (fails) throw new Error("not now");
    return { entropy: Float32Array.of(0, 1), received: Float32Array.of(2, 3) };
  });
  await assert.rejects(remote.received(0, 0), /not now/);
  fails = false;
  assert.deepEqual([...(await remote.received(0, 0))], [2, 3]);
  assert.deepEqual([...(await remote.rowStatistic(0, 0, "effective"))], [1, Math.fround(Math.E)]);
  assert.equal(asked.length, 2);
});

test("what is to know of a layer that is not open yet is asked for once, when it is looked at", async () => {
  const { remote, asked } = source(async (what) => (what === "layer" ? { info: { layer: 7, ranges: null, dim: 8 }, controls: [], bound: 2.5 } : {}));
  assert.equal(remote.layer(7).dim, undefined);
  const [head, ranges] = await Promise.all([remote.head(7, 0), remote.ranges(7)]);
  assert.equal(await remote.head(7, 0), head);
  assert.equal(ranges, null);
  assert.deepEqual(asked.map(({ what, parameters }) => [what, parameters.layer]), [["layer", 7]]);
  assert.deepEqual([remote.layer(7).dim, remote.meta.bound], [8, 2.5]);
});
