// Views: what is shown besides the text - colours, steps, rejected drafts, the settings' panel.

const KEY = "specdec.views";
const SHOWN_AT_FIRST = { colours: true, steps: false, rejected: false };

export class Views {
  constructor(body) {
    this.body = body;
    this.shown = { ...SHOWN_AT_FIRST, ...this.#stored() };
    for (const button of document.querySelectorAll("[data-view]")) {
      button.addEventListener("click", () => this.#toggle(button.dataset.view));
    }
    this.#show();
    this.#panel(document.getElementById("settings-button"));
  }

  #stored() {
    try {
      return JSON.parse(localStorage.getItem(KEY));
    } catch {
      return {}; // what an older page wrote
    }
  }

  #toggle(view) {
    this.shown[view] = !this.shown[view];
    localStorage.setItem(KEY, JSON.stringify(this.shown));
    this.#show();
  }

  #show() {
    for (const button of document.querySelectorAll("[data-view]")) {
      const { view } = button.dataset;
      button.setAttribute("aria-pressed", String(this.shown[view]));
      this.body.classList.toggle(`shows-${view}`, this.shown[view]);
    }
  }

  // The settings open beside the chat; Escape closes them and gives the focus back.
  #panel(button) {
    const panel = document.getElementById("settings-panel");
    this.openSettings = (isOpen = true) => {
      panel.hidden = !isOpen;
      button.setAttribute("aria-expanded", String(isOpen));
      this.body.classList.toggle("has-settings", isOpen);
      (isOpen ? panel.querySelector("textarea") : button).focus();
    };
    button.addEventListener("click", () => this.openSettings(panel.hidden));
    panel.querySelector("[data-closes]").addEventListener("click", () => this.openSettings(false));
    panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation(); // it closes the panel, and stops no answer
      this.openSettings(false);
    });
  }
}
