// The microscope's arithmetic and the joined readings against Python's, on numbers that tests/test_panels.py wrote.
// node agree.mjs FIXTURE prints how many numbers were compared, or fails at the first that differs.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { chain, contribution } from "../../../src/kizuki/explorer/static/chain.js";
import { LocalHead } from "../../../src/kizuki/explorer/static/data.js";
import { Head } from "../../../src/kizuki/explorer/static/head.js";
import { byUnits, joinColumns, joinRows, readColumn, readRow } from "../../../src/kizuki/explorer/static/reading.js";
import { unitsOf } from "../../../src/kizuki/explorer/static/units.js";

const { heads } = JSON.parse(readFileSync(process.argv[2], "utf8"));
let compared = 0;

/** Equal to float32: a few roundings of the size, or of 1 where that is larger. */
function same(mine, theirs, what) {
  compared += 1;
  const slack = 2 ** -19 * Math.max(1, Math.abs(theirs));
  assert.ok(Math.abs(mine - theirs) <= slack, `${what}: ${mine} is not ${theirs}`);
}

for (const { parts, value, cells, starts, reads, readers, name } of heads) {
  const { queries, keys } = parts;
  const floats = (list) => Float32Array.from(list);
  const model = new Head({ ...parts, q: floats(parts.q), k: floats(parts.k), lse: floats(parts.lse), first: Int32Array.from(parts.first), stop: Int32Array.from(parts.stop) });
  const head = new LocalHead(0, 0, model, async () => ({ dim: value.dim, v: floats(value.v) }));
  for (const { query, key, products, dot, scaled, capped, score, weight, part, output } of cells) {
    const cell = await head.cell(query, key);
    const mine = chain({ ...cell, softcap: parts.softcap });
    products.forEach((x, c) => same(mine.products[c], x, `${name}: product ${c} of ${query}, ${key}`));
    same(mine.product, dot, `${name}: q·k of ${query}, ${key}`);
    same(mine.scaled, scaled, `${name}: scaled`);
    if (capped !== null) same(mine.capped, capped, `${name}: softcap`);
    if (score === null) assert.equal(mine.score, -Infinity);
    else same(mine.score, score, `${name}: score`);
    same(mine.weight, weight, `${name}: weight of ${query}, ${key}`);
    const mixed = await head.values(query, key);
    const out = contribution(mine.weight, mixed.v, mixed.output);
    part.forEach((x, c) => same(out.part[c], x, `${name}: weight · v`));
    output.forEach((x, c) => same(mixed.output[c], x, `${name}: output`));
  }
  const blank = Array.from({ length: keys }, () => "x");
  const { word } = unitsOf({ labels: blank, texts: blank, gaps: blank.map(() => ""), chips: blank.map(() => ""), tail: "", words: { starts, labels: starts.map(String) } });
  for (let g = 0; g < starts.length; g += 1) {
    const tokens = word.around(starts[g]);
    const rows = byUnits(joinRows(await Promise.all(tokens.map(async (i) => readRow(await head.row(i))))), word, "reads");
    for (const { token, weight } of rows.list) same(weight, reads[g][word.of[token]], `${name}: what group ${g} reads`);
    const columns = byUnits(joinColumns(await Promise.all(tokens.map(async (j) => readColumn(await head.column(j))))), word, "readers");
    for (const { token, weight } of columns.list) same(weight, readers[word.of[token]][g], `${name}: who reads group ${g}`);
  }
  assert.equal(queries, keys);
}
console.log(compared);
