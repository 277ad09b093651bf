// The page's small parts that need no browser.
import assert from "node:assert/strict";
import test from "node:test";
import { colourTable, weightScale } from "../../src/kizuki/explorer/static/colour.js";
import { decode } from "../../src/kizuki/explorer/static/decode.js";
import { findTokens } from "../../src/kizuki/explorer/static/chrome.js";
import { digits, massShown, percent, readTopColumn, readTopRow } from "../../src/kizuki/explorer/static/reading.js";
import { Store, fit, formatHash, parseHash } from "../../src/kizuki/explorer/static/store.js";
import { WORDS, fill } from "../../src/kizuki/explorer/static/words.js";

const shape = { layers: [2, 5, 29], heads: [0, 3], queries: 10, keys: 10 };
const start = { layer: 5, head: 3, query: 4, key: 1, direction: "reads", measure: "max", row: "entropy", pool: "mass", scale: "log" };

test("the selection survives the URL", () => {
  assert.deepEqual(parseHash(formatHash(start)), start);
  assert.deepEqual(parseHash("#l=x&q=-1&m=nonsense&zzz=1&k=7"), { key: 7 });
});

test("a selection outside the file becomes the nearest one inside", () => {
  const inside = fit({ ...start, layer: 17, head: 9, query: 999, key: -5 }, shape);
  assert.deepEqual([inside.layer, inside.head, inside.query, inside.key], [5, 3, 9, 0]);
});

test("stepping walks the layers that are there and stops at the ends", () => {
  const store = new Store(start, shape);
  const heard = [];
  store.listen((state, changed) => heard.push([state.layer, [...changed]]));
  store.step("layer", 1);
  store.step("layer", 1);
  assert.deepEqual(heard, [[29, ["layer"]]]);
});

test("both languages have the same words with the same blanks", () => {
  const blanks = (text) => (text.match(/\{\w+\}/g) ?? []).sort().join();
  assert.deepEqual(Object.keys(WORDS.en).sort(), Object.keys(WORDS.ja).sort());
  for (const name of Object.keys(WORDS.en)) assert.equal(blanks(WORDS.en[name]), blanks(WORDS.ja[name]), name);
  assert.equal(fill("{a} of {b}", { a: "{b}", b: 2 }), "{b} of 2");
});

test("lightness rises or falls steadily along both colour maps", () => {
  for (const dark of [false, true]) {
    const table = colourTable(dark);
    const luma = Array.from({ length: 256 }, (_, i) => 0.2126 * table[3 * i] ** 2.2 + 0.7152 * table[3 * i + 1] ** 2.2 + 0.0722 * table[3 * i + 2] ** 2.2);
    const sign = dark ? 1 : -1;
    for (let i = 4; i < 256; i += 4) assert.ok(sign * (luma[i] - luma[i - 4]) > -200, `${dark} ${i}`);
    assert.ok(sign * (luma[255] - luma[0]) > 100000);
  }
});

test("scales are fixed, monotone, and say where they stop painting", () => {
  for (const kind of ["log", "linear"]) {
    const scale = weightScale(kind);
    assert.equal(scale.at(scale.floor * 0.999), 0);
    assert.ok(scale.at(scale.floor) > 0);
    assert.equal(scale.at(1), 1);
    assert.ok(scale.at(0.2) < scale.at(0.3));
  }
});

test("mass shown counts what is listed and never claims too much", () => {
  const top = { k: 2, weights: Float32Array.of(0.5, 0.25, 1, 0), keys: Uint16Array.of(0, 1, 0, 65535), none: 65535 };
  const row = readTopRow(top, 0, 1);
  assert.equal(massShown(row), 0.75);
  assert.equal(massShown(row, { count: 1 }), 0.5);
  assert.deepEqual(readTopRow(top, 1, 1).list, [{ token: 0, weight: 1 }]);
  assert.deepEqual(readTopColumn(top, 0, 2).list, [{ token: 1, weight: 1 }, { token: 0, weight: 0.5 }]);
  assert.equal(massShown(readTopColumn(top, 0, 2)), 0.75);
  assert.deepEqual([1, 0.9999, 0.931, 0.0001, 0].map(percent), ["100 %", "> 99.9 %", "93.1 %", "< 0.1 %", "0.0 %"]);
  assert.deepEqual([0.12345678, 1e-7, 0, -2.5, Infinity, NaN, null].map(digits), ["0.1235", "1.000e−7", "0", "−2.500", "∞", "NaN", "–"]);
});

test("base64 blocks become the numbers they were", () => {
  const numbers = Float32Array.of(0, -1.5, 3.25, -Infinity);
  const text = Buffer.from(numbers.buffer).toString("base64");
  assert.deepEqual(decode(text, "f4"), numbers);
  assert.throws(() => decode(Buffer.from([1, 2, 3]).toString("base64"), "f4"), /3 bytes/);
});

test("search finds text across tokens, whatever the case, once a token", () => {
  const tokens = { labels: ["The", " cl", "ock", "京 1/2", "京 2/2"], texts: ["The", " cl", "ock", "京", ""], gaps: ["", "", "", "\n", ""] };
  assert.deepEqual(findTokens(tokens, "CLOCK"), [1]);
  assert.deepEqual(findTokens(tokens, "京"), [3]);
  assert.deepEqual(findTokens(tokens, ""), []);
  assert.deepEqual(findTokens(tokens, "zebra"), []);
});
