// The zooms of a picture: how far it is pooled, and the next coarser one.

export const BASE = 1024;
export const TILE = 256;

/** The zoom at which the whole matrix fits into BASE pixels: one pixel is 2^zoom x 2^zoom cells. */
export function baseZoom(length) {
  let zoom = 0;
  while (Math.ceil(length / 2 ** zoom) > BASE) zoom += 1;
  return zoom;
}

/** The next coarser picture: 2 x 2 pixels become one. counts[r]: the queries behind pixel row r. */
export function halve(picture, counts) {
  const rows = Math.ceil(picture.rows / 2);
  const cols = Math.ceil(picture.cols / 2);
  const mass = new Float32Array(rows * cols);
  const peak = new Float32Array(rows * cols);
  const nextCounts = new Float64Array(rows);
  for (let r = 0; r < picture.rows; r += 1) nextCounts[r >> 1] += counts[r];
  for (let r = 0; r < picture.rows; r += 1) {
    const share = counts[r] / nextCounts[r >> 1];
    for (let c = 0; c < picture.cols; c += 1) {
      const to = (r >> 1) * cols + (c >> 1);
      const from = r * picture.cols + c;
      mass[to] += share * picture.mass[from];
      const high = picture.peak[from];
      if (high > peak[to] || high !== high) peak[to] = high; // a row that was refused stays refused
    }
  }
  return { picture: { rows, cols, mass, peak }, counts: nextCounts };
}
