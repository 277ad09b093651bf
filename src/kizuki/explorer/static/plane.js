// The picture of the plane of one query and all keys (axes.js).
import { byId, cssVariable, sizeCanvas, visibleLabel } from "./dom.js";

const DRAWN = 300; // keys in the picture, those of the largest weights; the page says so where there are more
const NAMED = 9;

/** Which keys are drawn: those of the largest weights, and the chosen one. */
export function drawnOf(weights, key) {
  const order = [...weights.keys()].sort((a, b) => (b === key) - (a === key) || weights[b] - weights[a] || a - b);
  return order.slice(0, DRAWN);
}

/** q and the keys with equal axes; the dashed line is where a score is 0. Returns the points, [x, y, key]. */
export function drawPlane({ query, along, beside }, { weights, seen, key, labels }) {
  const canvas = byId("plane"), wide = Math.max(200, canvas.parentElement.clientWidth), high = Math.min(400, Math.max(240, 0.6 * wide));
  const context = sizeCanvas(canvas, wide, high), drawn = drawnOf(weights, key);
  const ends = (values, more) => [Math.min(0, more, ...values), Math.max(0, more, ...values)];
  const [left, right] = ends(drawn.map((j) => along[j]), query), [low, top] = ends(drawn.map((j) => beside[j]), 0);
  const zoom = Math.min((wide - 120) / (right - left || 1), (high - 60) / (top - low || 1));
  const place = (x, y) => [wide / 2 + (x - (left + right) / 2) * zoom, high / 2 - (y - (low + top) / 2) * zoom];
  const [ox, oy] = place(0, 0), [accent, ink, muted, line] = ["--accent", "--ink", "--muted", "--line"].map(cssVariable);
  const stroke = (x0, y0, x1, y1, colour, width, dash = []) => {
    context.setLineDash(dash);
    Object.assign(context, { strokeStyle: colour, lineWidth: width });
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
  };
  context.clearRect(0, 0, wide, high);
  Object.assign(context, { font: "12px system-ui, 'Noto Sans CJK JP', sans-serif", textBaseline: "middle" });
  stroke(0, oy, wide, oy, line, 1);
  stroke(ox, 0, ox, high, muted, 1, [4, 4]);
  const points = drawn.map((j) => [...place(along[j], beside[j]), j]);
  const [qx, qy] = place(query, 0);
  stroke(ox, oy, qx, qy, accent, 3);
  stroke(ox, oy, points[0][0], points[0][1], ink, 1.5); // the chosen key is the first
  context.fillStyle = accent;
  context.fillText("q", qx + 4, qy - 10);
  const taken = [];
  points.forEach(([x, y, j], at) => {
    Object.assign(context, { fillStyle: j === key ? ink : muted, strokeStyle: j === key ? ink : muted, lineWidth: 1.5 });
    context.beginPath();
    context.arc(x, y, 3 + 8 * Math.sqrt(weights[j]), 0, 2 * Math.PI);
    if (seen[j]) context.fill();
    else context.stroke();
    const text = visibleLabel(labels[j], 12), size = context.measureText(text).width, from = x + 14 + size > wide ? x - 14 - size : x + 14;
    if (at >= NAMED || taken.some(([a, b, c]) => Math.abs(b - y) < 14 && a < from + size && from < c)) return;
    taken.push([from, y, from + size]);
    context.fillStyle = ink;
    context.fillText(text, from, y);
  });
  return points;
}
