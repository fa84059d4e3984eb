// Chat: the conversation, from the composer to the answers, and the keys that steer it.

import { getJson } from "./api.js";
import { copy } from "./clipboard.js";
import { Comparison } from "./comparison.js";
import { Composer } from "./composer.js";
import { problem } from "./problem.js";
import { Settings } from "./settings.js";
import { Legend } from "./sources.js";
import { Turn } from "./turn.js";
import { Views } from "./views.js";

const by = (id) => document.getElementById(id);

class Chat {
  constructor(views) {
    this.views = views;
    this.turns = [];
    this.model = null;
    this.running = null; // an AbortController while something is generated
    this.log = by("log");
    this.settings = new Settings(by("settings"));
    this.legend = new Legend(by("legend"));
    this.composer = new Composer(by("composer"), {
      onSend: (text) => this.send(text),
      onStop: () => this.stop(),
    });
    by("new-chat").addEventListener("click", () => this.clear());
    for (const example of document.querySelectorAll("[data-example]")) {
      example.addEventListener("click", () => this.send(example.textContent.trim()));
    }
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
    });
    this.meet();
  }

  // Ask who serves: the model's name and its drafters. While it loads, ask again.
  async meet() {
    clearTimeout(this.meetingAgain);
    by("notice").replaceChildren();
    try {
      const models = await getJson("/v1/models");
      this.model = models.data[0].id;
      by("model").textContent = this.model;
    } catch (error) {
      by("model").textContent = error.status === 503 ? "loading…" : "not connected";
      if (error.status === 503) this.meetingAgain = setTimeout(() => this.meet(), 1000);
      else by("notice").replaceChildren(problem(error, () => this.meet()));
      return;
    }
    const explained = await getJson("/debug/speculation?last=1").catch(() => ({}));
    const names = (explained.drafter ?? "").split(",").map((name) => name.trim());
    this.settings.offer(names.filter((name) => name && name !== "none"));
  }

  // Returns false when it is not sent: the composer keeps the text.
  send(text) {
    if (this.running) return false;
    if (!this.settings.form.checkValidity()) {
      this.views.openSettings();
      this.settings.form.reportValidity();
      return false;
    }
    const turn = new Turn(text, this.legend, {
      onEdit: (edited, changed) => this.edit(edited, changed),
      onCopy: (copied, from) => this.copy(copied, from),
    });
    this.turns.push(turn);
    this.log.append(turn.node);
    this.#showEmptiness();
    this.answer(turn);
    return true;
  }

  // Answer a turn; what follows it no longer fits and goes.
  async answer(turn) {
    if (this.running) return;
    this.#dropAfter(turn);
    if (this.model === null) await this.meet();
    const { seed, chosen } = this.settings.chooseSeed();
    const body = {
      model: this.model ?? "",
      messages: this.messages(turn),
      ...this.settings.fields(),
      seed,
    };
    const again = () => this.answer(turn);
    await this.#generate((signal) =>
      turn.answer.run(body, { signal, chosen, onRetry: again, onGrow: () => this.#follow() }),
    );
    const { answer } = turn;
    if (answer.text) {
      answer.addActions([
        ["Copy", (event) => this.copy(answer.text, event.target)],
        ["Regenerate", again],
        ["Same seed without speculation", () => this.compare(answer)],
      ]);
    }
    by("spoken").textContent = answer.text ? `Answer: ${answer.text}` : "";
    this.#follow();
  }

  // The messages that lead to a turn's answer; turns without an answer are left out.
  messages(turn) {
    const system = this.settings.system;
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const earlier of this.turns.slice(0, this.turns.indexOf(turn))) {
      if (!earlier.answer.text) continue;
      messages.push({ role: "user", content: earlier.text });
      messages.push({ role: "assistant", content: earlier.answer.text });
    }
    return [...messages, { role: "user", content: turn.text }];
  }

  async compare(answer) {
    if (this.running) return;
    answer.node.querySelector(".comparison")?.remove();
    const comparison = new Comparison(answer, this.legend);
    answer.node.append(comparison.node);
    const done = this.#generate((signal) => comparison.run(signal, () => this.compare(answer)));
    comparison.node.scrollIntoView({ block: "start" });
    await done;
  }

  edit(turn, text) {
    this.stop();
    const at = this.turns.indexOf(turn);
    this.#dropAfter(turn);
    this.turns.splice(at, 1);
    turn.node.remove();
    this.whenIdle(() => this.send(text));
  }

  async copy(text, from) {
    await copy(text);
    from.textContent = "Copied";
    setTimeout(() => (from.textContent = "Copy"), 1500);
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    for (const turn of this.turns.splice(0)) turn.node.remove();
    by("spoken").textContent = "";
    this.#showEmptiness();
    this.composer.focus();
  }

  whenIdle(then) {
    if (this.running) setTimeout(() => this.whenIdle(then), 10);
    else then();
  }

  // One generation at a time, stopped by the button, Escape or a new chat.
  async #generate(run) {
    this.running = new AbortController();
    this.composer.setRunning(true);
    by("spoken").textContent = "Answering";
    try {
      await run(this.running.signal);
    } finally {
      this.running = null;
      this.composer.setRunning(false);
    }
  }

  #dropAfter(turn) {
    for (const later of this.turns.splice(this.turns.indexOf(turn) + 1)) later.node.remove();
  }

  #showEmptiness() {
    document.body.classList.toggle("is-empty", this.turns.length === 0);
  }

  // Keep the end in sight, unless the reader has scrolled up.
  #follow() {
    const root = document.documentElement;
    const left = root.scrollHeight - window.scrollY - window.innerHeight;
    if (left < 160) window.scrollTo({ top: root.scrollHeight, behavior: "instant" });
  }
}

new Chat(new Views(document.body));
