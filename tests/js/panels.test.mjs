// The panels' arithmetic that needs no browser: selections of several, units, chains, and the squeezed URL.
import assert from "node:assert/strict";
import test from "node:test";
import { chain, contribution, largestOf } from "../../src/kizuki/explorer/static/chain.js";
import { colourTable, inkOn, signedColour, signedTable } from "../../src/kizuki/explorer/static/colour.js";
import { byUnits, joinColumns, joinRows, massShown, readRow, readTopRow } from "../../src/kizuki/explorer/static/reading.js";
import { formatTokens, parseTokens, toggled } from "../../src/kizuki/explorer/static/selection.js";
import { DEFAULTS, Store, formatHash, formatPin, parseHash, parsePin } from "../../src/kizuki/explorer/static/store.js";
import { unitsOf } from "../../src/kizuki/explorer/static/units.js";

const near = (a, b, slack = 1e-12) => assert.ok(Math.abs(a - b) <= slack, `${a} is not ${b}`);
const shape = { layers: [0, 5], heads: [0, 1], queries: 20, keys: 20, words: true };
const start = { ...DEFAULTS, layer: 5, head: 1, query: 4, key: 1 };

test("lists of tokens survive the URL, out of order and beyond the end", () => {
  assert.deepEqual(parseTokens("3-7.12", 100), [3, 4, 5, 6, 7, 12]);
  assert.equal(formatTokens([12, 3, 4, 5, 3]), "3-5.12");
  assert.deepEqual(parseTokens("12.3-5.4-6", 100), [3, 4, 5, 6, 12]);
  assert.deepEqual(parseTokens("3-999999999", 6), [3, 4, 5]);
  assert.deepEqual(toggled([1, 2, 3], [2]), [1, 3]);
  assert.deepEqual(toggled([1], [2, 3]), [1, 2, 3]);
});

test("all of the selection is in the URL, and a pin brings it back", () => {
  const state = { ...start, several: "3-5.9", unit: "word", against: "0.1", pins: formatPin({ ...start, several: "2-3" }), view: "1.5_0_8", tour: "3", lesson: "1", there: "7" };
  assert.deepEqual(parseHash(formatHash(state)), state);
  assert.deepEqual(parsePin(formatPin(state)), { layer: 5, head: 1, query: 4, key: 1, direction: "reads", unit: "word", several: "3-5.9" });
  assert.equal(parsePin("5_1_x_1_reads_token"), null);
  assert.deepEqual(parseHash("#p=<b>&t=1-&c=5&z=1_2&o=999"), {});
});

test("the other input is compared with only where there is one", () => {
  assert.equal(new Store({ ...start, against: "other" }, shape).state.against, "");
  assert.equal(new Store({ ...start, against: "other" }, { ...shape, other: true }).state.against, "other");
});

test("another token alone ends a selection of several, the other end does not", () => {
  const store = new Store({ ...start, several: "3-5" }, shape);
  store.set({ key: 3 });
  assert.equal(store.state.several, "3-5");
  store.set({ query: 9 });
  assert.equal(store.state.several, "");
});

test("units join texts and know their tokens", () => {
  const tokens = { labels: ["京 1/2", "京 2/2", " a", "b", "[END]"], texts: ["京", "", " a", "b", ""], gaps: ["", "", "", "\n", ""], chips: ["piece", "piece", "", "", "special"], tail: "", words: { starts: [0, 2, 4], labels: ["京", "a b", "[END]"] } };
  const { token, word } = unitsOf(tokens);
  assert.ok(!token.joined && word.joined);
  assert.deepEqual(word.texts, ["京", " a\nb", ""]);
  assert.deepEqual(word.chips, ["", "", "special"]);
  assert.deepEqual([...word.of], [0, 0, 1, 1, 2]);
  assert.deepEqual(word.around(3), [2, 3]);
  assert.equal(word.label(1), "京");
  assert.equal(unitsOf({ ...tokens, words: null }).word, null);
});

const A = [[1, 0, 0, 0], [0.4, 0.6, 0, 0], [0.2, 0.3, 0.5, 0], [0.1, 0.2, 0.3, 0.4]];
const row = (i) => readRow({ check: { ok: true }, weights: Float64Array.from(A[i]), score: null });
const column = (j) => ({ exact: true, bad: null, dense: Float64Array.from(A, (r) => r[j]), list: A.map((r, token) => ({ token, weight: r[j] })).filter((e) => e.weight > 0), total: A.reduce((s, r) => s + r[j], 0), score: null });

test("several queries read the mean of their rows, several keys are read by the sum of their columns", () => {
  const rows = joinRows([row(1), row(3)]);
  [0.25, 0.4, 0.15, 0.2].forEach((weight, j) => near(rows.dense[j], weight));
  near(rows.total, 1);
  near(massShown(rows, { count: 1 }), 0.4);
  const columns = joinColumns([column(0), column(2)]);
  [1, 0.4, 0.7, 0.4].forEach((weight, i) => near(columns.dense[i], weight));
  near(columns.total, 2.5);
  near(massShown(columns, { floor: 0.5 }), 1.7 / 2.5);
});

test("a refused row refuses the selection it is in", () => {
  const bad = readRow({ check: { ok: false, query: 1 }, weights: null, score: null });
  assert.equal(joinRows([row(0), bad]).bad.query, 1);
});

test("words: the sum over their keys, the mean over their queries, rows still sum to 1", () => {
  const { word } = unitsOf({ labels: ["a", "b", "c", "d"], texts: ["a", "b", "c", "d"], gaps: ["", "", "", ""], chips: ["", "", "", ""], tail: "", words: { starts: [0, 1, 3], labels: ["a", "bc", "d"] } });
  const W = (g, h) => {
    const [queries, keys] = [word.around(word.starts[g]), word.around(word.starts[h])];
    return queries.reduce((s, i) => s + keys.reduce((z, j) => z + A[i][j], 0), 0) / queries.length;
  };
  for (let g = 0; g < 3; g += 1) {
    const reads = byUnits(joinRows(word.around(word.starts[g]).map(row)), word, "reads");
    for (const { token, weight } of reads.list) near(weight, W(g, word.of[token]));
    near(reads.list.reduce((s, e) => s + e.weight, 0), 1);
    const readers = byUnits(joinColumns(word.around(word.starts[g]).map(column)), word, "readers");
    for (const { token, weight } of readers.list) near(weight, W(word.of[token], g));
    near(massShown(readers), 1);
  }
});

test("of a part of the readers no mass is claimed", () => {
  const top = { k: 1, weights: Float32Array.of(1, 0.5), keys: Uint16Array.of(0, 1), none: 65535 };
  const { word } = unitsOf({ labels: ["a", "b"], texts: ["a", "b"], gaps: ["", ""], chips: ["", ""], tail: "", words: { starts: [0], labels: ["ab"] } });
  assert.equal(massShown(byUnits(readTopRow(top, 1, 1), word, "reads")), 0.5);
  assert.equal(massShown(byUnits(readTopRow(top, 1, 1), word, "readers")), null);
});

test("the chain of a masked key ends at nothing, and the parts along the output sum to 1", () => {
  const cell = { q: [1, 2], k: [3, -1], scale: 0.5, softcap: null, bias: null, lse: 2, visible: true };
  assert.deepEqual([...chain(cell).products], [3, -2]);
  near(chain(cell).weight, Math.exp(0.5 - 2));
  near(chain({ ...cell, softcap: 2, bias: 0.25 }).score, 2 * Math.tanh(0.25) + 0.25);
  const masked = chain({ ...cell, visible: false });
  assert.deepEqual([masked.score, masked.weight], [-Infinity, 0]);
  assert.equal(chain({ ...cell, lse: -Infinity, visible: false }).weight, 0);
  const weights = [0.25, 0.75], v = [[1, 2], [-3, 0.5]];
  const output = [0, 1].map((c) => weights[0] * v[0][c] + weights[1] * v[1][c]);
  near(contribution(0.25, v[0], output).along + contribution(0.75, v[1], output).along, 1);
  assert.deepEqual(largestOf([1, -5, 2, 5], 3), [1, 3, 2]);
});

test("the signed map is darker on both sides of nothing, in the light, and brighter in the dark", () => {
  for (const dark of [false, true]) {
    const table = signedTable(dark);
    const grey = (t) => signedColour(table, t).match(/\d+/g).map(Number).reduce((s, x, n) => s + [0.2126, 0.7152, 0.0722][n] * x, 0);
    for (const side of [-1, 1]) for (let t = 0.2; t <= 1; t += 0.2) assert.ok((grey(side * t) > grey(side * (t - 0.2))) === dark, `${dark} ${side * t}`);
    assert.notEqual(signedColour(table, -1), signedColour(table, 1));
  }
});

test("ink is readable on every colour of both maps", () => {
  for (const dark of [false, true]) {
    const table = colourTable(dark);
    for (let step = 0; step < 256; step += 1) {
      const [r, g, b] = [0, 1, 2].map((n) => {
        const c = table[3 * step + n] / 255;
        return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
      });
      const light = 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
      const contrast = inkOn(table, step / 255) === "#fff" ? 1.05 / light : light / 0.05;
      assert.ok(contrast >= 4.5, `${dark} ${step}: ${contrast}`);
    }
  }
});
