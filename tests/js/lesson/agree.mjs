// The page's arithmetic against Python's, on a lesson and expected numbers that tests/test_lesson.py wrote.
// node agree.mjs FIXTURE prints how many numbers were compared, or fails at the first that differs.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { entropy, measure, slope } from "../../../src/kizuki/lesson/static/formula.js";
import { Lesson } from "../../../src/kizuki/lesson/static/lesson.js";
import { Book } from "../../../src/kizuki/lesson/static/opened.js";

const { packed, cases, measured } = JSON.parse(readFileSync(process.argv[2], "utf8"));
const lesson = new Lesson(packed);
let compared = 0;

/** Equal to float32: 2^-23 of the size, or of 1 where that is larger. */
function same(mine, theirs, what) {
  compared += 1;
  const slack = 2 ** -23 * Math.max(1, Math.abs(theirs));
  assert.ok(Math.abs(mine - theirs) <= slack, `${what}: ${mine} is not ${theirs}`);
}

for (const { switches, numbers, rows, weights } of cases) {
  const book = new Book(lesson, lesson.head, switches);
  weights.forEach((head, h) => {
    const made = lesson.weights(h, switches);
    head.forEach((row, i) => lesson.row(h, i, switches).forEach((weight, j) => assert.equal(weight, made[i][j])));
    head.forEach((row, i) => row.forEach((weight, j) => same(made[i][j], weight, `weight of head ${h} at ${i}, ${j}`)));
  });
  rows.forEach(({ entropy: e, slope: s }, i) => {
    same(entropy(book.weights[i]), e, `entropy of row ${i}`);
    same(slope(book.weights[i]), s, `slope of row ${i}`);
  });
  for (const [name, theirs] of Object.entries(numbers)) {
    assert.ok(book.has(name), name);
    const it = book.open(name);
    same(it.value, theirs.value, name);
    assert.equal(it.formula, theirs.formula, name);
    assert.equal(it.wrap, theirs.wrap, name);
    assert.equal(it.terms.length, theirs.terms.length, name);
    it.terms.forEach((t, k) => {
      const [left, a, right, b] = theirs.terms[k];
      assert.deepEqual([t.left, t.right], [left, right], name);
      same(t.a, a, `${name}: ${left}`);
      same(t.b, b, `${name}: ${right}`);
    });
    it.plus.forEach(([label, number], k) => {
      assert.equal(label, theirs.plus[k][0], name);
      if (theirs.plus[k][1] === null) assert.equal(number, -Infinity, name);
      else same(number, theirs.plus[k][1], `${name}: ${label}`);
    });
  }
}
for (const [scale, theirs] of measured) {
  const mine = measure(lesson.dots(lesson.head), lesson.d, scale, lesson.visible(lesson.masked));
  for (const [name, number] of Object.entries(theirs)) {
    if (name === "scaled") assert.equal(mine.scaled, number);
    else same(mine[name], number, name);
  }
}
console.log(compared);
