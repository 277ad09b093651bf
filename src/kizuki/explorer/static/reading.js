// What one token reads, or who reads it, under one head: exact from a Head, partial from the top-k.

// { exact, bad, dense, total, list: [{ token, weight }] in falling order, score(token) or null }.
// dense: weight per token, or null. total: the weight there is in all (a row: 1 or what a sink leaves;
// a column: what the key received). bad: the failed check of a row that must not be drawn.

/** `row`: what an open head's row(query) gave. */
export function readRow({ check, weights, score }) {
  if (!check.ok) return { exact: true, bad: check, dense: null, list: [], total: 0, score };
  return { exact: true, bad: null, dense: weights, list: ranked(weights), total: sum(weights), score };
}

/** `column`: what an open head's column(key) gave. */
export function readColumn({ weights, score }) {
  return { exact: true, bad: null, dense: weights, list: ranked(weights), total: sum(weights), score };
}

export function readTopRow(top, query, total) {
  const list = [];
  for (let r = 0; r < top.k; r += 1) {
    const token = top.keys[query * top.k + r];
    if (token !== top.none) list.push({ token, weight: top.weights[query * top.k + r] });
  }
  return { exact: false, bad: null, dense: null, list, total, score: null };
}

export function readTopColumn(top, key, received) {
  const list = [];
  for (let at = 0; at < top.keys.length; at += 1) {
    if (top.keys[at] === key) list.push({ token: Math.floor(at / top.k), weight: top.weights[at] });
  }
  list.sort((a, b) => b.weight - a.weight || a.token - b.token);
  return { exact: false, bad: null, dense: null, list, total: received, score: null };
}

/** What several queries (count of them: a reading may be the sum of several) read together: the mean over them, so that
    rows that sum to 1 still do. */
export function joinRows(readings, count = readings.length) {
  const bad = readings.find((reading) => reading.bad)?.bad ?? null;
  return bad ? { exact: true, bad, dense: null, list: [], total: 0, score: null } : combined(readings, 1 / count);
}

/** Who reads several keys: the sum over them. */
export function joinColumns(readings) {
  return combined(readings, 1);
}

function combined(readings, factor) {
  const total = factor * readings.reduce((all, reading) => all + reading.total, 0);
  const exact = readings.every((reading) => reading.exact);
  if (readings.every((reading) => reading.dense)) {
    const dense = new Float64Array(readings[0].dense.length);
    for (const reading of readings) for (let i = 0; i < dense.length; i += 1) dense[i] += factor * reading.dense[i];
    return { exact, bad: null, dense, list: ranked(dense), total, score: null };
  }
  const found = new Map();
  for (const { list } of readings) for (const { token, weight } of list) found.set(token, (found.get(token) ?? 0) + factor * weight);
  return { exact, bad: null, dense: null, list: listed(found), total, score: null };
}

/** A reading by units of the text: sums over a unit's keys (reads), means over its queries (readers). Each
    entry stands for its unit by the unit's first token. */
export function byUnits(reading, units, direction) {
  const share = direction === "reads" ? () => 1 : (unit) => 1 / units.size(unit);
  const found = new Map();
  for (const { token, weight } of reading.list) {
    const unit = units.of[token];
    const first = units.starts[unit];
    found.set(first, (found.get(first) ?? 0) + share(unit) * weight);
  }
  const list = listed(found);
  let { total } = reading;
  // of readers the means sum to something else than the weights do, known only where all weights are
  if (direction === "readers") total = reading.exact ? list.reduce((all, { weight }) => all + weight, 0) : null;
  return { ...reading, dense: null, list, total, score: null };
}

function listed(found) {
  const list = [...found].map(([token, weight]) => ({ token, weight })).filter(({ weight }) => weight > 0);
  return list.sort((a, b) => b.weight - a.weight || a.token - b.token);
}

function ranked(dense) {
  const list = [];
  for (let token = 0; token < dense.length; token += 1) if (dense[token] > 0) list.push({ token, weight: dense[token] });
  return list.sort((a, b) => b.weight - a.weight || a.token - b.token); // ties to the earlier token
}

function sum(dense) {
  let total = 0;
  for (const weight of dense) total += weight;
  return total;
}

/** The share of `total` that the first `count` entries, or those of at least `floor`, carry; null where no
    total is known. */
export function massShown(reading, { count = Infinity, floor = 0 } = {}) {
  if (reading.total === null) return null;
  if (!(reading.total > 0)) return 1;
  let shown = 0;
  for (let r = 0; r < reading.list.length && r < count; r += 1) {
    if (reading.list[r].weight >= floor) shown += reading.list[r].weight;
  }
  return Math.min(1, shown / reading.total);
}

/** 0.93149 -> "93.1 %"; never "100.0 %" while something is missing, never "0.0 %" while something is shown. */
export function percent(share) {
  if (share === null) return "–";
  if (share >= 1 - 1e-9) return "100 %";
  if (share > 0.9995) return "> 99.9 %";
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  return `${(100 * share).toFixed(1)} %`;
}

/** What a measure is for equal weights on the keys that each query sees; null where that is not known. */
export function controlOf(meta, layer, measure) {
  const { ranges } = meta.layers.find((info) => info.layer === layer);
  return (ranges ?? null) === null ? null : meta.controls[ranges][measure];
}

/** A weight with four significant digits; small ones in powers of ten. */
export function digits(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-4 ? value.toExponential(3) : value.toPrecision(4);
  return text.replace("-", "−");
}
