// Dashboard: asks the server once a second how it does; rests while nobody looks.

import { getJson } from "./api.js";
import { Chart, costCurve } from "./chart.js";
import { decisionsTable, draftersTable, reasonsTable } from "./decisions.js";
import { problem } from "./problem.js";
import { Tiles } from "./tiles.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 4000; // for one answer
const by = (id) => document.getElementById(id);

class Dashboard {
  constructor() {
    this.tiles = new Tiles(by("tiles"));
    this.charts = {
      speed: new Chart("Tokens per second", { tokens_per_s: "line-1" }),
      load: new Chart("Running / queued", { running: "line-1", queued: "line-2" }, { digits: 0 }),
      step: new Chart("Tokens per step", { tokens_per_step: "line-1" }, { digits: 2 }),
      nodes: new Chart("Nodes chosen per step", { nodes: "line-1" }),
    };
    by("charts").append(...Object.values(this.charts).map((chart) => chart.node));
    this.lastStep = null;
    document.addEventListener("visibilitychange", () => this.#start());
    this.#start();
  }

  // One loop at most: it ends when the page is hidden, and begins when it is seen again.
  async #start() {
    if (this.isLooking) return;
    this.isLooking = true;
    while (!document.hidden) {
      await this.look();
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
    this.isLooking = false;
    if (!document.hidden) this.#start(); // seen again while the loop was ending
  }

  async look() {
    const [load, explained] = await Promise.allSettled([
      getJson("/debug/load", { signal: AbortSignal.timeout(PATIENCE_MS) }),
      getJson("/debug/speculation?last=50", { signal: AbortSignal.timeout(PATIENCE_MS) }),
    ]);
    const now = performance.now() / 1000;
    this.#tell(load);
    if (load.status === "fulfilled") this.#showLoad(load.value, now);
    else for (const chart of Object.values(this.charts)) chart.push(now, {});
    if (explained.status === "fulfilled") this.#showSpeculation(explained.value, now);
  }

  // Whether the server is there; an alert is made once, not every second.
  #tell({ reason }) {
    const key = reason ? `${reason.name} ${reason.status ?? ""}` : "";
    if (key === this.toldKey) return;
    this.toldKey = key;
    const isAway = reason && reason.status === undefined;
    by("state").textContent = reason ? (isAway ? "away" : "not answering") : "live";
    by("state").classList.toggle("is-away", Boolean(reason));
    const shown = isAway ? new TypeError("away") : reason; // also when it took too long
    by("notice").replaceChildren(...(reason ? [problem(shown, () => this.look())] : []));
    if (isAway) by("notice").firstChild.append("This page looks again every second.");
  }

  #showLoad(load, now) {
    by("model").textContent = load.model ?? "";
    by("uptime").textContent = load.engine_up
      ? `up ${duration(load.uptime_s)}, ${load.num_steps ?? 0} steps, drafters ${(load.drafters ?? []).join(", ") || "none"}`
      : "the engine is not running";
    this.tiles.show(load);
    this.charts.speed.push(now, load);
    this.charts.load.push(now, load);
    this.charts.step.push(now, load);
    by("drafters").replaceChildren(draftersTable(load.drafters_detail ?? []));
    by("reasons").replaceChildren(reasonsTable(load.reasons ?? {}));
  }

  #showSpeculation(explained, now) {
    const decisions = explained.decisions ?? [];
    const fresh = decisions.filter(({ step }) => this.lastStep !== null && step > this.lastStep);
    this.lastStep = decisions.at(-1)?.step ?? -1;
    const sum = fresh.reduce((total, decision) => total + decision.num_nodes, 0);
    this.charts.nodes.push(now, { nodes: fresh.length ? sum / fresh.length : null });
    by("decisions").replaceChildren(decisionsTable(decisions));
    const forwards = explained.cost?.forwards ?? [];
    by("cost").replaceChildren(...(forwards.length ? [costCurve(forwards)] : []));
  }
}

// Example: duration(3725) is "1 h 2 min".
function duration(seconds) {
  const whole = Math.floor(seconds ?? 0);
  if (whole < 60) return `${whole} s`;
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min`;
}

new Dashboard();
