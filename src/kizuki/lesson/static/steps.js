// The eight steps. Each is built once for a language and drawn again when the selection or a switch changes.
import { h, opener, percent, show, shownLabel } from "./dom.js";
import { cosine, dot, entropy, measure, norm, slope } from "./formula.js";
import { Matrix, Plane, scaleLegend, Strips } from "./pictures.js";

function table(page, names, rows, caption) {
  const title = (name) => (page.words[name] === undefined ? name : page.say(name));
  return h("div", { class: `scroll${rows.length > 20 ? " long" : ""}` }, h("table", {}, caption ? h("caption", {}, caption) : null,
    h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, title(name))))), h("tbody", {}, rows)));
}

function labelCell(page, j, does = "key") {
  const { i, j: other } = page.state;
  return h("th", { scope: "row", class: `token${j === i ? " followed" : ""}${j === other ? " other" : ""}` },
    h("button", { type: "button", class: "link", [`data-${does}`]: j }, shownLabel(page.lesson.labels[j])));
}

function bar(share) {
  const inner = h("i");
  inner.style.width = `${100 * share}%`;
  return h("td", { class: "barcell" }, h("span", { class: "bar" }, inner));
}

const n = (text) => h("td", { class: "n" }, text);

/** A step's section; `parts` are filled by `draw`. */
class Step {
  constructor(page, number) {
    this.page = page;
    this.number = number;
    this.text = h("p", { class: "lead" });
    this.body = h("div", { class: "body" });
    this.section = h("section", { id: `step-${number}`, class: "step", "aria-labelledby": `title-${number}` },
      h("h2", { id: `title-${number}` }, h("span", { class: "count" }, String(number)), page.say(`step${number}_title`)), this.text, this.body);
    this.build();
    for (const example of page.packed.examples.filter((each) => each.step === number)) this.section.append(card(page, example));
  }

  build() {}

  draw() {
    this.text.textContent = this.page.say(`step${this.number}_text`);
    this.fill();
  }

  note(key, more) {
    return h("p", { class: "note" }, this.page.say(key, more));
  }

  room() {
    return Math.max(220, this.body.clientWidth || 300);
  }
}

/** One example of the articles. */
function card(page, example) {
  const name = (label) => (label.startsWith("@") ? page.say(`label_${label.slice(1)}`) : label);
  return h("div", { class: `example${example.key === "exact_wrong" ? " wrong" : ""}` }, h("h3", {}, page.say("exact_title")), h("p", {}, page.say(example.key)),
    h("dl", {}, example.lines.flatMap(([label, numbers]) => [h("dt", {}, name(label)),
      h("dd", { class: label === "@article" ? "struck" : "" }, ...numbers.split("], [").map((row, k, all) =>
        h("span", {}, (k ? "[" : "") + row + (k < all.length - 1 ? "]" : ""))))])));
}

class X extends Step {
  build() {
    this.strips = new Strips({ open: (name) => this.page.open(name), label: this.page.say("strip_hint") });
    this.table = h("div");
    this.body.append(this.table, h("div", { class: "figure" }));
    this.figure = this.body.lastChild;
  }

  fill() {
    const { page } = this, { lesson, state } = page, around = lesson.around;
    const rows = lesson.labels.map((_, i) => h("tr", {}, n(String(i)), labelCell(page, i, "word"), n(String(lesson.ids[i])),
      ...(around ? [...around.x[i].slice(0, page.wide() ? 6 : 2)].map((x, c) => h("td", { class: "n" }, opener(`x[${i},${c}]`, x))) : [])));
    const columns = around ? Array.from({ length: page.wide() ? 6 : 2 }, (_, c) => `x[i,${c}]`) : [];
    this.table.replaceChildren(table(page, ["number", "token", "id", ...columns], rows));
    if (!around) {
      this.figure.replaceChildren(this.note(lesson.why));
      return;
    }
    this.table.append(this.note("terminal_first", { shown: columns.length, total: around.x[0].length }));
    this.figure.replaceChildren(h("h3", {}, page.say("step1_strip")), this.strips.element);
    this.strips.draw(lesson.labels.map((label, i) => ({ label: shownLabel(label), numbers: around.x[i], strong: i === state.i, name: (c) => `x[${i},${c}]` })),
      this.room(), page.say("step1_strip"));
    this.figure.append(h("p", { class: "legend" }, ...scaleLegend(true, this.strips.most, "x")));
  }
}

class Projected extends Step {
  build() {
    this.strips = new Strips({ open: (name) => this.page.open(name), label: this.page.say("strip_hint") });
    this.head = h("div");
    this.foot = h("div");
    this.legend = h("p", { class: "legend" });
    this.body.append(this.head, this.strips.element, this.legend, this.foot);
  }

  fill() {
    const { page } = this, { lesson, state } = page, { i, head } = state;
    const vectors = { q: lesson.q(head)[i], k: lesson.k(head)[i], v: lesson.v(head)[i] };
    const shared = lesson.kv_heads !== lesson.heads ? this.note("step2_shared") : null;
    this.head.replaceChildren(...[shared, h("h3", {}, page.say("step2_of"))].filter(Boolean));
    this.strips.draw(Object.entries(vectors).map(([name, numbers]) => ({ label: `${name}  |${name}| = ${norm(numbers).toFixed(1)}`, numbers, name: (c) => `${name}[${i},${c}]` })),
      this.room(), page.say("step2_of"));
    this.legend.replaceChildren(...scaleLegend(true, this.strips.most, "q, k, v"));
    const parts = [];
    if (lesson.open(head)) {
      const shown = page.wide() ? 8 : 3;
      parts.push(table(page, ["", ...Array.from({ length: shown }, (_, c) => `[${i},${c}]`)], Object.entries(vectors).map(([name, numbers]) =>
        h("tr", {}, h("th", { scope: "row" }, name), ...[...numbers.slice(0, shown)].map((x, c) => h("td", { class: "n" }, opener(`${name}[${i},${c}]`, x)))))),
      this.note("terminal_first", { shown, total: lesson.d }));
      if (lesson.around.cos) parts.push(this.note("step2_rotation"));
    } else {
      const command = page.packed.command.replace("HEAD", String(head));
      parts.push(h("p", { class: "warn" }, lesson.around ? page.say("closed_head", { head: lesson.head, command }) : page.say(lesson.why)));
    }
    this.foot.replaceChildren(...parts);
  }
}

class Scores extends Step {
  build() {
    const { page } = this;
    this.matrix = new Matrix({ labels: page.lesson.labels, signed: true, choose: (i, j) => page.choose(i, j), open: (i, j) => page.open(`dot[${i},${j}]`) });
    this.plane = new Plane({ choose: (j) => page.choose(page.state.i, j) });
    this.row = h("div");
    this.planeText = h("div");
    this.body.append(h("p", {}, page.say("step3_cosine")), h("h3", {}, page.say("step3_matrix")), this.matrix.element, this.note("matrix_hint"),
      this.row, this.planeText, this.plane.element, this.note("plane_hint"));
    this.residual = h("p", { class: "strong" });
    this.body.append(this.residual);
  }

  fill() {
    const { page } = this, { lesson, state } = page, { i, j, head } = state;
    const products = lesson.dots(head), seen = page.seen();
    this.matrix.draw(products, lesson.everything, i, j, this.room(), "q·k", page.pair(`q·k = ${show(products[i][j])}`));
    const q = lesson.q(head)[i];
    this.row.replaceChildren(h("h3", {}, page.say("step3_row"), h("small", {}, "  |q| = ", opener(`size_q[${i}]`, norm(q)))),
      table(page, ["token", "q·k", "|k|", "angle", "cosine", "steps_apart"], lesson.labels.map((_, k) => {
        const key = lesson.k(head)[k], cos = cosine(q, key);
        return h("tr", { class: k === j ? "chosen" : "" }, labelCell(page, k), h("td", { class: "n" }, opener(`dot[${i},${k}]`, products[i][k])),
          h("td", { class: "n" }, opener(`size_k[${k}]`, norm(key))), n(`${((Math.acos(Math.min(1, Math.max(-1, cos))) * 180) / Math.PI).toFixed(1)}°`), h("td", { class: "n" }, opener(`cosine[${i},${k}]`, cos, 3)), n(`|${i} − ${k}| = ${Math.abs(i - k)}`));
      })));
    this.planeText.replaceChildren(h("h3", {}, page.say("plane_title")), h("p", {}, page.say("plane_text")));
    const planes = lesson.planes, weight = page.book().weights[i];
    this.plane.draw({ labels: lesson.labels, query: planes.query[head][i], along: [...planes.along[head][i]], beside: [...planes.beside[head][i]],
      seen: seen[i], weight, j, room: this.room(), axes: [page.say("plane_along"), page.say("plane_beside")], label: page.say("plane_title") });
    this.residual.textContent = page.say("plane_residual", { residual: percent(planes.residual[head][i]) });
  }
}

class Scale extends Step {
  build() {
    this.one = h("div");
    this.real = h("div");
    this.body.append(this.one, h("p", {}, this.page.say("step4_drawn")), this.measured(this.page.packed.drawn), this.note("step4_gradient"), this.real);
  }

  measured(lines) {
    return table(this.page, ["d", "1/√d", "spread", "largest", "entropy", "slope", "saturated"], lines.map((line) => h("tr", { class: line.scaled ? "chosen" : "" },
      n(String(line.dim)), n(this.page.say(line.scaled ? "on" : "off")), n(line.spread.toFixed(2)), n(line.largest.toFixed(3)),
      n(line.entropy.toFixed(3)), n(line.slope.toFixed(3)), n(`${(100 * line.saturated).toFixed(0)} %`))));
  }

  fill() {
    const { page } = this, { lesson, state } = page, { i, j, head } = state;
    const book = page.book();
    const products = lesson.dots(head), own = lesson.visible(lesson.masked);
    this.one.replaceChildren(h("p", { class: "equation" }, "q·k = ", opener(`dot[${i},${j}]`, products[i][j]), "  →  ", opener(`scaled[${i},${j}]`, book.open(`scaled[${i},${j}]`).value),
      h("small", {}, `  ${page.pair("")}`)));
    this.real.replaceChildren(h("h3", {}, page.say("step4_real")),
      this.measured([measure(products, lesson.d, null, own), measure(products, lesson.d, lesson.scale, own)]), this.note("step4_real_note"));
  }
}

class Mask extends Step {
  build() {
    this.row = h("div");
    this.body.append(this.row);
  }

  fill() {
    const { page } = this, { lesson, state } = page, { i, head } = state;
    const [on, off] = [true, false].map((mask) => lesson.row(head, i, { ...state.switches, mask }));
    // What stands behind a weight opens as the switches stand; the other column is opened by the switch.
    const weight = (number, opens, j) => (opens ? h("td", { class: "n" }, opener(`weight[${i},${j}]`, number)) : n(number.toFixed(4)));
    this.row.replaceChildren(h("p", {}, page.say(lesson.masked ? "step5_own_on" : "step5_own_off")),
      table(page, ["token", "step5_with", "", "step5_without", ""], lesson.labels.map((_, j) => h("tr", { class: j === state.j ? "chosen" : "" }, labelCell(page, j),
        lesson.seen[i][j] ? weight(on[j], state.switches.mask, j) : h("td", { class: "n hidden" }, page.say("hidden")), lesson.seen[i][j] ? bar(on[j]) : h("td"), weight(off[j], !state.switches.mask, j), bar(off[j])))));
  }
}

class Softmax extends Step {
  build() {
    const { page } = this;
    this.row = h("div");
    this.matrix = new Matrix({ labels: page.lesson.labels, signed: false, choose: (i, j) => page.choose(i, j), open: (i, j) => page.open(`weight[${i},${j}]`) });
    this.heat = h("div");
    this.body.append(this.row, h("h3", {}, page.say("step6_matrix")), this.matrix.element, this.note("matrix_hint"), this.heat);
  }

  fill() {
    const { page } = this, { lesson, state } = page, { i, j, head } = state;
    const book = page.book(), seen = page.seen();
    this.row.replaceChildren(h("h3", {}, page.say("step6_row")),
      table(page, ["token", "scaled", "e^(s−max)", "weight", ""], lesson.labels.map((_, k) => h("tr", { class: k === j ? "chosen" : "" }, labelCell(page, k),
        ...(seen[i][k] ? [h("td", { class: "n" }, opener(`scaled[${i},${k}]`, book.scores[i][k])), h("td", { class: "n" }, opener(`exp[${i},${k}]`, book.raised[i][k])),
          h("td", { class: "n" }, opener(`weight[${i},${k}]`, book.weights[i][k])), bar(book.weights[i][k])]
          : [n("−∞"), n("0"), n("0"), h("td", { class: "hidden" }, page.say("hidden"))])))
        .concat(h("tr", { class: "total" }, h("th", { scope: "row" }, page.say("step6_sum")), n(""), h("td", { class: "n" }, opener(`sum[${i}]`, book.sums[i])),
          n(book.weights[i].reduce((a, b) => a + b, 0).toFixed(4)), h("td")))));
    this.matrix.draw(book.weights, seen, i, j, this.room(), page.say("legend_weight"), page.pair(`${page.say("weight")} = ${show(book.weights[i][j])}`));
    this.heat.replaceChildren(h("p", {}, page.say("step6_temperature")),
      table(page, ["temperature", "reads", "weight", "entropy", "slope"], [0.5, 1, 2, 4].map((t) => {
        const row = lesson.row(head, i, { ...state.switches, temperature: t }), top = row.indexOf(Math.max(...row));
        return h("tr", { class: t === state.switches.temperature ? "chosen" : "" }, n(`T = ${t}`), h("td", {}, shownLabel(lesson.labels[top])), n(row[top].toFixed(4)),
          n(entropy(row).toFixed(3)), n(slope(row).toFixed(3)));
      })));
  }
}

class Mix extends Step {
  build() {
    this.strips = new Strips({ open: (name) => this.page.open(name), label: this.page.say("strip_hint") });
    this.table = h("div");
    this.legend = h("p", { class: "legend" });
    this.body.append(h("h3", {}, this.page.say("step7_contributions")), this.table, this.note("step7_strips"), this.strips.element, this.legend);
  }

  fill() {
    const { page } = this, { lesson, state } = page, { i, head } = state;
    const book = page.book(), weight = book.weights[i], values = lesson.v(head), seen = page.seen()[i];
    const z = lesson.output(head, i, state.switches), shown = page.wide() ? 5 : 2;
    const keys = lesson.labels.map((_, k) => k).filter((k) => seen[k]);
    this.table.replaceChildren(table(page, ["token", "weight", ...Array.from({ length: shown }, (_, c) => `[${c}]`)],
      keys.map((k) => h("tr", { class: k === state.j ? "chosen" : "" }, labelCell(page, k), h("td", { class: "n" }, opener(`weight[${i},${k}]`, weight[k])),
        ...[...values[k].slice(0, shown)].map((x, c) => h("td", { class: "n" }, opener(`z[${i},${c}]`, weight[k] * x)))))
        .concat(h("tr", { class: "total" }, h("th", { scope: "row" }, "z"), n(weight.reduce((a, b) => a + b, 0).toFixed(4)), ...z.slice(0, shown).map((x, c) => h("td", { class: "n" }, opener(`z[${i},${c}]`, x)))))),
      this.note("terminal_first", { shown, total: z.length }));
    this.strips.draw([...keys.map((k) => ({ label: shownLabel(lesson.labels[k]), numbers: Array.from(values[k], (x) => x * weight[k]), strong: k === state.j, name: (c) => `z[${i},${c}]`, title: (c) => `weight[${i},${k}] · v[${k},${c}]` })),
      { label: "z", numbers: z, strong: true, name: (c) => `z[${i},${c}]` }], this.room(), page.say("step7_new"));
    this.legend.replaceChildren(...scaleLegend(true, this.strips.most, "z"));
  }
}

class Heads extends Step {
  build() {
    this.heads = h("div", { class: "heads" });
    this.stream = h("div");
    this.body.append(h("div"), h("p", { class: "note" }, this.page.say("step8_choose")), this.heads, this.stream);
    const strips = () => new Strips({ open: (name) => this.page.open(name), label: this.page.say("strip_hint") });
    [this.mine, this.after] = [strips(), strips()];
  }

  fill() {
    const { page } = this, { lesson, state } = page, { i, head } = state, around = lesson.around;
    this.body.firstChild.replaceChildren(h("h3", {}, page.say("step8_heads")));
    this.heads.replaceChildren(...Array.from({ length: lesson.heads }, (_, at) => {
      const row = lesson.row(at, i), top = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 3).filter((k) => row[k] > 0);
      return h("button", { type: "button", class: "headcard", "aria-pressed": String(at === head), "data-head": at },
        h("strong", {}, `${page.say("head")} ${at}`), ...top.map((k) => {
          const fill = h("i");
          fill.style.width = `${100 * row[k]}%`;
          return h("span", { class: "line" }, h("span", {}, shownLabel(lesson.labels[k])), h("span", { class: "bar" }, fill), h("span", {}, row[k].toFixed(3)));
        }), h("small", {}, `${page.say("entropy")} ${entropy(row).toFixed(2)}${around ? `  |W_O z| ${around.shares[at][i].toFixed(1)}` : ""}`));
    }));
    if (!lesson.open(head)) {
      this.stream.replaceChildren(h("p", { class: "warn" }, around ? page.say("closed_head", { head: lesson.head, command: page.packed.command.replace("HEAD", String(head)) }) : page.say(lesson.why)));
      return;
    }
    if (page.switched()) {
      this.stream.replaceChildren(h("p", { class: "warn" }, page.say("step8_switched"), " ", h("button", { type: "button", onclick: () => page.reset() }, page.say("reset"))));
      return;
    }
    const before = around.residual[i], added = around.attention[i], after = Float64Array.from(before, (x, m) => x + added[m]);
    this.stream.replaceChildren(h("h3", {}, page.say("step8_norms")),
      table(page, ["", "length"], [["step8_residual", norm(before)], ["step8_attention", norm(added)], ["step8_this", around.shares[head][i]], ["step8_out", norm(after)]]
        .map(([name, size]) => h("tr", {}, h("th", { scope: "row" }, page.say(name)), n(size.toFixed(2))))),
      h("h3", {}, page.say("step8_numbers")));
    const z = lesson.output(head, i), mine = around.wo.map((row) => dot(z, row));
    for (const [strips, label, numbers] of [[this.mine, "o", mine], [this.after, "out", after]]) {
      this.stream.append(strips.element);
      strips.draw([{ label, numbers, name: (m) => `${label}[${i},${m}]` }], this.room(), page.say("step8_numbers"));
      this.stream.append(h("p", { class: "legend" }, ...scaleLegend(true, strips.most, label)));
    }
  }
}

export const STEPS = [X, Projected, Scores, Scale, Mask, Softmax, Mix, Heads];
