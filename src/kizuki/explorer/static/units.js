// What the text is shown as: its tokens, or the words that people write, each of one or more tokens.

/** Tokens as the page uses them: what is named only where it is not the usual is there for all of them. */
export function written({ texts, labels, gaps, chips, words = null, ...rest }) {
  const all = (usual, odd) => {
    for (const [i, value] of Object.entries(odd)) usual[i] = value;
    return usual;
  };
  const none = () => new Array(texts.length).fill("");
  return { texts, labels: all([...texts], labels), gaps: all(none(), gaps), chips: all(none(), chips), words, ...rest };
}

export class Units {
  /** starts: the first token of each unit; labels: what to call it. */
  constructor(tokens, starts, labels) {
    const count = tokens.labels.length;
    this.tokens = count;
    this.starts = starts;
    this.tail = tokens.tail;
    this.labels = labels;
    this.joined = starts.length < count;
    this.of = new Int32Array(count); // token -> unit
    this.texts = [];
    this.gaps = [];
    this.chips = [];
    starts.forEach((first, unit) => {
      const stop = this.stop(unit);
      this.of.fill(unit, first, stop);
      let text = tokens.texts[first];
      for (let i = first + 1; i < stop; i += 1) text += tokens.gaps[i] + tokens.texts[i];
      this.texts.push(text);
      this.gaps.push(tokens.gaps[first]);
      this.chips.push(stop - first > 1 ? "" : tokens.chips[first]);
    });
  }

  stop(unit) {
    return unit + 1 < this.starts.length ? this.starts[unit + 1] : this.tokens;
  }

  size(unit) {
    return this.stop(unit) - this.starts[unit];
  }

  label(token) {
    return this.labels[this.of[token]];
  }

  /** All tokens of the unit that `token` is in. */
  around(token) {
    const unit = this.of[token];
    return Array.from({ length: this.size(unit) }, (_, i) => this.starts[unit] + i);
  }
}

/** { token: Units, word: Units or null where the file says nothing about words }. */
export function unitsOf(tokens) {
  const { words, labels } = tokens;
  return {
    token: new Units(tokens, labels.map((_, i) => i), labels),
    word: words ? new Units(tokens, words.starts, words.labels) : null,
  };
}
