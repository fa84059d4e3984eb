// Problem: an error, told kindly, with what to do about it.

import { advice, apiKey } from "./api.js";
import { button, element } from "./element.js";

// `onRetry` is called by the button, and after a key was entered. Both are optional to the reader.
export function problem(error, onRetry) {
  const { title, hint } = advice(error);
  const node = element(
    "div",
    { class: "problem", role: "alert" },
    element("strong", {}, title),
    element("p", {}, hint),
  );
  if (error.status === 401) node.append(keyForm(onRetry));
  else if (onRetry) node.append(button("Try again", onRetry));
  return node;
}

function keyForm(onDone) {
  const field = element("input", {
    type: "password",
    name: "key",
    autocomplete: "off",
    required: true,
    "aria-label": "API key",
    placeholder: "API key",
  });
  const form = element("form", { class: "key" }, field, element("button", {}, "Use this key"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    apiKey.set(field.value.trim());
    onDone?.();
  });
  form.append(element("small", {}, "Kept in this tab only, until it is closed."));
  return form;
}
