// Note: what is known of the token under the pointer or the focus; arrow keys move the focus.

import { element } from "./element.js";

const KINDS = {
  accepted: "accepted draft",
  bonus: "bonus token, the target's own",
  rejected: "rejected draft",
};
const note = element("div", { id: "token-note", role: "tooltip", hidden: true });

// Show notes for all tokens of a node, now and later.
export function attachNote(node) {
  node.addEventListener("pointerover", (event) => show(tokenOf(event.target)));
  node.addEventListener("pointerleave", () => show(focusedToken()));
  node.addEventListener("focusin", (event) => show(tokenOf(event.target)));
  node.addEventListener("focusout", () => show(null));
  node.addEventListener("keydown", (event) => moveFocus(node, event));
}

function tokenOf(target) {
  return target.closest?.("[data-kind]") ?? null;
}

function focusedToken() {
  return tokenOf(document.activeElement ?? document.body);
}

function show(token) {
  document.querySelector("[aria-describedby=token-note]")?.removeAttribute("aria-describedby");
  note.hidden = token === null;
  if (token === null) return;
  const { source, kind, depth, step, id, text } = token.dataset;
  note.replaceChildren(
    element("strong", {}, source),
    element("span", {}, KINDS[kind] ?? kind),
    element("span", {}, `depth ${depth} · step ${step} · id ${id}`),
    element("code", {}, JSON.stringify(text)),
    ...partsOf(token),
  );
  if (!note.isConnected) document.body.append(note);
  token.setAttribute("aria-describedby", note.id);
  place(token);
}

// The tokens that hold the first parts of a character which this one completes, a line for each.
function partsOf(token) {
  const parts = [];
  if (!token.matches(".token:not(.part)")) return parts;
  let before = token.previousElementSibling;
  for (; before?.matches(".part, .rejected"); before = before.previousElementSibling) {
    if (before.matches(".part")) parts.unshift(before.dataset);
  }
  if (parts.length) parts.push(token.dataset);
  return parts.map(({ bytes, source, depth, step, id }) =>
    element("span", {}, `${bytes}: ${source} · depth ${depth} · step ${step} · id ${id}`),
  );
}

// Below the token's first line, inside the window.
function place(token) {
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const { width, height } = note.getBoundingClientRect();
  const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8));
  const below = at.bottom + 6;
  const top = below + height > window.innerHeight - 8 ? at.top - height - 6 : below;
  note.style.left = `${left}px`;
  note.style.top = `${top}px`;
}

function moveFocus(node, event) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 };
  if (event.key === "Escape") show(null);
  if (!(event.key in steps) && event.key !== "Home" && event.key !== "End") return;
  const tokens = [...node.querySelectorAll(".token")].filter((token) => token.textContent);
  const at = tokens.indexOf(tokenOf(event.target));
  if (at < 0) return;
  const goals = { Home: 0, End: tokens.length - 1 };
  const goal = tokens[goals[event.key] ?? at + steps[event.key]];
  event.preventDefault();
  if (!goal) return;
  event.target.tabIndex = -1;
  goal.tabIndex = 0;
  goal.focus();
}

window.addEventListener("scroll", () => show(null), { passive: true });
