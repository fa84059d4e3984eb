// Composer: the field for a message. Enter sends, Shift+Enter makes a line, the button stops.

export class Composer {
  // `onSend(text)` says whether the text was taken.
  constructor(form, { onSend, onStop }) {
    this.field = form.elements.message;
    this.button = form.querySelector("button");
    this.onSend = onSend;
    this.onStop = onStop;
    this.isRunning = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isRunning) this.onStop();
      else this.#send();
    });
    this.field.addEventListener("keydown", (event) => {
      // While an input method composes, Enter belongs to it.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.isRunning) this.#send();
    });
    this.field.addEventListener("input", () => this.#fit());
    this.focus();
  }

  setRunning(isRunning) {
    this.isRunning = isRunning;
    this.button.textContent = isRunning ? "Stop" : "Send";
    this.button.classList.toggle("stop", isRunning);
  }

  focus() {
    this.field.focus();
  }

  #send() {
    const text = this.field.value.trim();
    if (!text || !this.onSend(text)) return;
    this.field.value = "";
    this.#fit();
  }

  // As tall as its text, up to what style.css allows.
  #fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight + 2}px`;
  }
}
