// Answer: the view of one generation: tokens, ruler, figures, and what can be done with it.

import { button, element } from "./element.js";
import { facts } from "./facts.js";
import { Generation } from "./generation.js";
import { problem } from "./problem.js";
import { Ruler } from "./ruler.js";
import { Tokens } from "./tokens.js";

export class Answer {
  // `legend` learns the sources of its tokens.
  constructor(legend) {
    this.legend = legend;
    this.node = element("article", { class: "answer", "aria-label": "Answer" });
    this.generation = null;
    this.chosenSeed = false;
  }

  get text() {
    return this.generation?.text ?? "";
  }

  // Generate, and show it as it comes. Returns the error, or null; errors are shown here too.
  async run(body, { signal, chosen, onGrow, onRetry }) {
    const generation = new Generation(body);
    this.generation = generation;
    this.chosenSeed = chosen;
    const ruler = new Ruler();
    const tokens = new Tokens((token) => {
      token.sources.forEach((source) => this.legend.add(source));
      ruler.add(token);
    });
    this.tokens = tokens;
    this.node.setAttribute("aria-busy", "true");
    this.node.classList.add("running");
    this.node.replaceChildren(tokens.node);
    let failure = null;
    try {
      await generation.run((text, infos, rejected) => {
        tokens.push(text, infos, rejected);
        rejected.forEach((draft) => ruler.addRejected(draft));
        onGrow?.();
      }, signal);
    } catch (error) {
      failure = error;
    }
    tokens.finish();
    this.node.removeAttribute("aria-busy");
    this.node.classList.remove("running");
    if (tokens.hasTokens) this.node.append(ruler.node);
    if (failure) this.node.append(problem(failure, onRetry));
    else if (!this.text) this.node.append(element("p", { class: "empty" }, "The answer is empty."));
    if (generation.firstAt !== null) this.node.append(facts(generation, { chosen }));
    return failure;
  }

  // Buttons below the answer; each is a text and what it does.
  addActions(actions) {
    const bar = element("div", { class: "actions" });
    for (const [text, onClick, attributes] of actions) {
      bar.append(button(text, onClick, { class: "quiet", ...attributes }));
    }
    this.node.append(bar);
  }
}
