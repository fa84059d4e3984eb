// Chart: one or two lines over the last two minutes, drawn as SVG; gaps where nothing is known.

import { element, svg } from "./element.js";
import { number } from "./facts.js";

const WIDTH = 320;
const HEIGHT = 96;
const MOST_ROWS = 64; // of a cost curve: steps have seldom more
const TOP = 8; // room for the line's width
export const SPAN_S = 120;

export class Chart {
  // `series` maps a name to a class; the first names the figure that stands beside the title.
  constructor(title, series, { digits = 1 } = {}) {
    this.title = title;
    this.series = series;
    this.digits = digits;
    this.points = []; // [{ at: s, values: { name: number or null } }]
    this.value = element("span", { class: "value" }, "–");
    this.most = element("span", { class: "most" });
    this.drawing = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${title}: nothing yet`,
    });
    const names = Object.entries(series);
    const legend = names.map(([name, look]) => element("li", { class: look }, name));
    this.node = element(
      "figure",
      { class: "chart" },
      element("figcaption", {}, element("span", {}, title), this.value),
      this.drawing,
      element(
        "div",
        { class: "axis" },
        element("span", {}, "2 min ago"),
        names.length > 1 ? element("ul", { class: "lines" }, ...legend) : null,
        this.most,
      ),
    );
  }

  // Take values at a time in seconds; null or undefined leaves a gap.
  push(at, values) {
    this.points.push({ at, values });
    while (this.points.length && this.points[0].at < at - SPAN_S) this.points.shift();
    this.#draw(at, values);
  }

  #draw(now, values) {
    const names = Object.keys(this.series);
    const known = this.points.flatMap((point) => names.map((name) => point.values[name]));
    const top = niceTop(Math.max(0, ...known.filter((value) => Number.isFinite(value))));
    const texts = names.map((name) => this.#text(values[name]));
    this.value.textContent = texts.join(" / ");
    this.most.textContent = `top ${roundNumber(top)}`;
    this.drawing.setAttribute("aria-label", `${this.title}, now ${texts.join(" and ")}`);
    this.drawing.replaceChildren(
      ...[0.5, 1].map((share) => {
        const y = HEIGHT - share * (HEIGHT - TOP);
        return svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y });
      }),
      ...names.map((name) =>
        svg("path", {
          class: `line ${this.series[name]}`,
          d: path(this.points, name, now, top),
          "vector-effect": "non-scaling-stroke",
        }),
      ),
    );
  }

  #text(value) {
    return Number.isFinite(value) ? number(value, this.digits) : "–";
  }
}

function path(points, name, now, top) {
  let isDown = false;
  const parts = points.map(({ at, values }) => {
    const value = values[name];
    if (!Number.isFinite(value)) {
      isDown = false;
      return "";
    }
    const x = WIDTH * (1 - (now - at) / SPAN_S);
    const y = HEIGHT - (value / top) * (HEIGHT - TOP);
    const step = `${isDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    isDown = true;
    return step;
  });
  return parts.join("");
}

// The least round number that is not below a value. Example: niceTop(13) is 15.
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((top) => top >= value * 0.999);
}

const roundNumber = (value) => number(value, Number.isInteger(value) ? 0 : 1);

// Milliseconds of a forward over its rows, a line per number of requests.
export function costCurve(forwards) {
  const lines = forwards.slice(0, 4).map((forward) => ({
    name: `${forward.requests} ${forward.requests === 1 ? "request" : "requests"}`,
    points: Object.entries(forward.rows_ms)
      .map(([rows, ms]) => [Number(rows), ms])
      .filter(([rows]) => rows <= MOST_ROWS),
  }));
  const all = lines.flatMap((line) => line.points);
  const right = Math.max(1, ...all.map(([rows]) => rows));
  const top = niceTop(Math.max(0, ...all.map(([, ms]) => ms)));
  const at = ([rows, ms]) =>
    `${((WIDTH * rows) / right).toFixed(1)} ${(HEIGHT - (ms / top) * (HEIGHT - TOP)).toFixed(1)}`;
  const drawing = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `Cost of a forward up to ${right} rows, at most ${roundNumber(top)} ms`,
    },
    ...lines.map((line, index) =>
      svg("path", {
        class: `line line-${index + 1}`,
        d: `M${line.points.map(at).join("L")}`,
        "vector-effect": "non-scaling-stroke",
      }),
    ),
  );
  return element(
    "figure",
    { class: "chart" },
    element("figcaption", {}, element("span", {}, "Cost of a forward"), element("span", { class: "value" }, `top ${roundNumber(top)} ms`)),
    drawing,
    element(
      "div",
      { class: "axis" },
      element("span", {}, "0 rows"),
      element("ul", { class: "lines" }, ...lines.map((line, i) => element("li", { class: `line-${i + 1}` }, line.name))),
      element("span", {}, `${right} rows`),
    ),
  );
}
