// Pinned selections: each can be gone back to, compared with what is chosen now, and taken off.
import { byId, h, onClick, say, visibleLabel } from "./dom.js";
import { formatPin, parsePin } from "./store.js";
import { parseTokens } from "./selection.js";
import { digits } from "./reading.js";

export class Pins {
  constructor(page) {
    this.page = page;
    onClick("pin", () => this.toggle());
  }

  get list() {
    const { pins } = this.page.store.state;
    return pins === "" ? [] : pins.split("~");
  }

  /** Pin what is chosen, or take its pin off. */
  toggle(pin = formatPin(this.page.store.state)) {
    const { list } = this;
    const pins = list.includes(pin) ? list.filter((other) => other !== pin) : [...list, pin];
    this.page.store.set({ pins: pins.join("~") });
  }

  show(state) {
    const { t } = this.page, { list } = this, now = formatPin(state);
    byId("pin").setAttribute("aria-pressed", String(list.includes(now)));
    say(byId("pins-none"), list.length === 0 ? t("pins_none") : "");
    const name = `${this.page.language} ${state.pins}`;
    if (this.shown !== name) {
      this.shown = name;
      byId("pins").replaceChildren(...list.map((pin) => this.line(parsePin(pin), pin)));
    }
    list.forEach((pin, at) => {
      const line = byId("pins").children[at], [link, , compare] = line.children, { layer, head } = parsePin(pin);
      line.className = pin === now ? "here" : "";
      link.ariaCurrent = String(pin === now);
      compare.disabled = layer === state.layer && head === state.head;
    });
  }

  line(pin, text) {
    const { page } = this, { t, store } = page;
    const own = page.allUnits[pin.unit] ?? page.allUnits.token;
    const tokens = pin.several ? parseTokens(pin.several, own.tokens) : [pin.direction === "reads" ? pin.query : pin.key];
    const units = [...new Set(tokens.map((token) => own.of[token]))];
    const what = units.slice(0, 3).map((unit) => t("quoted", { token: visibleLabel(own.labels[unit], 14) })).join(t("comma")) + (units.length > 3 ? " …" : "");
    const reading = h("small", {}, "");
    const label = `${t("layer")} ${pin.layer} · ${t("head")} ${pin.head} · ${t(pin.direction === "reads" ? "pin_reads" : "pin_readers", { token: what })}`;
    this.fill(reading, pin, tokens, own);
    return h("li", {},
      h("button", { class: "link", onclick: () => store.set(pin) }, label), reading,
      h("button", { "aria-label": `${t("pin_compare")}: ${label}`, onclick: () => store.set({ against: `${pin.layer}.${pin.head}` }) }, t("pin_compare")),
      h("button", { "aria-label": `${t("pin_off")}: ${label}`, onclick: () => this.toggle(text) }, "×"));
  }

  /** The largest weights of a pin, when they are known. */
  async fill(element, pin, tokens, units) {
    const { page } = this;
    try {
      const opened = await page.data.head(pin.layer, pin.head);
      const { list } = await page.joined(opened, pin.layer, pin.head, pin.direction, tokens, new AbortController().signal, units);
      say(element, list.slice(0, 3).map(({ token, weight }) => `${visibleLabel(units.label(token), 12)} ${digits(weight)}`).join(" · "));
    } catch (error) {
      page.fail(error);
    }
  }
}
