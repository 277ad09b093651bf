// Tokens as they travel, and as the page uses them.
import assert from "node:assert/strict";
import test from "node:test";
import { blocksOf } from "../../src/kizuki/explorer/static/blocks.js";
import { unitsOf, written } from "../../src/kizuki/explorer/static/units.js";

test("what is named only where it is not the usual is there for every token", () => {
  const tokens = written({ texts: ["", "so", ""], labels: { 0: "[CLS]", 2: "o 2/2" }, gaps: { 1: " " }, chips: { 0: "special", 2: "piece" }, tail: "." });
  assert.deepEqual(tokens.labels, ["[CLS]", "so", "o 2/2"]);
  assert.deepEqual(tokens.gaps, ["", " ", ""]);
  assert.deepEqual(tokens.chips, ["special", "", "piece"]);
  assert.equal(tokens.tail, ".");
  assert.equal(unitsOf(tokens).word, null);
});

/** Texts in blocks: [units, whether the last one ends a line, whether the next one begins with a space]. */
function cut(texts, gaps = texts.map(() => "")) {
  const bounds = blocksOf({ texts, gaps });
  return bounds.slice(1).map((stop, block) => [stop - bounds[block], texts[stop - 1].endsWith("\n"), /^\s/.test(texts[stop] ?? "")]);
}

test("blocks end where the text ends a line, else before a space, else when they are full; none is lost", () => {
  const lines = Array.from({ length: 1000 }, (_, i) => (i % 100 === 99 ? "x\n" : " x"));
  assert.deepEqual(cut(lines), [[200, true, true], [200, true, true], [200, true, true], [200, true, true], [200, true, false]]);
  const words = Array.from({ length: 600 }, (_, i) => (i % 5 === 0 ? " un" : "happy"));
  assert.deepEqual(cut(words).map(([units]) => units), [255, 255, 90]);
  const solid = Array.from({ length: 600 }, () => "語");
  assert.deepEqual(cut(solid).map(([units]) => units), [256, 256, 88]);
  const gaps = solid.map((_, i) => (i % 130 === 0 ? "\n" : "")); // what a tokenizer leaves out between tokens
  assert.deepEqual(cut(solid, gaps).map(([units]) => units), [130, 130, 130, 210]);
  assert.deepEqual(blocksOf({ texts: [], gaps: [] }), [0]);
});
