// Settings: the form of request fields, kept in localStorage, and the fields that it asks for.

import { element } from "./element.js";

const KEY = "specdec.settings";
const NUMBERS = {
  temperature: Number,
  top_p: Number,
  max_tokens: Number,
  max_nodes: Number,
  max_depth: Number,
};

export class Settings {
  constructor(form) {
    this.form = form;
    this.drafters = []; // all that the server runs
    this.#load();
    form.addEventListener("input", () => this.#save());
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => this.#afterReset()));
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  get seed() {
    return this.form.elements.seed.value.trim();
  }

  // The body's fields but messages and seed; what is left empty is left to the server.
  // Example: { temperature: 0.7, speculation: { enabled: true, max_nodes: 8 } }
  fields() {
    const values = {};
    for (const [name, parse] of Object.entries(NUMBERS)) {
      const text = this.form.elements[name].value.trim();
      if (text !== "") values[name] = parse(text);
    }
    const { max_nodes, max_depth, ...fields } = values;
    const wanted = this.#wantedDrafters();
    const isNone = this.drafters.length > 0 && wanted.length === 0; // all are unchecked
    const speculation = { enabled: this.form.elements.speculation.checked && !isNone };
    if (max_nodes !== undefined) speculation.max_nodes = max_nodes;
    if (max_depth !== undefined) speculation.max_depth = max_depth;
    if (wanted.length && wanted.length < this.drafters.length) speculation.drafters = wanted;
    return { ...fields, speculation };
  }

  // A seed as JSON can carry it: the form's, or one chosen now, that the answer can be had again.
  chooseSeed() {
    const given = this.seed;
    if (given !== "") return { seed: Number(given), chosen: false };
    return { seed: crypto.getRandomValues(new Uint32Array(1))[0], chosen: true };
  }

  // Offer the drafters that the server runs; what was unchecked before stays unchecked.
  offer(drafters) {
    this.drafters = drafters;
    const unwanted = new Set(this.stored.unwanted ?? []);
    const boxes = drafters.map((name) =>
      element(
        "label",
        { class: "check" },
        element("input", { type: "checkbox", name: "drafter", value: name }),
        name,
      ),
    );
    for (const [at, name] of drafters.entries()) {
      boxes[at].firstChild.checked = !unwanted.has(name);
    }
    const list = this.form.querySelector("[data-drafters]");
    list.replaceChildren(...(boxes.length ? boxes : ["This server runs none."]));
  }

  #wantedDrafters() {
    return [...this.form.querySelectorAll("[name=drafter]:checked")].map((box) => box.value);
  }

  #load() {
    try {
      this.stored = JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      this.stored = {}; // what an older page wrote
    }
    for (const name of ["system", "seed", ...Object.keys(NUMBERS)]) {
      if (typeof this.stored[name] === "string") this.form.elements[name].value = this.stored[name];
    }
    this.form.elements.speculation.checked = this.stored.speculation ?? true;
  }

  #save() {
    const stored = { speculation: this.form.elements.speculation.checked };
    for (const name of ["system", "seed", ...Object.keys(NUMBERS)]) {
      stored[name] = this.form.elements[name].value;
    }
    const wanted = this.#wantedDrafters();
    stored.unwanted = this.drafters.filter((name) => !wanted.includes(name));
    this.stored = stored;
    localStorage.setItem(KEY, JSON.stringify(stored));
  }

  #afterReset() {
    localStorage.removeItem(KEY);
    this.stored = {};
    this.offer(this.drafters);
  }
}
