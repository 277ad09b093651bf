// The lesson's arithmetic, the twin of formula.py line by line. Vectors are arrays; a matrix is an array of rows.

export function dot(a, b) {
  let sum = 0;
  for (let c = 0; c < a.length; c += 1) sum += a[c] * b[c];
  return sum;
}

export function dots(query, key) {
  return query.map((q) => key.map((k) => dot(q, k)));
}

export function logits(products, scale, temperature, seen) {
  return products.map((row, i) => row.map((s, j) => (seen[i][j] ? (s * scale) / temperature : -Infinity)));
}

export function softmaxRow(score) {
  const peak = Math.max(...score);
  if (peak === -Infinity) return score.map(() => 0);
  const raised = score.map((s) => Math.exp(s - peak));
  const sum = raised.reduce((a, b) => a + b, 0);
  return raised.map((e) => e / sum);
}

export function softmax(score) {
  return score.map(softmaxRow);
}

export function mixRow(weight, value) {
  return Array.from(value[0], (_, c) => weight.reduce((sum, w, j) => sum + w * value[j][c], 0));
}

export function entropy(weight) {
  return -weight.reduce((sum, w) => (w > 0 ? sum + w * Math.log(w) : sum), 0) + 0;
}

export function slope(weight) {
  let square = 0, cube = 0;
  for (const w of weight) {
    square += w * w;
    cube += w * w * w;
  }
  return Math.sqrt(Math.max(square - 2 * cube + square * square, 0));
}

export function norm(vector) {
  return Math.sqrt(dot(vector, vector));
}

export function cosine(a, b) {
  const size = norm(a) * norm(b);
  return size ? dot(a, b) / size : 0;
}

const mean = (numbers) => (numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : 0);

/** spread.measure of Python: what some rows are with this scale (null = off). */
export function measure(products, dim, scale, seen) {
  const score = logits(products, scale === null ? 1 : scale, 1, seen);
  const weight = softmax(score);
  const choice = weight.filter((_, i) => seen[i].reduce((a, b) => a + b, 0) > 1);
  const rows = choice.length ? choice : weight;
  const flat = score.flatMap((row, i) => row.filter((_, j) => seen[i][j]));
  const centre = mean(flat);
  return {
    dim,
    scaled: scale !== null,
    spread: Math.sqrt(mean(flat.map((s) => (s - centre) ** 2))),
    largest: mean(rows.map((row) => Math.max(...row))),
    entropy: mean(rows.map(entropy)),
    slope: mean(rows.map(slope)),
    saturated: mean(choice.map((row) => (Math.max(...row) > 0.99 ? 1 : 0))),
  };
}
