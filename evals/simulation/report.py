"""SimulationReport: adaptive control against plain decoding and fixed budgets, at equal work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.adaptive import AdaptiveController
from specdec.controller import Controller, FixedBudget
from specdec.evals.report.progress import progress
from specdec.evals.report.tables import table
from specdec.evals.simulation.population import Phase, Population, standard
from specdec.evals.simulation.simulator import ControllerFactory, SimulationResult, simulate
from specdec.evals.simulation.virtual_machine import VirtualMachine, standard_machines

NODE_BUDGET = 64  # of the adaptive controller
FIXED_BUDGETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
BATCH_SIZES = (1, 4, 16, 64)
TRIAL_SHARE, TRIAL_TOKENS = 0.15, 1500  # of the work after which the worst budgets are given up
HOPELESS, ABSURD = 0.92, 0.7  # of the best one's throughput: not run on; no larger one is tried
NUM_STEPS = 400  # of a run with SIZING_BUDGET; short ones would mostly show how it begins
NUM_TOKENS = 2500  # at least, so that few requests give a steady figure too
SIZING_BUDGET, SIZING_STEPS = 16, 40  # of the run that tells how much work that is


@dataclass(frozen=True)
class FixedBudgets:
    """Fixed node budgets compared; `best` is the best in hindsight, 0 being plain decoding."""

    throughputs: Mapping[int, float]
    best: int
    result: SimulationResult

    @property
    def throughput(self) -> float:
        """Of the best, in tokens per virtual second."""
        return self.throughputs[self.best]


def fixed(node_budget: int) -> ControllerFactory:
    """All drafters are asked, and the `node_budget` best nodes of each request verified."""
    return lambda machine, population: FixedBudget(node_budget)


def adaptive(
    node_budget: int = NODE_BUDGET, *, latency_weight: float = 0.0, wrong_by: float = 0.0
) -> ControllerFactory:
    """The production controller; `wrong_by` bends its start-up table (VirtualMachine.step_cost)."""

    def make(machine: VirtualMachine, population: Population) -> Controller:
        most = max(phase.concurrency for phase in population.phases)
        return AdaptiveController(
            machine.step_cost(most, most * (1 + node_budget), wrong_by=wrong_by),
            population.drafter_names,
            node_budget=node_budget,
            latency_weight=latency_weight,
            sequential=[d.name for d in population.drafters if d.level_s > 0],
        )

    return make


def best_fixed(
    machine: VirtualMachine,
    population: Population,
    *,
    seed: int = 0,
    node_budgets: Sequence[int] = FIXED_BUDGETS,
) -> FixedBudgets:
    """The fixed node budget with the highest throughput.

    Of a population with one phase, budgets that fall far behind in a part of the work are not run
    to the end: their throughput is that of the part, or missing where smaller ones told enough.
    """
    found: dict[int, float] = {}
    phase, budgets = population.phases[0], sorted(node_budgets)
    if len(population.phases) == 1 and phase.num_tokens is not None:
        num_tokens = max(TRIAL_TOKENS, int(TRIAL_SHARE * phase.num_tokens))
        trial = population.at(phase.concurrency, min(num_tokens, phase.num_tokens))
        for budget in budgets:
            found[budget] = simulate(machine, trial, fixed(budget), seed=seed).throughput
            if found[budget] < ABSURD * max(found.values()):
                break
        hope = HOPELESS * max(found.values())
        budgets = [budget for budget in found if found[budget] >= hope]
    results = {
        budget: simulate(machine, population, fixed(budget), seed=seed) for budget in budgets
    }
    found |= {budget: result.throughput for budget, result in results.items()}
    best = max(results, key=lambda budget: found[budget])
    return FixedBudgets(found, best, results[best])


def report(
    *,
    machines: Sequence[VirtualMachine] | None = None,
    populations: Sequence[Population] | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seed: int = 0,
) -> dict[str, Any]:
    """Every machine with every population at every batch size, ready for JSON.

    Example: `print(render(report(batch_sizes=(1, 64))))`.
    """
    cases = [
        (machine, population, batch)
        for machine in machines or standard_machines()
        for population in populations or standard()
        for batch in batch_sizes
    ]
    rows = []
    with progress(len(cases)) as advance:
        for machine, population, batch in cases:
            advance(f"{machine.name}: {population.name} x {batch}")
            rows.append(_row(machine, population, batch, seed))
    return {"seed": seed, "node_budget": NODE_BUDGET, "rows": rows}


def at_work(
    machine: VirtualMachine, population: Population, batch: int, num_steps: int = NUM_STEPS
) -> Population:
    """The population at this batch size, with as much work as `num_steps` speculative steps do."""
    trial = population.through(Phase(batch, num_steps=SIZING_STEPS))
    result = simulate(machine, trial, fixed(SIZING_BUDGET))
    per_step = float(result.tokens.sum()) / SIZING_STEPS
    return population.at(batch, max(NUM_TOKENS, int(num_steps * per_step)))


def _row(machine: VirtualMachine, population: Population, batch: int, seed: int) -> dict[str, Any]:
    served = at_work(machine, population, batch)
    best = best_fixed(machine, served, seed=seed)
    ours = simulate(machine, served, adaptive(), seed=seed)
    off = ours.plain_throughput
    reasons = Counter(reason.value for reason in ours.reasons)
    return {
        "machine": machine.name,
        "population": population.name,
        "batch": batch,
        "plain": round(off, 2),
        "best_fixed": round(best.throughput, 2),
        "best_budget": best.best,
        "adaptive": round(ours.throughput, 2),
        "adaptive_per_plain": round(ours.throughput / off, 4),
        "adaptive_per_best": round(ours.throughput / best.throughput, 4),
        "nodes_per_request": round(float(ours.nodes.sum() / ours.requests.sum()), 2),
        "fixed": {str(budget): round(x, 2) for budget, x in best.throughputs.items()},
        "reasons": dict(reasons.most_common()),
    }


def render(report: Mapping[str, Any]) -> str:
    """A row per machine, population and batch size, then the worst ratios."""
    return "\n".join(_lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    rows = report["rows"]
    yield "tokens per virtual second; best = the best fixed node budget in hindsight"
    columns = "machine requests batch plain best budget adaptive nodes /plain /best"
    yield from table(
        columns.split(),
        [
            (
                *(row["machine"], row["population"], row["batch"], f"{row['plain']:.0f}"),
                *(f"{row['best_fixed']:.0f}", row["best_budget"], f"{row['adaptive']:.0f}"),
                f"{row['nodes_per_request']:.1f}",
                f"{row['adaptive_per_plain']:.3f}",
                f"{row['adaptive_per_best']:.3f}",
            )
            for row in rows
        ],
    )
    for name in ("adaptive_per_plain", "adaptive_per_best"):
        worst = min(rows, key=lambda row: row[name])
        yield (
            f"worst {name.replace('_', ' ')}: {worst[name]:.3f} "
            f"({worst['machine']}, {worst['population']}, batch {worst['batch']})"
        )
