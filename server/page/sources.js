// Sources: how the tokens of each drafter, and the target's own, look everywhere on the page.

import { element } from "./element.js";

const KNOWN = ["target", "prediction", "suffix", "ngram", "medusa", "small-model"];
const SPARE = ["other-1", "other-2", "other-3"]; // looks for drafters of other packages
const given = new Map();

// The class of a source: `source-suffix`, or the next spare look for one that is not known.
export function sourceClass(source) {
  if (KNOWN.includes(source)) return `source-${source}`;
  if (!given.has(source)) given.set(source, SPARE[given.size % SPARE.length]);
  return `source-${given.get(source)}`;
}

export function sourceLabel(source) {
  return source === "target" ? "target (bonus)" : source;
}

// The legend of the sources seen so far; `add` is cheap to call for every token.
export class Legend {
  constructor(list) {
    this.list = list;
    this.seen = new Set();
  }

  add(source) {
    if (this.seen.has(source)) return;
    this.seen.add(source);
    const sample = element("span", { class: `sample ${sourceClass(source)}`, "aria-hidden": "true" }, "abc");
    this.list.append(element("li", { "data-source": source }, sample, sourceLabel(source)));
  }
}
