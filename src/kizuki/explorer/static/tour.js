// A tour of ten steps through this page's own heads: each is a selection, found among the real numbers, and two sentences.
import { byId, onClick, say } from "./dom.js";
import { controlOf, digits, percent } from "./reading.js";

/** The head whose mean of a measure is the largest (sign 1) or smallest (sign −1): { layer, head, value }. */
export function extreme(meta, measure, sign = 1) {
  let best = null;
  meta.layers.forEach(({ layer }, n) => meta.heads.forEach((head, m) => {
    const value = meta.means[measure][n][m];
    if (value !== null && (best === null || sign * value > sign * best.value)) best = { layer, head, value };
  }));
  return best ?? { ...meta.start, value: null };
}

/** [panel to look at, what is selected, numbers for the sentences] of each step. */
export const STOPS = [
  () => ["text-panel", { direction: "reads" }],
  ({ start }) => ["text-panel", { direction: "readers", key: start.key }],
  () => ["atlas-panel", { measure: "entropy" }],
  (meta) => at(meta, "atlas-panel", "effective", -1, digits),
  (meta) => at(meta, "atlas-panel", "first_key", 1, percent),
  (meta) => at(meta, "map-panel", "previous", 1, percent),
  (meta) => at(meta, "map-panel", "other_distance", 1, digits),
  () => ["scope-panel", {}],
  ({ start }) => ["text-panel", { several: `${Math.max(0, start.query - 3)}-${start.query}` }],
  (meta) => {
    const [a, b] = [extreme(meta, "effective", -1), extreme(meta, "effective")];
    return ["compare-panel", { layer: a.layer, head: a.head, against: `${b.layer}.${b.head}` }];
  },
];

function at(meta, panel, measure, sign, write) {
  const { layer, head, value } = extreme(meta, measure, sign);
  const control = controlOf(meta, layer, measure);
  return [panel, { layer, head, measure }, { layer, head, v: write(value), c: control === null ? "–" : write(control) }];
}

export class Tour {
  constructor(page) {
    this.page = page;
    onClick("tour-open", () => (page.store.state.tour ? this.end() : this.go(1)));
    onClick("tour-back", () => this.go(Number(page.store.state.tour) - 1));
    onClick("tour-next", () => this.go(Number(page.store.state.tour) + 1));
    onClick("tour-end", () => this.end());
  }

  go(step) {
    const { page } = this, { meta, store } = page;
    if (step < 1) return;
    if (step > STOPS.length) {
      this.end();
      return;
    }
    const [panel, change] = STOPS[step - 1](meta);
    store.set({ ...meta.start, several: "", against: "", unit: "token", direction: "reads", ...change, tour: String(step) });
    byId(panel).scrollIntoView({ block: "start", behavior: window.matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }

  end() {
    this.page.store.set({ tour: "" });
    byId("tour-open").focus();
  }

  show({ tour }) {
    const { t, meta } = this.page, step = Number(tour);
    const stop = STOPS[step - 1];
    byId("tour").hidden = !stop;
    byId("tour-open").setAttribute("aria-expanded", String(Boolean(stop)));
    for (const old of document.querySelectorAll(".looked-at")) old.classList.remove("looked-at");
    if (!stop) return;
    const [panel, , numbers = {}] = stop(meta);
    byId(panel).classList.add("looked-at");
    say(byId("tour-step"), t("tour_step", { n: step, all: STOPS.length }));
    say(byId("tour-text"), t(`tour_${step}`, numbers));
    byId("tour-back").disabled = step === 1;
    say(byId("tour-next"), t(step === STOPS.length ? "tour_last" : "tour_next"));
  }
}
