// Any number of the lesson as the products and sums that it is: the twin of opened.py.
import { cosine, dot, norm } from "./formula.js";

const NAME = /^(\w+)\[(\d+)(?:,(\d+))?\]$/;
const AROUND = new Set(["raw_q", "raw_k", "x", "o", "out"]);
const PLAIN = new Set(["dot", "scaled", "exp", "sum", "weight", "z", "size_q", "size_k", "cosine"]);

const total = (terms) => terms.reduce((sum, t) => sum + t.a * t.b, 0);

export class Book {
  constructor(lesson, head, switches) {
    this.lesson = lesson;
    this.head = head;
    this.switches = switches;
    this.scores = lesson.scores(head, switches);
    this.weights = lesson.weights(head, switches);
    this.peak = this.scores.map((row) => Math.max(...row));
    this.raised = this.scores.map((row, i) => row.map((s) => (s === -Infinity ? 0 : Math.exp(s - this.peak[i]))));
    this.sums = this.raised.map((row) => row.reduce((a, b) => a + b, 0));
  }

  /** Whether `name` opens here. */
  has(name) {
    const match = NAME.exec(name);
    if (!match) return false;
    if (PLAIN.has(match[1])) return true;
    if (match[1] === "q" || match[1] === "k" || match[1] === "v" || AROUND.has(match[1])) return this.lesson.open(this.head);
    return false;
  }

  open(name) {
    const [, kind, first, second] = NAME.exec(name);
    return { name, terms: [], plus: [], wrap: "", leaf: false, ...this[`_${kind}`](Number(first), Number(second)) };
  }

  _q(i, c) {
    return this._projected("q", i, c, this.lesson.q(this.head)[i][c]);
  }

  _k(i, c) {
    return this._projected("k", i, c, this.lesson.k(this.head)[i][c]);
  }

  _v(i, c) {
    return this._products("v", i, c, this.lesson.v(this.head)[i][c]);
  }

  _raw_q(i, c) {
    return this._products("q", i, c, null);
  }

  _raw_k(i, c) {
    return this._products("k", i, c, null);
  }

  _projected(which, i, c, value) {
    const { cos, sin } = this.lesson.around;
    if (!cos || !sin) return this._products(which, i, c, value);
    const half = Math.floor(this.lesson.d / 2);
    const [other, sign] = c < half ? [c + half, -1] : [c - half, 1];
    const minus = sign < 0 ? "−" : "";
    const raw = (at) => this._products(which, i, at, null).value;
    return {
      value,
      formula: `${which} = raw_${which} · cos ${sign < 0 ? "−" : "+"} raw_${which}′ · sin`,
      terms: [
        { left: `raw_${which}[${i},${c}]`, a: raw(c), right: `cos[${i},${c}]`, b: cos[i][c] },
        { left: `raw_${which}[${i},${other}]`, a: raw(other), right: `${minus}sin[${i},${c}]`, b: sign * sin[i][c] },
      ],
    };
  }

  _products(which, i, c, value) {
    const around = this.lesson.around;
    const [weight, bias] = [around[`w${which}`][c], around[`b${which}`]];
    const terms = Array.from(weight, (b, m) => ({ left: `x[${i},${m}]`, a: around.x[i][m], right: `W${which}[${c},${m}]`, b }));
    const plus = bias ? [[`b${which}[${c}]`, bias[0][c]]] : [];
    const made = total(terms) + (bias ? bias[0][c] : 0);
    return {
      value: value === null ? made : value,
      formula: `Σₘ x[${i},m] · W${which}[${c},m]${bias ? ` + b${which}` : ""}`, terms, plus,
    };
  }

  _x(i, m) {
    return { value: this.lesson.around.x[i][m], formula: "", leaf: true };
  }

  _dot(i, j) {
    const [q, k] = [this.lesson.q(this.head)[i], this.lesson.k(this.head)[j]];
    return {
      value: dot(q, k), formula: `Σ_c q[${i},c] · k[${j},c]`,
      terms: Array.from(q, (a, c) => ({ left: `q[${i},${c}]`, a, right: `k[${j},${c}]`, b: k[c] })),
    };
  }

  _size_q(i) {
    return this._size("q", i, this.lesson.q(this.head)[i]);
  }

  _size_k(j) {
    return this._size("k", j, this.lesson.k(this.head)[j]);
  }

  _size(which, i, vector) {
    const terms = Array.from(vector, (a, c) => ({ left: `${which}[${i},${c}]`, a, right: `${which}[${i},${c}]`, b: a }));
    return { value: norm(vector), formula: `|${which}| = √(Σ_c ${which}[${i},c]²)`, terms, wrap: "sqrt" };
  }

  _cosine(i, j) {
    const [q, k] = [this.lesson.q(this.head)[i], this.lesson.k(this.head)[j]];
    const sizes = norm(q) * norm(k);
    return {
      value: cosine(q, k), formula: "q·k / (|q| |k|)",
      terms: [{ left: `dot[${i},${j}]`, a: dot(q, k), right: `1/(size_q[${i}]·size_k[${j}])`, b: sizes ? 1 / sizes : 0 }],
    };
  }

  _scaled(i, j) {
    const { scale, temperature } = this.switches;
    const a = this.lesson.dots(this.head)[i][j];
    const b = (scale ? this.lesson.scale : 1) / temperature;
    const right = (scale ? "scale" : "1") + (temperature === 1 ? "" : "/T");
    return { value: a * b, formula: `q·k × ${right}`, terms: [{ left: `dot[${i},${j}]`, a, right, b }] };
  }

  _exp(i, j) {
    const score = this.scores[i][j];
    if (score === -Infinity) {
      return { value: 0, formula: "−∞", plus: [[`scaled[${i},${j}] + (−∞)`, score]], wrap: "exp" };
    }
    return {
      value: this.raised[i][j], formula: "e^(scaled − max)", wrap: "exp",
      plus: [[`scaled[${i},${j}]`, score], [`−max[${i}]`, -this.peak[i]]],
    };
  }

  _sum(i) {
    const plus = [];
    this.scores[i].forEach((s, j) => { if (s !== -Infinity) plus.push([`exp[${i},${j}]`, this.raised[i][j]]); });
    return { value: this.sums[i], formula: `Σⱼ exp[${i},j]`, plus };
  }

  _weight(i, j) {
    const b = this.sums[i] ? 1 / this.sums[i] : 0;
    return {
      value: this.weights[i][j], formula: "exp / sum",
      terms: [{ left: `exp[${i},${j}]`, a: this.raised[i][j], right: `1/sum[${i}]`, b }],
    };
  }

  _z(i, c) {
    return this._mixed(i, c, this.weights[i], this.scores[i]);
  }

  _mixed(i, c, weight, score) {
    const terms = [];
    this.lesson.v(this.head).forEach((v, j) => {
      if (score[j] !== -Infinity) terms.push({ left: `weight[${i},${j}]`, a: weight[j], right: `v[${j},${c}]`, b: v[c] });
    });
    return { value: total(terms), formula: `Σⱼ weight[${i},j] · v[j,${c}]`, terms };
  }

  _o(i, m) {
    const z = this.lesson.output(this.head, i);
    const terms = z.map((a, c) => ({ left: `z[${i},${c}]`, a, right: `Wo[${m},${c}]`, b: this.lesson.around.wo[m][c] }));
    return { value: total(terms), formula: `Σ_c z[${i},c] · Wo[${m},c]`, terms };
  }

  _out(i, m) {
    const { residual, attention } = this.lesson.around;
    const mine = this._o(i, m).value;
    return {
      value: residual[i][m] + attention[i][m], formula: "residual + o + rest",
      plus: [[`residual[${i},${m}]`, residual[i][m]], [`o[${i},${m}]`, mine], [`rest[${i},${m}]`, attention[i][m] - mine]],
    };
  }
}
