// Tiles: the figures of a server's load, one to a tile; what is not known is a dash.

import { element } from "./element.js";
import { number } from "./facts.js";

const figure = (digits, unit = "") => (value) => number(value, digits) + unit;
const percent = (value) => `${number(100 * value, 0)} %`;

const TILES = [
  ["Tokens per second", (load) => load.tokens_per_s, figure(1)],
  ["Tokens per step", (load) => load.tokens_per_step, figure(2)],
  ["Drafts accepted", (load) => load.acceptance_rate, percent],
  ["Running", (load) => load.running, figure(0)],
  ["Queued", (load) => load.queued, figure(0)],
  ["First token, median", (load) => load.ttft_ms?.p50, figure(0, " ms")],
  ["First token, p99", (load) => load.ttft_ms?.p99, figure(0, " ms")],
  ["Token gap, median", (load) => load.itl_ms?.p50, figure(1, " ms")],
  ["Token gap, p99", (load) => load.itl_ms?.p99, figure(1, " ms")],
  ["Step", (load) => load.step_ms, figure(1, " ms")],
  ["KV cache used", (load) => load.kv_used, percent],
  ["Prompt tokens cached", (load) => load.prefix_hit_rate, percent],
];

export class Tiles {
  constructor(list) {
    this.values = TILES.map(([title]) => {
      const value = element("dd", {}, "–");
      list.append(element("div", { class: "tile" }, element("dt", {}, title), value));
      return value;
    });
  }

  show(load) {
    TILES.forEach(([, read, write], index) => {
      const value = read(load);
      this.values[index].textContent = Number.isFinite(value) ? write(value) : "–";
    });
  }
}
