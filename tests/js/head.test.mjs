// Numbers of one head against the formula written out plainly.
import assert from "node:assert/strict";
import test from "node:test";
import { Head } from "../../src/kizuki/explorer/static/head.js";
import { Engine, poolBlocks } from "../../src/kizuki/explorer/static/engine.js";
import { baseZoom, halve } from "../../src/kizuki/explorer/static/levels.js";

function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** A head of 13 queries and keys, dim 7 (no multiple of 4), with L from the plain formula. */
function make({ softcap = null, sink = null, window = 99, n = 13, dim = 7 } = {}) {
  const next = random(7);
  const numbers = (count) => Float32Array.from({ length: count }, () => 3 * (2 * next() - 1));
  const q = numbers(n * dim), k = numbers(n * dim);
  const first = Int32Array.from({ length: n }, (_, i) => Math.max(0, i - window));
  const stop = Int32Array.from({ length: n }, (_, i) => i + 1);
  stop[2] = first[2]; // an empty row
  const scale = 0.25;
  const plain = (i, j) => {
    let s = 0;
    for (let d = 0; d < dim; d += 1) s += q[i * dim + d] * k[j * dim + d];
    s *= scale;
    return softcap === null ? s : softcap * Math.tanh(s / softcap);
  };
  const lse = new Float32Array(n);
  const weights = [];
  for (let i = 0; i < n; i += 1) {
    let sum = sink === null ? 0 : Math.exp(sink);
    for (let j = first[i]; j < stop[i]; j += 1) sum += Math.exp(plain(i, j));
    const empty = stop[i] <= first[i];
    lse[i] = empty && sink === null ? -Infinity : Math.log(sum);
    weights.push(Array.from({ length: n }, (_, j) => (j >= first[i] && j < stop[i] ? Math.exp(plain(i, j)) / sum : 0)));
  }
  return { head: new Head({ queries: n, keys: n, dim, q, k, lse, first, stop, scale, softcap, sink }), weights };
}

const near = (a, b, slack = 1e-6) => assert.ok(Math.abs(a - b) <= slack, `${a} is not ${b}`);
const cases = { plain: {}, softcap: { softcap: 1.5 }, sink: { sink: 0.7 }, window: { window: 3 } };

for (const [name, options] of Object.entries(cases)) {
  test(`rows, columns, cells and checks: ${name}`, () => {
    const { head, weights } = make(options);
    for (let i = 0; i < head.queries; i += 1) {
      const row = head.row(i);
      for (let j = 0; j < head.keys; j += 1) {
        near(row[j], weights[i][j]);
        near(head.column(j)[i], weights[i][j]);
        near(head.cell(i, j).weight, weights[i][j]);
      }
      assert.ok(head.checkRow(i).ok, `row ${i}`);
    }
  });
}

test("an L that float32 rounding cannot explain is refused, a rounded one is not", () => {
  const { head } = make();
  head.lse[5] += 2 ** -21; // a few roundings
  assert.ok(head.checkRow(5).ok);
  head.lse[6] += 1e-3;
  assert.ok(!head.checkRow(6).ok);
  head.lse[7] = NaN;
  assert.ok(!head.checkRow(7).ok);
  head.stop[9] -= 1; // a mask that is not the recorded one
  assert.ok(!head.checkRow(9).ok);
});

test("a NaN in q stays in its row", () => {
  const { head } = make();
  head.q[4 * head.dim] = NaN;
  assert.ok(!head.checkRow(4).ok);
  assert.ok(head.checkRow(3).ok);
});

test("mass is the mean over queries of the sum over keys, peak the largest weight", () => {
  const { head, weights } = make();
  const { rows, cols, mass, peak } = poolBlocks(head, 0, 13, 0, 13, 4);
  assert.deepEqual([rows, cols], [4, 4]);
  for (let r = 0; r < rows; r += 1) {
    const queries = [0, 1, 2, 3].map((x) => 4 * r + x).filter((i) => i < 13);
    for (let c = 0; c < cols; c += 1) {
      const block = queries.map((i) => weights[i].slice(4 * c, 4 * c + 4));
      near(mass[r * cols + c], block.flat().reduce((a, b) => a + b, 0) / queries.length);
      near(peak[r * cols + c], Math.max(...block.flat()));
    }
  }
});

test("halving a picture gives the coarser picture", () => {
  const { head } = make();
  const fine = poolBlocks(head, 0, 13, 0, 13, 2);
  const { picture } = halve(fine, Float64Array.from([2, 2, 2, 2, 2, 2, 1]));
  const coarse = poolBlocks(head, 0, 13, 0, 13, 4);
  picture.mass.forEach((value, at) => near(value, coarse.mass[at]));
  picture.peak.forEach((value, at) => near(value, coarse.peak[at]));
});

test("the engine draws all rows in slices, leaves refused rows blank, and drops stale work", () => {
  const { head } = make();
  head.lse[6] += 1;
  const sent = [];
  const engine = new Engine((message) => sent.push(message));
  engine.receive({ type: "open", id: 1, parts: head });
  engine.receive({ type: "open", id: 2, parts: head });
  engine.receive({ type: "want", id: 1, tiles: [{ zoom: 0, row: 0, col: 0 }] }); // for a head that is gone
  while (engine.busy) engine.step();
  assert.ok(sent.every((message) => message.id === 2));
  const checked = sent.find((message) => message.type === "checked");
  assert.deepEqual(checked.bad, [6]);
  const band = sent.find((message) => message.type === "band");
  assert.ok(Number.isNaN(band.mass[6 * 13]) && !Number.isNaN(band.mass[5 * 13]));
  engine.receive({ type: "want", id: 2, tiles: [{ zoom: 1, row: 0, col: 0 }] });
  engine.receive({ type: "want", id: 2, tiles: [{ zoom: 0, row: 0, col: 0 }] }); // in place of what was wanted before
  engine.step();
  assert.ok(!engine.busy);
  assert.ok(Number.isNaN(sent.at(-1).peak[6 * 13 + 3]));
});

test("the base picture has at most 1024 pixels a side", () => {
  assert.deepEqual([1, 1024, 1025, 4096, 100000].map(baseZoom), [0, 0, 1, 2, 7]);
});
