// The plane of one query and all keys: the direction of q, and the one in which the keys differ most beside it. The
// twin of kizuki.lesson's plane.py, for pages that hold q and k themselves.

const TURNS = 2000;

/** q [dim], k [keys × dim] -> { query: |q|, along, beside, residual }: residual is the share of Σ|k|² outside. */
export function planeOf(q, k, dim) {
  const n = k.length / dim, query = Math.hypot(...q);
  const forward = Float64Array.from(q, (x, c) => (query ? x / query : Number(c === 0)));
  const along = new Float64Array(n), beside = new Float64Array(n), rest = Float64Array.from(k);
  const gram = new Float64Array(dim * dim);
  let total = 0, kept = 0;
  for (let j = 0; j < n; j += 1) {
    for (let c = 0; c < dim; c += 1) along[j] += k[j * dim + c] * forward[c];
    for (let c = 0; c < dim; c += 1) {
      total += k[j * dim + c] ** 2;
      rest[j * dim + c] -= along[j] * forward[c];
    }
    for (let a = 0; a < dim; a += 1) for (let b = 0; b <= a; b += 1) gram[a * dim + b] += rest[j * dim + a] * rest[j * dim + b];
  }
  for (let a = 0; a < dim; a += 1) for (let b = 0; b < a; b += 1) gram[b * dim + a] = gram[a * dim + b];
  const side = dominant(gram, dim);
  for (let j = 0; j < n; j += 1) for (let c = 0; c < dim; c += 1) beside[j] += rest[j * dim + c] * side[c];
  const up = beside.reduce((sum, x) => sum + x, 0) >= 0 ? 1 : -1; // such a vector has two signs; most keys lie above
  for (let j = 0; j < n; j += 1) {
    beside[j] *= up;
    kept += along[j] ** 2 + beside[j] ** 2;
  }
  return { query, along, beside, residual: total ? Math.max(0, 1 - kept / total) : 0 };
}

/** The unit vector that a symmetric matrix stretches most: powers of it, from its longest column. */
function dominant(gram, dim) {
  let longest = 0;
  for (let c = 1; c < dim; c += 1) if (gram[c * dim + c] > gram[longest * dim + longest]) longest = c;
  let now = Float64Array.from({ length: dim }, (_, c) => gram[c * dim + longest]);
  for (let turn = 0; turn < TURNS; turn += 1) {
    const size = Math.hypot(...now) || 1;
    const unit = now.map((x) => x / size);
    now = unit.map((_, a) => unit.reduce((sum, x, b) => sum + gram[a * dim + b] * x, 0));
    const next = Math.hypot(...now) || 1;
    if (unit.every((x, c) => Math.abs(x - now[c] / next) < 1e-14)) break;
  }
  const size = Math.hypot(...now) || 1;
  return now.map((x) => x / size);
}
