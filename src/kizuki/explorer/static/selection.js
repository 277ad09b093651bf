// Several tokens at once: lists of token numbers, and how they are written in the URL ("3-7.12").

/** "3-7.12" -> [3, 4, 5, 6, 7, 12]: rising, each once, all below `count`. */
export function parseTokens(text, count) {
  const found = new Set();
  for (const part of text === "" ? [] : text.split(".")) {
    const [first, last = first] = part.split("-").map(Number);
    for (let i = first; i <= Math.min(last, count - 1); i += 1) found.add(i);
  }
  return [...found].sort((a, b) => a - b);
}

export function formatTokens(list) {
  const sorted = [...new Set(list)].sort((a, b) => a - b);
  const parts = [];
  for (let at = 0; at < sorted.length;) {
    let end = at;
    while (end + 1 < sorted.length && sorted[end + 1] === sorted[end] + 1) end += 1;
    parts.push(end > at ? `${sorted[at]}-${sorted[end]}` : String(sorted[at]));
    at = end + 1;
  }
  return parts.join(".");
}

/** The list with all of `tokens`, or, where it has them all already, without them. */
export function toggled(list, tokens) {
  const kept = new Set(list);
  const all = tokens.every((token) => kept.has(token));
  for (const token of tokens) all ? kept.delete(token) : kept.add(token);
  return [...kept].sort((a, b) => a - b);
}

export function between(a, b) {
  const [first, last] = a < b ? [a, b] : [b, a];
  return Array.from({ length: last - first + 1 }, (_, i) => first + i);
}
