// What of a head's picture is coloured anew, and how sharp it may be drawn while its rows are still being read.
import assert from "node:assert/strict";
import test from "node:test";
import { Pictures } from "../../src/kizuki/explorer/static/pictures.js";

globalThis.document ??= {};
globalThis.document.createElement = () => ({
  put: [],
  getContext() {
    return { createImageData: (cols, rows) => ({ data: new Uint8Array(4 * cols * rows), rows }), putImageData: (image, x, y) => this.put.push([y, image.rows]) };
  },
});

/** A head of 4096 × 4096 cells, whose first picture has zoom 2, and 1024 × 1024 pixels. */
function opened() {
  const pictures = new Pictures(() => {}, () => {}, assert.fail);
  pictures.open({ queries: 4096, keys: 4096 }, null);
  return pictures;
}

function band(pictures, row, rows) {
  const values = new Float32Array(rows * 1024).fill(0.5);
  pictures.receive({ type: "band", id: pictures.id, zoom: 2, row, rows, mass: values, peak: values });
}

test("of a picture that grows only the rows that came are coloured", () => {
  const pictures = opened(), level = pictures.levels.get(2), seen = [];
  const paint = () => pictures.coloured("2 mass", level.mass, 1024, 1024, (bytes, at, value, r, c) => c === 0 && value === 0.5 && seen.push(r));
  const canvas = paint();
  assert.deepEqual([canvas.put, seen], [[[0, 1024]], []]);
  band(pictures, 0, 2);
  band(pictures, 2, 1);
  assert.equal(paint(), canvas);
  assert.deepEqual([canvas.put.slice(1), seen], [[[0, 2], [2, 1]], [0, 1, 2]]);
  paint();
  assert.equal(canvas.put.length, 3);
});

test("nothing sharper is drawn than the first picture until the rows in view are checked", () => {
  const pictures = opened();
  assert.equal(pictures.zoomFor(1, 300), 2);
  band(pictures, 0, 100); // 400 rows of the head
  assert.deepEqual([pictures.zoomFor(1, 300), pictures.zoomFor(2, 400), pictures.zoomFor(1, 401), pictures.zoomFor(1)], [0, 1, 2, 2]);
  band(pictures, 100, 924);
  pictures.receive({ type: "checked", id: pictures.id, bad: [], worst: 0 });
  assert.deepEqual([pictures.zoomFor(1), pictures.zoomFor(8)], [0, 3]);
});

test("coloured pictures are bounded, and the one that was looked at longest ago goes first", () => {
  const pictures = opened(), one = new Float32Array(1);
  const first = pictures.coloured("first", one, 1, 1, () => {});
  for (let i = 0; i < 239; i += 1) pictures.coloured(`tile ${i}`, one, 1, 1, () => {});
  assert.equal(pictures.coloured("first", one, 1, 1, () => {}), first);
  pictures.coloured("one more", one, 1, 1, () => {});
  assert.equal(pictures.painted.size, 240);
  assert.ok(pictures.painted.has("first") && !pictures.painted.has("tile 0"));
});
