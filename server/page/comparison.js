// Comparison: an answer beside the same request, same seed, without speculation.

import { Answer } from "./answer.js";
import { element } from "./element.js";
import { number } from "./facts.js";
import { markDifference } from "./tokens.js";

// Where two answers part: the index of the first token that differs, or null.
// Tokens are compared by id where both have them, else characters.
export function difference(one, other) {
  const byToken = one.tokens.length > 0 && other.tokens.length > 0;
  const [left, right] = byToken
    ? [one.tokens.map((token) => token.id), other.tokens.map((token) => token.id)]
    : [[...one.text], [...other.text]];
  const length = Math.min(left.length, right.length);
  for (let at = 0; at < length; at++) if (left[at] !== right[at]) return { at, byToken };
  return left.length === right.length ? null : { at: length, byToken };
}

// What the two say, in one sentence.
export function verdict(one, other) {
  const apart = difference(one, other);
  if (apart === null) {
    const count = one.numTokens ?? [...one.text].length;
    return { same: true, text: `Identical, ${count} ${count === 1 ? "token" : "tokens"}.` };
  }
  const unit = apart.byToken ? "token" : "character";
  const isPart = one.finishReason === "stopped" || other.finishReason === "stopped";
  const shorter = Math.min(one.tokens.length, other.tokens.length);
  if (isPart && apart.byToken && apart.at === shorter) {
    return { same: true, text: `Identical as far as the stopped one goes, ${shorter} tokens.` };
  }
  return { same: false, text: `They differ from ${unit} ${apart.at + 1} on.`, at: apart.at };
}

export class Comparison {
  constructor(original, legend) {
    this.original = original;
    this.other = new Answer(legend);
    this.status = element("p", { class: "verdict", role: "status" }, "Running without speculation…");
    this.left = element("div", { class: "side" }, element("h3", {}, "With speculation"));
    const right = element("div", { class: "side" }, element("h3", {}, "Without"), this.other.node);
    this.node = element(
      "section",
      { class: "comparison", "aria-label": "The same seed without speculation" },
      this.status,
      element("div", { class: "sides" }, this.left, right),
    );
  }

  async run(signal, onRetry) {
    const { generation } = this.original;
    this.left.append(copyOf(this.original));
    const body = { ...generation.body, speculation: { enabled: false } };
    const failure = await this.other.run(body, { signal, onRetry });
    if (failure) {
      this.status.textContent = "There is nothing to compare.";
      return;
    }
    const found = verdict(generation, this.other.generation);
    this.node.classList.add(found.same ? "same" : "different");
    this.status.replaceChildren(element("strong", {}, found.text), this.#speeds());
    if (found.at !== undefined) {
      markDifference(this.left, found.at);
      this.other.tokens.markDifference(found.at);
    }
  }

  #speeds() {
    const [one, other] = [this.original.generation.speed, this.other.generation.speed];
    if (!one || !other) return "";
    return (
      ` ${number(one)} tokens/s with speculation, ${number(other)} without:` +
      ` ${number(one / other, 2)} times.`
    );
  }
}

// The original's tokens and figures once more, without its buttons.
function copyOf(answer) {
  const copy = answer.node.cloneNode(true);
  copy.querySelectorAll(".actions, .comparison, .problem").forEach((node) => node.remove());
  copy.removeAttribute("aria-label");
  return copy;
}
