// What the model's answer does when a head, a key or a weight is taken away: measured by Python on the live model,
// each beside the same done elsewhere at random.
import { byId, h, say, visibleLabel } from "./dom.js";
import { digits, percent } from "./reading.js";

const KINDS = ["zero", "mean", "key", "key_everywhere", "row"];

export class Cause {
  constructor(page) {
    this.page = page;
    this.found = null; // { asked, answer } of the newest intervention
    this.asking = null; // the AbortController of the one under way
    byId("cause-kind").addEventListener("change", () => this.show());
    byId("cause-weight").addEventListener("input", () => this.show());
    byId("cause-at").addEventListener("change", () => this.show());
    byId("cause-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.asking) this.asking.abort();
      else this.run();
    });
  }

  /** What the controls and the selection ask for. */
  asked() {
    const { layer, head, query, key } = this.page.store.state, last = this.page.meta.queries - 1;
    const position = byId("cause-at").value === "last" ? last : query;
    return { kind: byId("cause-kind").value, layer, head, query, key, position, weight: Math.round(1000 * byId("cause-weight").valueAsNumber), controls: Number(byId("cause-controls").value) };
  }

  show() {
    const { t, meta, language } = this.page;
    byId("cause").hidden = !meta.live;
    byId("cause-none").hidden = Boolean(meta.live);
    if (!meta.live) return; // the page says why
    if (this.language !== language) {
      const choose = (id, names, words) => {
        const { value } = byId(id);
        byId(id).replaceChildren(...names.map((name) => h("option", { value: name }, t(words(name)))));
        byId(id).value = value || names[0];
      };
      choose("cause-kind", KINDS, (name) => `cause_${name}`);
      choose("cause-at", ["query", "last"], (name) => `cause_at_${name}`);
      this.language = language;
    }
    byId("cause-weight").parentElement.hidden = byId("cause-kind").value !== "row";
    byId("cause-run").disabled = !byId("cause-weight").validity.valid;
    say(byId("cause-run"), t(this.asking ? "cause_stop" : "cause_run"));
    say(byId("cause-edit"), this.sentence(this.asked()));
    this.showFound();
  }

  /** An intervention in words, and where it is looked at. */
  sentence({ kind, layer, head, query, key, position, weight }) {
    const { t, meta: { tokens: { labels } } } = this.page;
    const name = (i) => t("quoted", { token: visibleLabel(labels[i]) });
    const change = t(`cause_do_${kind}`, { layer, head, query, key, query_name: name(query), key_name: name(key), weight: weight / 1000 });
    return `${change}${this.page.language === "ja" ? "" : " "}${t("cause_seen", { token: name(position), i: position })}`;
  }

  async run() {
    const { page } = this, asked = this.asked();
    const control = new AbortController();
    this.asking = control;
    say(byId("cause-status"), page.t("cause_running", { n: 2 + asked.controls }));
    this.show();
    try {
      this.found = { asked, answer: await page.data.cause(asked, control.signal) };
      say(byId("cause-status"), "");
    } catch (error) {
      say(byId("cause-status"), control.signal.aborted ? page.t("cause_stopped") : error.message);
    }
    this.asking = null;
    this.show();
  }

  /** The newest intervention for a file: sizes, then probabilities, a row each. */
  numbers() {
    const { asked, answer: { before, after, before_names: old, after_names: now, controls, sizes, unit, size, seed } } = this.found;
    const rows = [[unit, "this change", size], ...(controls ?? []).map((drawn, n) => [unit, `control ${drawn}`, sizes[n]])];
    for (const [name, names, values] of [["before", old, before], ["after", now, after]]) names.forEach((label, n) => rows.push([name, label, values[n]]));
    return { ...asked, change: this.sentence(asked), seed, columns: ["what", "name", "value"], rows };
  }

  showFound() {
    byId("cause-found").hidden = this.found === null;
    if (this.found === null) return;
    const { t } = this.page, { asked, answer } = this.found;
    const older = this.sentence(asked) !== this.sentence(this.asked());
    byId("cause-found").replaceChildren(...[
      older ? h("p", { class: "note warn" }, t("cause_older", { what: this.sentence(asked) })) : null,
      this.sizes(answer, asked),
      answer.unit === "kl" ? this.tops(answer) : null,
      h("p", { class: "note" }, t("cause_example")),
    ].filter(Boolean));
  }

  /** The size of this intervention above those of its controls, on one scale. */
  sizes({ unit, size, controls, sizes, mean, sd, above, seed }, { kind, layer }) {
    const { t, meta } = this.page, what = kind.startsWith("key") ? "key" : "head";
    const top = Math.max(size, ...(sizes ?? [])) || 1;
    const line = (name, value, by, strong) => h("tr", { class: strong ? "actual" : "" }, h("th", { scope: "row" }, name), h("td", { class: "n" }, value), barOf(by / top));
    const rows = [line(t("cause_here"), digits(size), size, true)];
    let note = t(controls === null ? "cause_alone" : "cause_no_others");
    if (controls?.length > 0) {
      rows.push(line(t("cause_control", { n: controls.length }), Number.isNaN(sd) ? digits(mean) : `${digits(mean)} ± ${digits(sd)}`, mean, true));
      const others = controls.map((drawn, n) => [drawn, sizes[n]]).sort((a, b) => b[1] - a[1]);
      for (const [drawn, by] of others) rows.push(line(`${t(what)} ${drawn}${what === "key" ? ` ${t("quoted", { token: visibleLabel(meta.tokens.labels[drawn], 12) })}` : ""}`, digits(by), by));
      note = t("cause_above", { n: above, all: controls.length, seed, others: t(`cause_other_${what}s`, { layer }) });
    }
    return h("div", {}, table(t(unit === "kl" ? "cause_kl" : "cause_moved"), [t("cause_change"), t("cause_size")], rows), h("p", { class: "note" }, note));
  }

  tops({ before, after, before_names: old, after_names: now }) {
    const { t } = this.page, most = Math.max(...before, ...after);
    const cells = (name, p) => [h("td", { class: "label" }, visibleLabel(name, 12)), h("td", { class: "n" }, percent(p)), barOf(p / most)];
    const rows = Array.from(before, (p, n) => h("tr", {}, ...cells(old[n], p), ...cells(now[n], after[n])));
    return table(t("cause_top"), [t("cause_before"), t("probability"), t("cause_after"), t("probability")], rows);
  }
}

function barOf(share) {
  const bar = h("span", { class: "bar" });
  bar.style.width = `${100 * share}%`;
  return h("td", { class: "barcell", "aria-hidden": "true" }, bar);
}

/** names: of a column of words and one of numbers with its bars, in turn. */
function table(caption, names, rows) {
  const heads = names.flatMap((name, n) => (n % 2 === 0 ? [h("th", { scope: "col" }, name)] : [h("th", { scope: "col", class: "n" }, name), h("td", { class: "barcell" })]));
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption }, h("table", { class: "reading" }, h("caption", {}, caption), h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows)));
}
