// Tokens: an answer's text as one span per token, drawn by source, with its rejected drafts.

import { Alignment } from "./alignment.js";
import { element } from "./element.js";
import { attachNote } from "./note.js";
import { isPart } from "./reading.js";
import { sourceClass } from "./sources.js";

const MOST_REJECTED = 12; // shown per step; the rest is counted

export class Tokens {
  // `onToken` is called with every token once it is certain where it stands.
  constructor(onToken = () => {}) {
    this.tail = document.createTextNode(""); // text whose tokens are to come, or all of it if none do
    this.node = element("div", {
      class: "tokens",
      role: "group",
      "aria-label": "Answer. The arrow keys go from token to token",
    });
    this.node.append(this.tail);
    this.canFocus = false; // whether a token can be reached with the tab key
    this.step = null;
    this.alignment = new Alignment();
    this.onToken = onToken;
    this.rejected = new Map(); // step -> its rejected drafts, until the step is complete
    this.hasTokens = false;
    attachNote(this.node);
  }

  // Take a chunk: its text, its tokens and its rejected drafts; the lists may be missing.
  push(text, tokens = [], rejected = []) {
    this.hasTokens ||= tokens.length > 0;
    for (const draft of rejected) {
      if (!this.rejected.has(draft.step)) this.rejected.set(draft.step, []);
      this.rejected.get(draft.step).push(draft);
    }
    this.#show(this.alignment.push(text, tokens));
  }

  finish() {
    this.#show(this.alignment.finish());
    this.#closeStep();
  }

  // Mark the token where this answer leaves another.
  markDifference(index) {
    markDifference(this.node, index);
  }

  #show(tokens) {
    for (const token of tokens) {
      if (token.step !== this.step) {
        this.#closeStep();
        this.step = token.step;
        token.begins = true;
      }
      const span = tokenSpan(token);
      if (!this.canFocus && span.textContent) {
        span.tabIndex = 0;
        this.canFocus = true;
      }
      this.tail.before(span);
      this.onToken(token);
    }
    this.tail.data = this.alignment.text;
  }

  #closeStep() {
    const drafts = this.rejected.get(this.step);
    if (!drafts) return;
    this.rejected.delete(this.step);
    const shown = drafts.slice(0, MOST_REJECTED).map((draft) => rejectedSpan(draft));
    const more = drafts.length - shown.length;
    this.tail.before(
      element(
        "span",
        { class: "rejected", "aria-label": `${drafts.length} rejected drafts` },
        ...shown,
        more > 0 ? element("span", { class: "more" }, `+${more}`) : null,
      ),
    );
  }
}

// Mark a token of a node; one that holds a part of a character is seen in the one that completes it.
export function markDifference(node, index) {
  const spans = [...node.querySelectorAll(".token")];
  const seen = spans.slice(index).find((span) => !span.classList.contains("part"));
  (seen ?? spans[index])?.classList.add("differs");
}

// A token as a span; what its note says stands in its data.
function tokenSpan(token) {
  const isHidden = token.shown === "" && token.reads !== "" && !token.reads.includes("\ufffd");
  const names = ["token", sourceClass(token.sources[0])];
  if (token.begins) names.push("begins");
  if (isHidden) names.push("unseen");
  if (isPart(token) && !token.shown) names.push("part");
  const text = isHidden ? token.reads : token.shown;
  const space = text.trim() ? text.match(/^ */)[0] : ""; // before a word, not underlined with it
  const ink = element("span", { class: "ink" }, text.slice(space.length));
  const span = element("span", { class: names.join(" ") }, space, ink);
  Object.assign(span.dataset, {
    source: token.sources.join(", "),
    kind: token.kind,
    depth: token.depth,
    step: token.step,
    id: token.id,
    text: token.reads || token.text,
    bytes: (token.bytes ?? []).map((byte) => byte.toString(16).padStart(2, "0")).join(" "),
  });
  return span;
}

function rejectedSpan(draft) {
  const shown = draft.text.replace(/\n/g, "⏎").trim() || "␣";
  const span = element("del", { class: `draft ${sourceClass(draft.sources[0])}` }, shown);
  Object.assign(span.dataset, {
    source: draft.sources.join(", "),
    kind: "rejected",
    depth: draft.depth,
    step: draft.step,
    id: draft.id,
    text: draft.text,
  });
  return span;
}
