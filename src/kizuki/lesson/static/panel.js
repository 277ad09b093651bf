// The panel where a number is opened: its formula, its products, and each part that opens in turn.
import { fill, h, opener, show } from "./dom.js";

const FEW = 8; // products shown at first; the rest is summed in one line that says how many it is

export class Panel {
  constructor(page) {
    this.page = page;
    this.trail = [];
    this.whole = false;
    this.body = h("div", { class: "opened-body" });
    this.element = h("aside", { id: "opened", tabindex: -1, "aria-live": "polite" }, this.body);
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
  }

  /** Open a number; from inside the panel it goes on the trail, from elsewhere it begins a new one. */
  open(name, from = null) {
    if (!this.page.book().has(name)) return;
    const inside = from !== null && this.element.contains(from);
    if (!inside) {
      this.trail = [];
      this.origin = document.activeElement;
    }
    this.trail.push(name);
    this.whole = false;
    this.draw();
    if (inside) this.element.focus();
  }

  back() {
    this.trail.pop();
    this.draw();
    this.element.focus();
  }

  close() {
    this.trail = [];
    this.draw();
    if (this.origin && this.origin.isConnected) this.origin.focus();
  }

  draw() {
    const { page } = this, say = (key, more) => page.say(key, more), book = page.book();
    const name = this.trail[this.trail.length - 1];
    this.element.classList.toggle("empty", name === undefined);
    this.element.setAttribute("aria-label", say("opened"));
    if (name === undefined || !book.has(name)) {
      this.body.replaceChildren(h("h2", {}, say("opened")), h("p", { class: "note" }, say("opened_empty")));
      return;
    }
    const it = book.open(name);
    const part = (label, number) => {
      const base = label.replace(/^1\//, "").replace(/ .*/, "");
      return book.has(base) ? h("button", { class: "link", type: "button", "data-open": base }, label) : label;
    };
    const order = it.terms.map((t, k) => [Math.abs(t.a * t.b), k]).sort((a, b) => b[0] - a[0] || a[1] - b[1]).map(([, k]) => k);
    const all = this.whole || it.terms.length <= FEW + 2;
    const kept = all ? it.terms.map((_, k) => k) : order.slice(0, FEW);
    const rest = all ? [] : order.slice(FEW);
    const absent = it.wrap === "exp" && it.plus[0][1] === -Infinity;
    const rows = kept.map((k) => {
      const t = it.terms[k];
      return h("tr", {}, h("td", { class: "name" }, part(t.left)), h("td", { class: "n" }, show(t.a, 5)), h("td", {}, "×"),
        h("td", { class: "n" }, show(t.b, 5)), h("td", { class: "name" }, part(t.right)), h("td", {}, "="), h("td", { class: "n" }, show(t.a * t.b, 5)));
    });
    if (rest.length) {
      const others = rest.reduce((sum, k) => sum + it.terms[k].a * it.terms[k].b, 0);
      rows.push(h("tr", { class: "rest" }, h("td", { colspan: 6 }, say("rest_terms", { count: rest.length })), h("td", { class: "n" }, show(others, 5))));
    }
    for (const [label, number] of absent ? [] : it.plus) {
      rows.push(h("tr", {}, h("td", { class: "name", colspan: 6 }, part(label)), h("td", { class: "n" }, show(number, 5))));
    }
    if (rows.length) {
      rows.push(h("tr", { class: "total" }, h("td", { colspan: 6 }, { exp: "e^Σ", sqrt: "√Σ" }[it.wrap] ?? say("sum")), h("td", { class: "n" }, show(it.value, 6))));
    }
    this.body.replaceChildren(...[
      h("div", { class: "opened-head" }, h("h2", {}, say("opened")),
        this.trail.length > 1 ? h("button", { type: "button", onclick: () => this.back() }, `← ${say("back")}`) : null,
        h("button", { type: "button", onclick: () => this.close() }, say("close"))),
      h("p", { class: "trail" }, this.trail.join(" › ")),
      h("p", { class: "formula" }, h("strong", {}, name), it.formula ? ` = ${it.formula}` : "", h("br"), `= ${show(it.value, 6)}`),
      it.leaf ? h("p", { class: "note" }, say("leaf")) : null,
      absent ? h("p", { class: "note" }, say("absent")) : null,
      rest.length ? h("p", { class: "note" }, say("products_shown", { shown: kept.length, count: it.terms.length })) : null,
      h("div", { class: "scroll" }, h("table", { class: "products" }, h("tbody", {}, rows))),
      rest.length ? h("button", { type: "button", class: "all", onclick: () => { this.whole = true; this.draw(); this.element.focus(); } },
        say("all_terms", { count: it.terms.length })) : null,
    ].filter(Boolean));
    this.body.scrollTop = 0;
  }
}
