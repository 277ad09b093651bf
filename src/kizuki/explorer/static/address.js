// The URL and the history follow the selection: a pause makes an entry, a burst of steps makes one together.
import { BLANK, formatHash, parseHash } from "./store.js";

const QUIET = 200; // milliseconds without a change until the URL follows
const BURST = 900; // changes closer together than this are one entry of the history

export class Address {
  constructor(store) {
    this.store = store;
    this.written = 0;
    this.seen = location.hash;
    this.following = true; // the first entry is the page as it was opened
    store.listen(() => this.later());
    window.addEventListener("hashchange", () => {
      this.seen = location.hash;
      this.following = true; // back, forward, or somebody's own hash: no new entry
      store.set({ ...BLANK, ...parseHash(location.hash) });
    });
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.write(), QUIET);
  }

  write() {
    if (location.hash !== this.seen) return; // a step through the history that the page has yet to hear of
    const hash = formatHash(this.store.state);
    const now = Date.now();
    const same = this.following || now - this.written < BURST;
    if (hash !== location.hash) {
      try {
        if (same) history.replaceState(null, "", hash);
        else history.pushState(null, "", hash);
      } catch (error) {
        if (error.name !== "SecurityError") throw error; // a frame without an address of its own has none to keep
      }
    }
    this.seen = location.hash;
    this.following = false;
    this.written = now;
  }
}
