// A long text laid out in blocks, of which only those around the view are in the document.
import { h } from "./dom.js";

const BLOCK = 256; // units of a block, at most
const WHOLE = 2048; // a text of no more units is in the document as a whole
const PER_LETTER = 0.4; // pixels of height, until a block has been laid out

/** Where blocks begin, and the number of units at the end. Each ends where the text ends a line, if it does somewhere in
    its second half; else before a space; else (writing without spaces) after BLOCK units, where a line is then short. */
export function blocksOf({ texts, gaps }) {
  const bounds = [0], count = texts.length;
  const line = (unit) => texts[unit - 1].endsWith("\n") || gaps[unit].includes("\n");
  const space = (unit) => gaps[unit] !== "" || /^\s/.test(texts[unit]);
  while (bounds.at(-1) < count) {
    const first = bounds.at(-1), last = first + BLOCK;
    const before = (ends, limit) => {
      for (let unit = last; unit > limit; unit -= 1) if (ends(unit)) return unit;
      return 0;
    };
    bounds.push(last >= count ? count : before(line, first + BLOCK / 2) || before(space, last - 32) || last);
  }
  return bounds;
}

/** Keeps the blocks around the view of a scrolling box in the document, between two empty elements as high as all the
    others. A block's height is estimated from its length until it has been laid out. */
export class Scroller {
  /** on: { make(block) -> element, drop(block) } */
  constructor(box, on) {
    Object.assign(this, { box, on, made: new Map(), width: 0, count: 0 });
    this.above = h("div", { role: "none" });
    this.below = h("div", { role: "none" });
    box.addEventListener("scroll", () => this.render(), { passive: true });
    new ResizeObserver(() => this.resized()).observe(box);
  }

  /** lengths: characters of each block; bounds: as blocksOf gives them. */
  show(lengths, bounds) {
    Object.assign(this, { lengths, bounds, count: lengths.length, perLetter: PER_LETTER, guessed: true });
    this.made.clear();
    this.box.replaceChildren(this.above, this.below);
    this.heights = new Float64Array(this.count).fill(NaN);
    this.stack();
    this.render();
  }

  get whole() {
    return this.bounds.at(-1) <= WHOLE;
  }

  /** The place of every block: `tops`, and the whole height at its end. */
  stack() {
    this.tops = new Float64Array(this.count + 1);
    for (let block = 0; block < this.count; block += 1) {
      const height = this.heights[block];
      this.tops[block + 1] = this.tops[block] + (height >= 0 ? height : this.lengths[block] * this.perLetter);
    }
  }

  /** The block at a height of the whole text. */
  blockAt(y) {
    let low = 0, high = this.count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tops[middle] <= y) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** First and last of the blocks to be kept: those in view, and a screen before and behind it. */
  range() {
    if (this.whole) return [0, this.count - 1];
    const { scrollTop, clientHeight } = this.box;
    return [this.blockAt(scrollTop - clientHeight), this.blockAt(scrollTop + 2 * clientHeight)];
  }

  /** Make what is near, drop what is far, and leave what is seen where it is. */
  render() {
    if (this.count === 0) return;
    const { scrollTop, clientHeight, scrollHeight } = this.box;
    const seen = this.blockAt(scrollTop), inside = scrollTop - this.tops[seen];
    const end = scrollTop > 0 && scrollTop + clientHeight > scrollHeight - 2;
    const [first, last] = this.range();
    for (const [block, element] of this.made) {
      if (block >= first && block <= last) continue;
      element.remove();
      this.made.delete(block);
      this.on.drop(block);
    }
    const fresh = [];
    let behind = this.below;
    for (let block = last; block >= first; block -= 1) {
      if (!this.made.has(block)) {
        const element = this.on.make(block);
        this.box.insertBefore(element, behind);
        this.made.set(block, element);
        fresh.push(block);
      }
      behind = this.made.get(block);
    }
    if (fresh.length > 0) this.measure(fresh);
    this.above.style.height = `${this.tops[first]}px`;
    this.below.style.height = `${this.tops[this.count] - this.tops[last + 1]}px`;
    const top = end ? this.box.scrollHeight - clientHeight : this.tops[seen] + inside; // who is at the end stays there
    if (Math.abs(top - this.box.scrollTop) > 1) this.box.scrollTop = top;
  }

  measure(blocks) {
    for (const block of blocks) this.heights[block] = this.made.get(block).offsetHeight;
    if (this.guessed) { // once: a guess that kept changing would move the scroll bar
      let high = 0, letters = 0;
      for (const block of blocks) [high, letters] = [high + this.heights[block], letters + this.lengths[block]];
      this.perLetter = high > 0 ? high / letters : PER_LETTER;
      this.guessed = high === 0;
    }
    this.stack();
  }

  /** Another width breaks every line anew: all heights are guesses again, around the place that is looked at. */
  resized() {
    if (this.count === 0 || this.box.clientWidth === this.width) return;
    this.width = this.box.clientWidth;
    const seen = this.blockAt(this.box.scrollTop);
    const share = (this.box.scrollTop - this.tops[seen]) / Math.max(1, this.tops[seen + 1] - this.tops[seen]);
    this.heights.fill(NaN);
    this.guessed = true;
    this.measure([...this.made.keys()]);
    this.render();
    this.box.scrollTop = this.tops[seen] + share * (this.tops[seen + 1] - this.tops[seen]);
  }

  /** The block that holds a unit. */
  of(unit) {
    let low = 0, high = this.count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.bounds[middle] <= unit) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** About where a unit stands in the whole text, from its place in its block. */
  placeOf(unit) {
    const block = this.of(unit), share = (unit - this.bounds[block]) / (this.bounds[block + 1] - this.bounds[block]);
    return this.tops[block] + share * (this.tops[block + 1] - this.tops[block]);
  }

  /** Have a unit in the document: the view goes near it where it is not. */
  bring(unit) {
    if (this.made.has(this.of(unit))) return;
    this.box.scrollTop = this.placeOf(unit) - this.box.clientHeight / 3;
    this.render();
    if (this.made.has(this.of(unit))) return;
    this.box.scrollTop = this.placeOf(unit) - this.box.clientHeight / 3; // the guess was far off; now its height is known
    this.render();
  }
}
