// Turn: a message of the user, which can be edited, and the answer to it.

import { Answer } from "./answer.js";
import { button, element } from "./element.js";

export class Turn {
  // `onEdit(turn, text)` is called with a message that was changed and is to be sent again.
  constructor(text, legend, { onEdit, onCopy }) {
    this.text = text;
    this.onEdit = onEdit;
    this.onCopy = onCopy;
    this.question = element("article", { class: "question", "aria-label": "Your message" });
    this.answer = new Answer(legend);
    this.node = element("section", { class: "turn" }, this.question, this.answer.node);
    this.#show();
  }

  #show() {
    const edit = button("Edit", () => this.#edit(), { class: "quiet" });
    const copy = button("Copy", (event) => this.onCopy(this.text, event.target), { class: "quiet" });
    this.question.replaceChildren(
      element("p", { class: "text" }, this.text),
      element("div", { class: "actions" }, copy, edit),
    );
  }

  #edit() {
    const field = element("textarea", { "aria-label": "Edit the message", rows: 3 });
    field.value = this.text;
    const send = () => {
      const text = field.value.trim();
      if (text) this.onEdit(this, text);
    };
    const back = () => {
      this.#show();
      this.question.querySelector("button:last-child").focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        back();
      }
    });
    const actions = element(
      "div",
      { class: "actions" },
      button("Cancel", back, { class: "quiet" }),
      button("Send again", send, { class: "quiet" }),
    );
    this.question.replaceChildren(field, actions);
    field.focus();
  }
}
