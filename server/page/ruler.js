// Ruler: one column per step of an answer, a cell per token, hollow cells for rejected drafts.

import { element } from "./element.js";
import { sourceClass } from "./sources.js";

const MOST_HOLLOW = 4; // per step

export class Ruler {
  constructor() {
    this.node = element("div", { class: "ruler", role: "img", "aria-label": "No steps yet" });
    this.columns = new Map(); // step -> its column
    this.longest = 0;
  }

  add(token) {
    const column = this.#column(token.step);
    column.append(element("i", { class: `cell ${sourceClass(token.sources[0])}` }));
    const size = column.querySelectorAll(".cell:not(.hollow)").length;
    this.longest = Math.max(this.longest, size);
    this.node.setAttribute(
      "aria-label",
      `${this.columns.size} steps, at most ${this.longest} tokens in one`,
    );
  }

  addRejected(draft) {
    const column = this.#column(draft.step);
    if (column.querySelectorAll(".hollow").length < MOST_HOLLOW) {
      column.prepend(element("i", { class: `cell hollow ${sourceClass(draft.sources[0])}` }));
    }
  }

  #column(step) {
    if (!this.columns.has(step)) {
      const column = element("span", { class: "step", "data-step": step });
      this.columns.set(step, column);
      this.node.append(column);
    }
    return this.columns.get(step);
  }
}
