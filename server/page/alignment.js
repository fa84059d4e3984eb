// Alignment: which part of an answer's text each of its tokens stands for.
//
// A token alone may decode to half a character, to a special token that the answer hides, or
// without its leading space. The text of the answer is the truth; tokens are fitted to it.

const LONGEST_GAP = 32; // characters that tokens without readable text may cover

export class Alignment {
  constructor() {
    this.text = ""; // received, not yet fitted
    this.tokens = []; // received, not yet fitted
  }

  // Take a chunk's text and tokens; returns the tokens that are now certain, `shown` set.
  // Example: push("Hé", [{ text: "H" }, { text: "\ufffd" }, { text: "\ufffd" }, { text: "y" }])
  // returns the H; "y" brings é with the second token and "" with the third.
  push(text, tokens) {
    this.text += text;
    this.tokens.push(...tokens);
    const fitted = [];
    for (let found = this.#find(); found; found = this.#find()) {
      fitted.push(...this.#take(found.index, found.start));
      fitted.push(...this.#take(1, found.length));
    }
    return fitted;
  }

  // The answer is complete: what is left of the text belongs to what is left of the tokens.
  finish() {
    return this.#take(this.tokens.length, this.text.length);
  }

  // The first token that can be read, and where in the text it stands.
  #find() {
    for (const [index, token] of this.tokens.entries()) {
      if (!token.text) continue;
      const start = this.text.indexOf(token.text);
      const lost = start > 0 && this.text[start - 1] === " " ? 1 : 0; // its leading space
      if (start >= 0 && (index === 0 ? start === lost : start <= LONGEST_GAP)) {
        return { index, start: start - lost, length: token.text.length + lost };
      }
      if (index === 0 && this.text && token.text.startsWith(this.text)) return null; // more to come
    }
    return null;
  }

  // The next `count` tokens; the first of them shows the next `length` characters.
  #take(count, length) {
    const taken = this.tokens.splice(0, count);
    const shown = this.text.slice(0, length);
    if (taken.length) this.text = this.text.slice(length);
    return taken.map((token, at) => ({ ...token, shown: at === 0 ? shown : "" }));
  }
}
