// The page: one selection (word, other word, head), three switches, eight steps, and the panel that opens numbers.
import { fill, h, percent, spokenLabel, shownLabel } from "./dom.js";
import { Lesson } from "./lesson.js";
import { Book } from "./opened.js";
import { Panel } from "./panel.js";
import { STEPS } from "./steps.js";

const TEMPERATURES = [0.25, 0.5, 1, 2, 4];

class Page {
  constructor(packed) {
    this.packed = packed;
    this.lesson = new Lesson(packed);
    this.language = packed.language;
    this.state = { i: this.lesson.word, j: 0, head: this.lesson.head, switches: this.lesson.own() };
    this.state.j = this.top();
    this.read();
    this.panel = new Panel(this);
    this.build();
    document.addEventListener("click", (event) => {
      const button = event.target.closest("[data-open], [data-key], [data-head], [data-word]");
      if (!button) return;
      const { open, key, head, word } = button.dataset;
      if (open !== undefined) this.open(open, button);
      else if (key !== undefined) this.choose(this.state.i, Number(key), button);
      else if (head !== undefined) this.set({ head: Number(head) }, `[data-head="${head}"]`);
      else this.follow(Number(word));
    });
    let wait = 0, width = window.innerWidth;
    window.addEventListener("resize", () => {
      if (window.innerWidth === width) return; // a phone's address bar changes the height only
      width = window.innerWidth;
      clearTimeout(wait);
      wait = setTimeout(() => this.draw(), 120);
    });
    window.addEventListener("hashchange", () => { if (!location.hash.startsWith("#step-") && this.read()) this.draw(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  get words() {
    return this.packed.words[this.language];
  }

  say(key, more = {}) {
    return fill(this.words[key], { ...this.facts(), ...more });
  }

  facts() {
    const { lesson, state } = this, kind = [state.i, state.j, state.head, this.language].join();
    if (this.told === undefined || this.told.kind !== kind) this.told = { kind, facts: this.tell(lesson, state) };
    return this.told.facts;
  }

  tell(lesson, state) {
    const own = lesson.row(state.head, state.i);
    const most = own.indexOf(Math.max(...own));
    return {
      n: lesson.n, d: lesson.d, root: Number(Math.sqrt(lesson.d).toPrecision(3)), width: lesson.around ? lesson.around.x[0].length : "?",
      layer: lesson.layer, head: state.head, heads: lesson.heads, kv: lesson.kv_heads, model: lesson.model, i: state.i, j: state.j,
      word: spokenLabel(lesson.labels[state.i]), other: spokenLabel(lesson.labels[state.j]), target: spokenLabel(lesson.labels[most]),
      percent: percent(own[most]), mask: this.words[lesson.masked ? "on" : "off"],
    };
  }

  /** The key that the followed word reads most, as the switches stand. */
  top() {
    const row = this.lesson.row(this.state.head, this.state.i, this.state.switches);
    return row.indexOf(Math.max(...row));
  }

  book() {
    const { head, switches } = this.state, kind = JSON.stringify([head, switches]);
    if (this.kept === undefined || this.kept.kind !== kind) this.kept = { kind, book: new Book(this.lesson, head, switches) };
    return this.kept.book;
  }

  seen() {
    return this.lesson.visible(this.state.switches.mask);
  }

  wide() {
    return window.innerWidth >= 700;
  }

  switched() {
    return JSON.stringify(this.state.switches) !== JSON.stringify(this.lesson.own());
  }

  pair(text) {
    return `${this.say("chosen_pair")}${text ? `: ${text}` : ""}`;
  }

  open(name, from = null) {
    this.panel.open(name, from);
  }

  choose(i, j, from = null) {
    this.set({ i, j }, from ? `#${from.closest("section")?.id} [data-key="${j}"]` : null);
  }

  follow(i) {
    this.state.i = i;
    this.set({ j: this.top() });
  }

  reset() {
    this.set({ switches: this.lesson.own() });
  }

  set(change, focus = null) {
    Object.assign(this.state, change);
    this.draw();
    this.write();
    if (focus) document.querySelector(focus)?.focus();
  }

  /** The selection in the address, so that a link leads back to it. */
  write() {
    const { i, j, head, switches } = this.state;
    const said = new URLSearchParams({ word: i, key: j, head, scale: Number(switches.scale), mask: Number(switches.mask), t: switches.temperature, lang: this.language });
    history.replaceState(null, "", `#${said}`);
  }

  read() {
    const said = new URLSearchParams(location.hash.slice(1)), { lesson, state } = this;
    const whole = (name, most, otherwise) => (/^\d{1,4}$/.test(said.get(name) ?? "") && Number(said.get(name)) <= most ? Number(said.get(name)) : otherwise);
    state.i = whole("word", lesson.n - 1, state.i);
    state.head = whole("head", lesson.heads - 1, state.head);
    state.switches = {
      scale: Boolean(whole("scale", 1, Number(state.switches.scale))), mask: Boolean(whole("mask", 1, Number(state.switches.mask))),
      temperature: TEMPERATURES.includes(Number(said.get("t"))) ? Number(said.get("t")) : state.switches.temperature,
    };
    state.j = whole("key", lesson.n - 1, this.top());
    if (this.packed.words[said.get("lang")]) this.language = said.get("lang");
    return said.size > 0;
  }

  build() {
    const { lesson } = this;
    document.documentElement.lang = this.language;
    document.title = `${this.say("title")} — kizuki`;
    this.sentence = h("div", { class: "sentence", role: "group", "aria-label": this.say("tokens_label") },
      lesson.labels.map((label, i) => h("button", { type: "button", class: "word", "data-word": i }, spokenLabel(label), h("sub", {}, String(i)))));
    this.sentence.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = Math.min(lesson.n - 1, Math.max(0, this.state.i + step));
      this.follow(next);
      this.sentence.children[next].focus();
    });
    this.head = h("select", { "aria-label": this.say("head"), onchange: () => this.set({ head: Number(this.head.value) }) },
      Array.from({ length: lesson.heads }, (_, at) => h("option", { value: at }, String(at))));
    const toggle = (name) => h("button", { type: "button", class: "toggle", onclick: () => this.set({ switches: { ...this.state.switches, [name]: !this.state.switches[name] } }) });
    this.scale = toggle("scale");
    this.mask = toggle("mask");
    this.heat = h("input", { type: "range", min: 0, max: TEMPERATURES.length - 1, step: 1, "aria-label": this.say("temperature"),
      oninput: () => this.set({ switches: { ...this.state.switches, temperature: TEMPERATURES[Number(this.heat.value)] } }) });
    this.warmth = h("output");
    this.back = h("button", { type: "button", onclick: () => this.reset() }, this.say("reset"));
    this.status = h("p", { class: "status", role: "status" });
    this.subtitle = h("p", { class: "note" });
    const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
    this.steps = STEPS.map((Kind, k) => new Kind(this, k + 1));
    const facts = this.packed.provenance[this.language];
    document.body.replaceChildren(
      h("a", { class: "skip", href: "#step-1" }, this.say("contents")),
      h("header", { class: "top" }, h("h1", {}, h("span", { class: "mark" }, "気づき"), ` ${this.say("title")}`),
        h("div", { class: "tools" },
          h("button", { type: "button", id: "language", lang: this.language === "ja" ? "en" : "ja", onclick: () => this.speak(this.language === "ja" ? "en" : "ja") }, this.say("switch_language")),
          h("button", { type: "button", id: "theme", onclick: () => {
            const root = document.documentElement, now = root.dataset.theme ?? (dark() ? "dark" : "light");
            root.dataset.theme = now === "dark" ? "light" : "dark";
            this.draw();
          } }, this.say("theme"))), this.subtitle),
      h("aside", { class: "caution" }, this.say("caution")),
      h("div", { class: "bar-top", role: "region", "aria-label": this.say("settings") },
        this.sentence,
        h("div", { class: "switches", role: "group", "aria-label": this.say("settings") }, h("label", {}, this.say("head"), this.head), this.scale, this.mask,
          h("label", {}, this.say("temperature"), this.heat, this.warmth), this.back)),
      h("div", { class: "layout" },
        h("main", {}, h("p", { class: "note" }, this.say("follow_hint"), " ", this.say("open_hint")), this.status,
          h("nav", { class: "contents", "aria-label": this.say("contents") }, this.steps.map((_, k) => h("a", { href: `#step-${k + 1}` }, h("span", { class: "count" }, String(k + 1)), this.say(`step${k + 1}_title`)))),
          h("div", { class: "steps" }, this.steps.map((step) => step.section)),
          h("section", { class: "step" }, h("h2", {}, this.say("provenance")), h("dl", { class: "facts" }, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])))),
        this.panel.element));
    this.draw();
  }

  speak(language) {
    this.language = language;
    this.build();
    this.write();
    document.getElementById("language").focus();
  }

  draw() {
    const { state } = this, { switches } = state;
    this.subtitle.textContent = this.say("subtitle");
    [...this.sentence.children].forEach((word, i) => {
      word.setAttribute("aria-pressed", String(i === state.i));
      word.classList.toggle("read", i === state.j);
      word.tabIndex = i === state.i ? 0 : -1;
      word.style.setProperty("--deep", String(Math.sqrt(this.book().weights[state.i][i])));
    });
    const chosen = this.sentence.children[state.i]; // on a phone the sentence is one line that scrolls
    this.sentence.scrollLeft = chosen.offsetLeft - this.sentence.offsetLeft - (this.sentence.clientWidth - chosen.offsetWidth) / 2;
    this.head.value = String(state.head);
    for (const [button, name] of [[this.scale, "scale"], [this.mask, "mask"]]) {
      button.setAttribute("aria-pressed", String(switches[name]));
      button.textContent = `${this.say(`${name}_switch`)}: ${this.say(switches[name] ? "on" : "off")}`;
    }
    this.heat.value = String(TEMPERATURES.indexOf(switches.temperature));
    this.heat.setAttribute("aria-valuetext", `T = ${switches.temperature}`);
    this.warmth.textContent = String(switches.temperature);
    this.back.disabled = !this.switched();
    this.status.textContent = this.switched() ? this.say("not_as_model") : this.say("as_model");
    this.status.classList.toggle("warn", this.switched());
    this.steps.forEach((step) => step.draw());
    this.panel.draw();
  }
}

new Page(JSON.parse(document.getElementById("lesson").textContent));
