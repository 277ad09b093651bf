// One weight, number by number: from q_i and k_j to its share of the output row. The twin of A.steps().

/** cell: { q, k, scale, softcap (number or null), bias (number or null), lse, visible }. In the order of the
    formula; what comes after an absent key is what absence makes of it. */
export function chain({ q, k, scale, softcap, bias, lse, visible }) {
  const products = Float64Array.from(q, (x, d) => x * k[d]);
  let product = 0;
  for (const each of products) product += each;
  const scaled = scale * product;
  const capped = softcap === null ? scaled : softcap * Math.tanh(scaled / softcap);
  const biased = bias === null ? capped : capped + bias;
  const score = visible ? biased : -Infinity;
  const exponent = score - lse;
  return { products, product, scaled, capped, biased, score, exponent, weight: visible && lse !== -Infinity ? Math.exp(exponent) : 0 };
}

/** weight · v_j beside the output row: { part, along, size, whole }: `along` is the part of the output's length
    that points the output's way, as a share of it, so that the shares of all keys sum to 1. */
export function contribution(weight, v, output) {
  const part = Float64Array.from(v, (x) => weight * x);
  let inner = 0, square = 0, own = 0;
  for (let c = 0; c < part.length; c += 1) {
    inner += part[c] * output[c];
    square += output[c] * output[c];
    own += part[c] * part[c];
  }
  return { part, along: square > 0 ? inner / square : null, size: Math.sqrt(own), whole: Math.sqrt(square) };
}

/** The places of the `count` products that weigh most, the largest size first. */
export function largestOf(products, count) {
  return Array.from(products.keys()).sort((a, b) => Math.abs(products[b]) - Math.abs(products[a]) || a - b).slice(0, count);
}

export function largestSize(...lists) {
  let top = 0;
  for (const list of lists) for (const x of list) if (Math.abs(x) > top) top = Math.abs(x);
  return top || 1;
}
