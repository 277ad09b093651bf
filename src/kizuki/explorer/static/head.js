// One head, recomputed from what was recorded: q [queries, dim], k [keys, dim] and L [queries], all
// float32. Arithmetic here is in double precision, so what differs from Python is Python's rounding.

const UNIT = 2 ** -24; // float32 unit roundoff

export function dot(a, aStart, b, bStart, dim) {
  let s0 = 0, s1 = 0, s2 = 0, s3 = 0, d = 0;
  for (; d + 3 < dim; d += 4) {
    s0 += a[aStart + d] * b[bStart + d];
    s1 += a[aStart + d + 1] * b[bStart + d + 1];
    s2 += a[aStart + d + 2] * b[bStart + d + 2];
    s3 += a[aStart + d + 3] * b[bStart + d + 3];
  }
  for (; d < dim; d += 1) s0 += a[aStart + d] * b[bStart + d];
  return s0 + s1 + (s2 + s3);
}

/** The largest norm among the keys before j that some query sees, for each j; NaN and Inf bound nothing. */
function reaches({ k, keys, dim, queries, first, stop }) {
  const edges = new Int32Array(keys + 1), up = new Float64Array(keys + 1);
  for (let i = 0; i < queries; i += 1) if (stop[i] > first[i]) { edges[first[i]] += 1; edges[stop[i]] -= 1; }
  for (let j = 0, seen = 0; j < keys; j += 1) {
    const norm = (seen += edges[j]) && Math.sqrt(dot(k, j * dim, k, j * dim, dim));
    up[j + 1] = norm < Infinity ? Math.max(up[j], norm) : up[j];
  }
  return up;
}

export class Head {
  /** parts: queries, keys, dim, q, k, lse, first, stop, scale, softcap (number or null), sink (number or null) */
  constructor(parts) {
    Object.assign(this, parts);
    this.keyNorm = reaches(this);
  }

  visible(i, j) {
    return j >= this.first[i] && j < this.stop[i];
  }

  score(i, j) {
    const scaled = this.scale * dot(this.q, i * this.dim, this.k, j * this.dim, this.dim);
    return this.softcap === null ? scaled : this.softcap * Math.tanh(scaled / this.softcap);
  }

  /** Every number of one cell, in the order in which the formula uses them. */
  cell(i, j) {
    const product = dot(this.q, i * this.dim, this.k, j * this.dim, this.dim);
    const scaled = this.scale * product;
    const score = this.softcap === null ? scaled : this.softcap * Math.tanh(scaled / this.softcap);
    const visible = this.visible(i, j);
    return { product, scale: this.scale, scaled, score, lse: this.lse[i], visible, weight: visible ? this.weightOf(i, score) : 0 };
  }

  weightOf(i, score) {
    const lse = this.lse[i];
    return lse === -Infinity ? 0 : Math.exp(score - lse);
  }

  /** Weights of query i on the visible keys of from..to-1, written to out[j]; four keys at a time, which
      reads q a quarter as often. */
  fillRow(i, from, to, out) {
    const { q, k, dim, scale, softcap } = this;
    const lse = this.lse[i];
    const begin = i * dim, end = begin + dim;
    let j = from;
    for (; j + 3 < to; j += 4) {
      let s0 = 0, s1 = 0, s2 = 0, s3 = 0;
      let k0 = j * dim, k1 = k0 + dim, k2 = k1 + dim, k3 = k2 + dim;
      for (let d = begin; d < end; d += 1) {
        const x = q[d];
        s0 += x * k[k0++];
        s1 += x * k[k1++];
        s2 += x * k[k2++];
        s3 += x * k[k3++];
      }
      out[j] = scale * s0;
      out[j + 1] = scale * s1;
      out[j + 2] = scale * s2;
      out[j + 3] = scale * s3;
    }
    for (; j < to; j += 1) out[j] = scale * dot(q, begin, k, j * dim, dim);
    if (softcap !== null) for (j = from; j < to; j += 1) out[j] = softcap * Math.tanh(out[j] / softcap);
    for (j = from; j < to; j += 1) out[j] = lse === -Infinity ? 0 : Math.exp(out[j] - lse);
  }

  /** Weights of query i over all keys. */
  row(i, out = new Float64Array(this.keys)) {
    out.fill(0);
    this.fillRow(i, this.first[i], this.stop[i], out);
    return out;
  }

  /** Weights with which every query reads key j. */
  column(j, out = new Float64Array(this.queries)) {
    for (let i = 0; i < this.queries; i += 1) out[i] = this.visible(i, j) ? this.weightOf(i, this.score(i, j)) : 0;
    return out;
  }

  /** L of row i, recomputed. */
  recomputed(i) {
    let top = this.sink === null ? -Infinity : this.sink;
    const scores = [];
    for (let j = this.first[i]; j < this.stop[i]; j += 1) {
      const s = this.score(i, j);
      scores.push(s);
      if (s > top || s !== s) top = s; // a NaN stays, and reaches the sum
    }
    if (top === -Infinity) return -Infinity;
    let sum = this.sink === null ? 0 : Math.exp(this.sink - top);
    for (const s of scores) sum += Math.exp(s - top);
    return top + Math.log(sum);
  }

  /** How far float32 arithmetic may lawfully move L of row i: the dot product's error bound
      dim * u * |q| |k| * scale, the sum's, and the storage of L itself. */
  tolerance(i) {
    const q = Math.sqrt(dot(this.q, i * this.dim, this.q, i * this.dim, this.dim));
    const seen = Math.max(1, this.stop[i] - this.first[i]);
    return UNIT * ((this.dim + 4) * Math.abs(this.scale) * q * this.keyNorm[this.stop[i]] + Math.sqrt(seen) + 16 + 4 * Math.abs(this.lse[i]));
  }

  agrees(i, lse) {
    if (lse === this.lse[i]) return true; // also both -Infinity
    return Math.abs(lse - this.lse[i]) <= this.tolerance(i);
  }

  checkRow(i) {
    const lse = this.recomputed(i);
    return { query: i, recorded: this.lse[i], recomputed: lse, tolerance: this.tolerance(i), ok: this.agrees(i, lse) };
  }
}
