// Facts: the footer of an answer, one short entry per figure.

import { element } from "./element.js";

const REASONS = {
  stop: "complete",
  length: "cut at max tokens",
  stopped: "stopped",
};

export function number(value, digits = 1) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

// Example: facts(generation, { chosen: true }) has "212 tokens/s" and "seed 7 (chosen here)".
export function facts(generation, { chosen = false } = {}) {
  const { speed, firstTokenMs, tokensPerStep, acceptance, numTokens, finishReason } = generation;
  const entries = [
    ["speed", speed && `${number(speed)} tokens/s`, "after the first token"],
    ["first", firstTokenMs && `first token ${number(firstTokenMs, 0)} ms`, "time to first token"],
    ["per-step", tokensPerStep && `${number(tokensPerStep, 2)} tokens/step`, "accepted + bonus"],
    ["acceptance", acceptance !== null && `${number(100 * acceptance, 0)} % accepted`, "of drafted nodes"],
    ["tokens", numTokens !== null && `${numTokens} ${numTokens === 1 ? "token" : "tokens"}`, ""],
    ["finish", finishReason && (REASONS[finishReason] ?? finishReason), "finish reason"],
    ["seed", `seed ${generation.body.seed}${chosen ? " (chosen here)" : ""}`, ""],
  ];
  const list = element("ul", { class: "facts", "aria-label": "Figures of this answer" });
  for (const [name, text, title] of entries) {
    if (text) list.append(element("li", { "data-fact": name, title: title || null }, text));
  }
  return list;
}
