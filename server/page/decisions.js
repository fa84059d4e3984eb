// Decisions: what the controller chose for the last steps, and the drafters' counts, as tables.

import { element } from "./element.js";
import { number } from "./facts.js";

const times = (value) => (Number.isFinite(value) ? `${number(value, 2)}×` : "–");
const count = (value) => (Number.isFinite(value) ? String(value) : "–");

const COLUMNS = [
  ["Step", (decision) => count(decision.step)],
  ["Reason", (decision) => decision.reason],
  ["Requests", (decision) => count(decision.num_requests)],
  ["Candidates", (decision) => count(decision.num_candidates)],
  ["Nodes", (decision) => count(decision.num_nodes)],
  ["Rows", (decision) => count(decision.num_rows)],
  ["Expected gain", (decision) => times(decision.predicted_gain)],
  ["Observed gain", (decision) => times(decision.observed_gain)],
];

// Rows newest first.
export function decisionsTable(decisions) {
  return table(
    "The last decisions, newest first; gains are over plain decoding",
    COLUMNS.map(([title]) => title),
    decisions.toReversed().map((decision) => COLUMNS.map(([, read]) => read(decision))),
  );
}

export function draftersTable(drafters) {
  return table(
    "Drafters since the server's start",
    ["Drafter", "Drafted", "Accepted", "Share"],
    drafters.map(({ name, drafted, accepted }) => [
      name,
      count(drafted),
      count(accepted),
      drafted ? `${number((100 * accepted) / drafted, 0)} %` : "–",
    ]),
  );
}

export function reasonsTable(reasons) {
  const all = Object.values(reasons).reduce((sum, steps) => sum + steps, 0);
  return table(
    "Why steps had the draft nodes they had",
    ["Reason", "Steps", "Share"],
    Object.entries(reasons).map(([reason, steps]) => [
      reason,
      count(steps),
      all ? `${number((100 * steps) / all, 0)} %` : "–",
    ]),
  );
}

function table(caption, titles, rows) {
  const head = titles.map((title) => element("th", { scope: "col" }, title));
  const body = rows.map((row) => element("tr", {}, ...row.map((text) => element("td", {}, text))));
  if (!body.length) {
    body.push(element("tr", {}, element("td", { colspan: titles.length, class: "none" }, "Nothing yet.")));
  }
  return element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...body),
  );
}
