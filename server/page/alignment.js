// Alignment: which part of an answer's text each of its tokens stands for.
//
// A token may hold a part of a character, be a special token that the answer hides, or have lost
// its leading space. The text of the answer is the truth; tokens are fitted to it.

import { Reading } from "./reading.js";

const LONGEST_GAP = 32; // characters that tokens without readable text may cover
const EXTRA = /^\ufffd* ?$/; // what a token may show before what it reads

export class Alignment {
  constructor() {
    this.text = ""; // received, not yet fitted
    this.tokens = []; // received, not yet fitted
    this.reading = new Reading();
  }

  // Take a chunk's text and tokens; returns the tokens that are now certain, `shown` set.
  // Example: push("Hé", [{ text: "H" }, { text: "\ufffd" }, { text: "\ufffd" }, { text: "y" }])
  // returns the H; "y" brings é with the second token and "" with the third. Where the tokens have
  // their `bytes`, é comes at once, with the token that completes it.
  push(text, tokens) {
    this.text += text;
    for (const token of tokens) this.tokens.push(this.reading.read(token));
    const fitted = [];
    for (let found = this.#find(); found; found = this.#find()) {
      fitted.push(...this.#take(found.index, found.start), ...this.#take(1, found.length));
    }
    return fitted;
  }

  // The answer is complete: what is left of the text belongs to what is left of the tokens.
  finish() {
    this.reading.finish();
    const cut = this.tokens.findIndex((token) => begins(token, this.text));
    const before = this.#take(Math.max(cut, 0), 0);
    return [...before, ...this.#take(this.tokens.length, this.text.length)];
  }

  // The first token that can be read, and where in the text it stands.
  #find() {
    let isNext = true; // nothing of the text can belong to the tokens before
    for (const [index, token] of this.tokens.entries()) {
      for (const words of spellings(token)) {
        const at = this.text.indexOf(words);
        if (at < 0) continue;
        const end = at + words.length;
        if (isNext && EXTRA.test(this.text.slice(0, at))) return { index, start: 0, length: end };
        if (isNext || at > LONGEST_GAP) continue;
        const start = this.text[at - 1] === " " ? at - 1 : at; // its leading space
        return { index, start, length: end - start };
      }
      if (this.text && begins(token, this.text)) return null; // more to come
      isNext = false;
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

// How the text may write a token: with the space before it or, at the start, without.
function spellings({ reads, text }) {
  return [reads, text].filter((words, at) => words && (at === 0 || !words.includes("\ufffd")));
}

function begins(token, text) {
  return spellings(token).some((words) => words.startsWith(text));
}
