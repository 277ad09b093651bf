// The three pictures: a matrix of pairs, a strip of numbers, the plane of q and k. Each works with pointer and keys.
import { h, shownLabel, show, sized, strength, theme } from "./dom.js";

function follow(canvas, at, act) {
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const found = at(event.clientX - box.left, event.clientY - box.top);
    if (found !== null) act(found, true);
  });
}

/** All pairs; rows are queries, columns keys. `choose(i, j)`, `open(i, j)`. */
export class Matrix {
  constructor({ labels, signed, choose, open }) {
    Object.assign(this, { labels, signed, choose, open });
    this.canvas = h("canvas", { tabindex: 0, role: "img", class: "pick" });
    this.legend = h("p", { class: "legend" });
    this.element = h("div", { class: "matrix" }, h("div", { class: "scroll" }, this.canvas), this.legend);
    follow(this.canvas, (x, y) => {
      const j = Math.floor((x - this.left) / this.cell), i = Math.floor((y - this.top) / this.cell);
      return i >= 0 && j >= 0 && i < labels.length && j < labels.length ? [i, j] : null;
    }, ([i, j]) => { this.choose(i, j); this.open(i, j); });
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      const last = labels.length - 1;
      if (step) {
        event.preventDefault();
        this.choose(Math.min(last, Math.max(0, this.i + step[0])), Math.min(last, Math.max(0, this.j + step[1])));
      } else if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        this.open(this.i, this.j);
      }
    });
  }

  draw(numbers, seen, i, j, room, legend, label) {
    this.i = i;
    this.j = j;
    const n = this.labels.length, colours = theme();
    const context0 = this.canvas.getContext("2d");
    context0.font = `12px ${colours.font}`;
    const names = this.labels.map(shownLabel);
    this.left = Math.min(110, Math.ceil(Math.max(...names.map((t) => context0.measureText(t).width))) + 10);
    this.cell = Math.max(9, Math.min(46, Math.floor((room - this.left - 2) / n)));
    const slant = this.cell < 40;
    this.top = slant ? Math.min(90, this.left) : 20;
    const context = sized(this.canvas, this.left + n * this.cell + 2, this.top + n * this.cell + 2);
    const letters = `${Math.max(9, Math.min(12, this.cell))}px ${colours.font}`;
    context.clearRect(0, 0, 9999, 9999);
    context.font = letters;
    context.textBaseline = "middle";
    const most = this.signed ? Math.max(...numbers.flat().map(Math.abs)) : 1;
    for (let a = 0; a < n; a += 1) {
      context.fillStyle = a === i ? colours.accent : colours.muted;
      context.textAlign = "right";
      context.fillText(names[a], this.left - 5, this.top + (a + 0.5) * this.cell, this.left - 8);
      context.fillStyle = a === j ? colours.accent : colours.muted;
      context.save();
      context.translate(this.left + (a + 0.5) * this.cell, this.top - 5);
      if (slant) context.rotate(-Math.PI / 2);
      context.textAlign = slant ? "left" : "center";
      context.fillText(names[a], 0, slant ? 0 : -5, slant ? this.top - 8 : this.cell - 2);
      context.restore();
      for (let b = 0; b < n; b += 1) {
        const x = this.left + b * this.cell, y = this.top + a * this.cell, number = numbers[a][b];
        if (!seen[a][b]) {
          context.save();
          context.beginPath();
          context.rect(x, y, this.cell, this.cell);
          context.clip();
          context.strokeStyle = colours.line;
          context.globalAlpha = 0.6;
          context.beginPath();
          for (let s = ((6 - ((x + y) % 6)) % 6); s < 2 * this.cell; s += 6) {
            context.moveTo(x + s, y);
            context.lineTo(x, y + s);
          }
          context.stroke();
          context.restore();
          continue;
        }
        const deep = strength(number, most);
        context.globalAlpha = deep;
        context.fillStyle = number < 0 ? colours.minus : colours.plus;
        context.fillRect(x, y, this.cell - 1, this.cell - 1);
        context.globalAlpha = 1;
        if (this.cell >= 30) {
          context.fillStyle = deep > 0.62 ? colours.panel : colours.ink;
          context.textAlign = "center";
          context.font = `11px ${colours.font}`;
          const text = this.signed ? (Math.round(number) + 0).toFixed(0).replace("-", "−") : number < 0.005 ? ".0" : number > 0.995 ? "1" : number.toFixed(2).slice(1);
          context.fillText(text, x + this.cell / 2, y + this.cell / 2);
          context.font = letters;
        }
      }
    }
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    context.strokeRect(this.left + j * this.cell - 0.5, this.top + i * this.cell - 0.5, this.cell, this.cell);
    context.lineWidth = 1;
    this.legend.replaceChildren(...scaleLegend(this.signed, most, legend));
    this.canvas.setAttribute("aria-label", label);
  }
}

/** The legend: swatches with the numbers they stand for. */
export function scaleLegend(signed, most, words) {
  const marks = signed ? [-1, -0.25, 0, 0.25, 1].map((m) => m * most) : [0, 0.01, 0.1, 0.3, 1];
  return [h("span", {}, words), ...marks.map((m) => {
    const swatch = h("i", { class: "swatch" });
    swatch.style.setProperty("--deep", String(strength(m, signed ? most : 1)));
    swatch.style.setProperty("--hue", m < 0 ? "var(--minus)" : "var(--plus)");
    return h("span", { class: "mark" }, swatch, signed ? show(m, 3) : String(m));
  })];
}

/** Rows of numbers as strips. A row has `name(c)`, the number that a cell opens, and perhaps `title(c)`, what it is. */
export class Strips {
  constructor({ open, label }) {
    Object.assign(this, { open, label, row: 0, place: 0 });
    this.canvas = h("canvas", { tabindex: 0, role: "img", class: "pick" });
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.element = h("div", { class: "strips" }, this.canvas, this.readout);
    const at = (x, y) => {
      const row = Math.floor(y / this.high), c = Math.floor((x - this.left) / this.cell);
      return row >= 0 && row < this.rows.length && c >= 0 && c < this.rows[row].numbers.length ? [row, c] : null;
    };
    follow(this.canvas, at, ([row, c]) => { this.go(row, c); this.open(this.rows[row].name(c)); });
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect();
      const found = at(event.clientX - box.left, event.clientY - box.top);
      if (found) this.say(...found);
    });
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (step) {
        event.preventDefault();
        this.go(this.row + step[0], this.place + step[1]);
      } else if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        this.open(this.rows[this.row].name(this.place));
      }
    });
  }

  go(row, c) {
    this.row = Math.min(this.rows.length - 1, Math.max(0, row));
    this.place = Math.min(this.rows[this.row].numbers.length - 1, Math.max(0, c));
    this.paint();
    this.say(this.row, this.place);
  }

  say(row, c) {
    const it = this.rows[row];
    this.readout.textContent = `${(it.title ?? it.name)(c)} = ${show(it.numbers[c])}`;
  }

  /** rows: {label, numbers, name, strong}. All share one scale. */
  draw(rows, room, label) {
    this.rows = rows;
    this.room = room;
    this.canvas.setAttribute("aria-label", label);
    this.row = Math.min(this.row, rows.length - 1);
    this.place = Math.min(this.place, rows[this.row].numbers.length - 1);
    this.paint();
    if (!this.readout.textContent) this.readout.textContent = this.label;
    else this.say(this.row, this.place);
  }

  paint() {
    const colours = theme();
    const context0 = this.canvas.getContext("2d");
    context0.font = `12px ${colours.font}`;
    this.left = Math.min(96, Math.ceil(Math.max(...this.rows.map((r) => context0.measureText(r.label).width))) + 8);
    const count = Math.max(...this.rows.map((r) => r.numbers.length));
    this.cell = (this.room - this.left - 2) / count;
    this.high = this.rows.length > 24 ? 13 : 18;
    const context = sized(this.canvas, this.room, this.rows.length * this.high);
    context.font = `12px ${colours.font}`;
    context.textBaseline = "middle";
    context.drawImage(this.cells(colours), 0, 0, this.room, this.rows.length * this.high);
    this.rows.forEach((row, r) => {
      const y = r * this.high;
      context.fillStyle = row.strong ? colours.accent : colours.muted;
      context.textAlign = "right";
      context.fillText(row.label, this.left - 5, y + this.high / 2, this.left - 6);
    });
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    context.strokeRect(this.left + this.place * this.cell - 1, this.row * this.high + 1, Math.max(this.cell, 3) + 1, this.high - 2);
  }

  /** The cells alone, painted again only when the numbers, the size or the colours are others. */
  cells(colours) {
    const stamp = [this.room, this.left, this.high, colours.plus, colours.minus, window.devicePixelRatio].join();
    const kept = this.kept;
    if (kept && kept.stamp === stamp && kept.rows.length === this.rows.length && kept.rows.every((numbers, r) => numbers === this.rows[r].numbers)) return kept.canvas;
    const canvas = h("canvas"), context = sized(canvas, this.room, this.rows.length * this.high);
    let most = 0;
    for (const row of this.rows) for (const number of row.numbers) most = Math.max(most, Math.abs(number));
    this.rows.forEach(({ numbers }, r) => {
      for (let c = 0; c < numbers.length; c += 1) {
        context.globalAlpha = strength(numbers[c], most);
        context.fillStyle = numbers[c] < 0 ? colours.minus : colours.plus;
        context.fillRect(this.left + c * this.cell, r * this.high + 1, Math.max(this.cell - (this.cell > 4 ? 1 : 0), 0.6), this.high - 2);
      }
    });
    this.most = most;
    this.kept = { stamp, canvas, rows: this.rows.map((row) => row.numbers) };
    return canvas;
  }
}

/** q and the keys in their plane, with equal axes; the dashed line is where a key's score is 0. */
export class Plane {
  constructor({ choose }) {
    this.choose = choose;
    this.canvas = h("canvas", { role: "img", class: "pick" });
    this.element = h("div", { class: "plane" }, this.canvas);
    follow(this.canvas, (x, y) => {
      let best = null, near = 26 ** 2;
      this.points.forEach(([px, py], j) => {
        const far = (px - x) ** 2 + (py - y) ** 2;
        if (far < near) [best, near] = [j, far];
      });
      return best;
    }, (j) => this.choose(j));
  }

  draw({ labels, query, along, beside, seen, weight, j, room, axes, label }) {
    const colours = theme();
    const wide = room, high = Math.min(460, Math.max(280, room * 0.62));
    const xs = [0, query, ...along], ys = [0, ...beside];
    const low = [Math.min(...xs), Math.min(...ys)], up = [Math.max(...xs), Math.max(...ys)];
    const zoom = Math.min((wide - 110) / (up[0] - low[0] || 1), (high - 70) / (up[1] - low[1] || 1));
    const middle = [(low[0] + up[0]) / 2, (low[1] + up[1]) / 2];
    const at = (x, y) => [wide / 2 + (x - middle[0]) * zoom, high / 2 - (y - middle[1]) * zoom];
    const context = sized(this.canvas, wide, high);
    context.clearRect(0, 0, wide, high);
    context.font = `12px ${colours.font}`;
    const [ox, oy] = at(0, 0);
    context.strokeStyle = colours.line;
    context.beginPath();
    context.moveTo(0, oy);
    context.lineTo(wide, oy);
    context.stroke();
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(ox, 0);
    context.lineTo(ox, high);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = colours.muted;
    context.textAlign = "right";
    context.fillText(`${axes[0]} →`, wide - 4, oy - 6);
    context.textAlign = "left";
    context.fillText(`↑ ${axes[1]}`, Math.min(ox + 5, wide - 120), 12);
    const [qx, qy] = at(query, 0);
    context.strokeStyle = colours.accent;
    context.lineWidth = 3;
    arrow(context, ox, oy, qx, qy);
    context.fillStyle = colours.accent;
    context.font = `bold 13px ${colours.font}`;
    context.fillText("q", qx - 4, qy + 18);
    context.font = `12px ${colours.font}`;
    context.lineWidth = 1.5;
    this.points = along.map((x, k) => at(x, beside[k]));
    const taken = this.points.map(([x, y]) => [x - 5, y - 5, x + 5, y + 5]);
    const order = [...along.keys()].sort((a, b) => (b === j) - (a === j) || weight[b] - weight[a] || a - b);
    for (const k of order) {
      const [x, y] = this.points[k];
      context.strokeStyle = colours.plus;
      context.fillStyle = colours.plus;
      if (k === j) {
        context.globalAlpha = 0.7;
        arrow(context, ox, oy, x, y);
        context.globalAlpha = 1;
      }
      context.beginPath();
      context.arc(x, y, 4 + 7 * Math.sqrt(weight[k]), 0, 2 * Math.PI);
      if (seen[k]) context.fill();
      context.stroke();
      const text = spread(labels[k]);
      const width = context.measureText(text).width;
      for (const [dx, dy] of [[12, 4], [-12 - width, 4], [-width / 2, -14], [-width / 2, 22]]) {
        const box = [x + dx, y + dy - 11, x + dx + width, y + dy + 3];
        if (box[0] < 0 || box[2] > wide || box[1] < 0 || box[3] > high) continue;
        if (taken.some((o) => box[0] < o[2] && box[2] > o[0] && box[1] < o[3] && box[3] > o[1])) continue;
        taken.push(box);
        context.fillStyle = k === j ? colours.accent : colours.ink;
        context.textAlign = "left";
        context.fillText(text, x + dx, y + dy);
        break;
      }
    }
    context.lineWidth = 1;
    this.canvas.setAttribute("aria-label", label);
  }
}

const spread = (label) => label.trim() || shownLabel(label);

function arrow(context, x0, y0, x1, y1) {
  const angle = Math.atan2(y1 - y0, x1 - x0);
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  for (const turn of [2.7, -2.7]) {
    context.moveTo(x1, y1);
    context.lineTo(x1 + 9 * Math.cos(angle + turn), y1 + 9 * Math.sin(angle + turn));
  }
  context.stroke();
}
