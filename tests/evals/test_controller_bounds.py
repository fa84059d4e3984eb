"""What adaptive control promises, on virtual machines with virtual requests.

Never far below plain decoding, close to the best fixed budget in hindsight, and back there soon
after a change. All sides serve the same requests; where few requests run at once, several seeds
are added up, so that what is left of chance is well below the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from specdec.evals.simulation import population as populations
from specdec.evals.simulation.population import Phase, Population
from specdec.evals.simulation.report import (
    ABSURD,
    FIXED_BUDGETS,
    adaptive,
    at_work,
    best_fixed,
    fixed,
)
from specdec.evals.simulation.simulator import ControllerFactory, SimulationResult, simulate
from specdec.evals.simulation.virtual_machine import (
    VirtualMachine,
    compute_bound,
    four_bit_gpu,
    memory_bound,
    mixture_of_experts,
)

LEAST_OF_PLAIN = 0.98
LEAST_OF_BEST = 0.97
LEAST_AFTER_CHANGE = 0.95
MOST_WHEN_OFF = 1.02  # of a plain step
STEPS_TO_FOLLOW, STEPS_TO_END, STEPS_TO_RESUME = 50, 20, 300
WINDOW = 100  # steps that are looked at from then on
NUM_STEPS = {1: 300, 4: 300, 16: 300, 64: 150, 512: 75}  # of a comparison, by batch size
ROUNDS = 16  # requests at once times seeds, at least, where something changes

MACHINES = (memory_bound(), four_bit_gpu(), compute_bound(0.1), mixture_of_experts())
BATCH_SIZES = (1, 4, 16, 64)


def steady_cases() -> Iterator[object]:
    """Every machine with every population, at batch sizes in turn; a few at 512."""
    for row, machine in enumerate(MACHINES):
        for column, served in enumerate(populations.standard()):
            batch = BATCH_SIZES[(row + column) % len(BATCH_SIZES)]
            yield pytest.param(machine, served, batch, id=name(machine, served, batch))
    for machine, served in (
        (memory_bound(), populations.chat()),
        (compute_bound(0.03), populations.mixed()),
    ):
        yield pytest.param(machine, served, 512, id=name(machine, served, 512))


def name(machine: VirtualMachine, served: Population, batch: int) -> str:
    return f"{machine.name}-{served.name}-{batch}"


@pytest.mark.parametrize(("machine", "served", "batch"), list(steady_cases()))
def test_it_is_as_fast_as_plain_decoding_and_as_the_best_fixed_budget(
    machine: VirtualMachine, served: Population, batch: int
) -> None:
    asked = at_work(machine, served, batch, NUM_STEPS[batch])
    ours = simulate(machine, asked, adaptive())
    best = best_fixed(machine, asked)
    of_plain = ours.throughput / ours.plain_throughput
    of_best = ours.throughput / best.throughput
    assert of_plain >= LEAST_OF_PLAIN, f"{of_plain:.3f} of plain decoding"
    assert of_best >= LEAST_OF_BEST, f"{of_best:.3f} of {best.best} nodes; {of_plain:.3f} of plain"


@pytest.mark.parametrize("wrong_by", [-0.15, 0.15])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_wrong_profile_is_put_right(wrong_by: float, batch: int) -> None:
    """Off by a factor of 2 at 32 rows, either way, and measured with noise and outliers."""
    machine = compute_bound(0.05)
    asked = at_work(machine, populations.chat(), batch, 3 * NUM_STEPS[batch])
    ours = simulate(machine.noisy(), asked, adaptive(wrong_by=wrong_by))
    best = best_fixed(machine, asked)
    of_best = ours.throughput / best.throughput
    assert of_best >= LEAST_OF_BEST, f"{of_best:.3f} of {best.best} nodes"


@dataclass(frozen=True)
class Totals:
    """Runs with several seeds, added up."""

    results: tuple[SimulationResult, ...]

    def rate(self, phase: int, begin: int, end: int) -> float:
        """Tokens per virtual second of steps [begin, end) of a phase."""
        tokens, seconds, _ = self._sums(phase, begin, end)
        return tokens / seconds

    def overhead(self, phase: int, begin: int, end: int) -> float:
        """Seconds over those of plain steps."""
        _, seconds, plain_seconds = self._sums(phase, begin, end)
        return seconds / plain_seconds

    def _sums(self, phase: int, begin: int, end: int) -> tuple[float, float, float]:
        total = np.zeros(3)
        for result in self.results:
            first, last = result.phase(phase)
            own = slice(first + begin, first + end)
            assert first + end <= last
            for index, values in enumerate((result.tokens, result.seconds, result.plain_seconds)):
                total[index] += values[own].sum()
        return float(total[0]), float(total[1]), float(total[2])


def run(
    machine: VirtualMachine, served: Population, policy: ControllerFactory, num_seeds: int
) -> Totals:
    return Totals(tuple(simulate(machine, served, policy, seed=seed) for seed in range(num_seeds)))


@cache
def best_rate(
    machine: VirtualMachine, served: Population, concurrency: int, usefulness: float = 1.0
) -> float:
    """Tokens per second of the best fixed budget where nothing ever changes."""
    num_steps = 200 if concurrency < 16 else 60
    steady = served.through(Phase(concurrency, num_steps=num_steps, usefulness=usefulness))
    num_seeds = max(1, ROUNDS // concurrency)
    best = 0.0
    for budget in FIXED_BUDGETS:
        rate = run(machine, steady, fixed(budget), num_seeds).rate(0, 0, num_steps)
        best = max(best, rate)
        if rate < ABSURD * best:
            break
    return best


def check_followed(
    machine: VirtualMachine, served: Population, phases: Sequence[int], num_seeds: int
) -> None:
    """In these phases it is as fast as the best fixed budget once it had time to follow."""
    ours = run(machine, served, adaptive(), num_seeds)
    found = {}
    for index in phases:
        phase = served.phases[index]
        best = best_rate(machine, served.through(), phase.concurrency, phase.usefulness)
        found[index] = ours.rate(index, STEPS_TO_FOLLOW, phase.num_steps or 0) / best
    shown = ", ".join(f"{ratio:.3f} in phase {index}" for index, ratio in found.items())
    assert min(found.values()) >= LEAST_AFTER_CHANGE, f"of the best: {shown}"


@pytest.mark.parametrize("machine", [four_bit_gpu(), compute_bound(0.1)], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "served", [populations.chat(), populations.copying(), populations.trees()], ids=lambda p: p.name
)
def test_it_follows_the_load(machine: VirtualMachine, served: Population) -> None:
    phases = (Phase(1, num_steps=100), Phase(64, num_steps=80), Phase(1, num_steps=250))
    check_followed(machine, served.through(*phases), (1, 2), num_seeds=8)


def changing(served: Population, batch: int) -> Population:
    """Guesses are good, useless, and good again."""
    good = STEPS_TO_RESUME + WINDOW
    return served.through(
        Phase(batch, num_steps=100),
        Phase(batch, num_steps=good, usefulness=0.0),
        Phase(batch, num_steps=good),
    )


CHANGING = [
    pytest.param(machine, served, batch, id=name(machine, served, batch))
    for machine, served, batch in (
        (memory_bound(), populations.copying(), 1),
        (compute_bound(0.1), populations.chat(), 1),
        (compute_bound(0.05), populations.trees(), 4),
        (four_bit_gpu(), populations.chat("uninformative"), 16),
        (mixture_of_experts(), populations.several(), 16),
        (memory_bound(), populations.chat(), 64),
    )
]


@pytest.mark.parametrize(("machine", "served", "batch"), CHANGING)
def test_it_ends_when_guesses_become_useless_and_resumes_when_they_are_good_again(
    machine: VirtualMachine, served: Population, batch: int
) -> None:
    ours = run(machine, changing(served, batch), adaptive(), max(1, ROUNDS // batch))
    begin = STEPS_TO_END
    off = [ours.overhead(1, at, at + WINDOW) for at in (begin, begin + WINDOW)]
    assert max(off) <= MOST_WHEN_OFF, f"{off[0]:.3f}, then {off[1]:.3f} of plain steps"
    rate = ours.rate(2, STEPS_TO_RESUME, STEPS_TO_RESUME + WINDOW)
    again = rate / best_rate(machine, served, batch)
    assert again >= LEAST_AFTER_CHANGE, f"{again:.3f} of the best when good again"


@pytest.mark.parametrize(("machine", "served", "batch"), CHANGING[1:5])
def test_it_follows_guesses_that_become_worse(
    machine: VirtualMachine, served: Population, batch: int
) -> None:
    worse = Phase(batch, num_steps=STEPS_TO_FOLLOW + WINDOW, usefulness=0.4)
    asked = served.through(Phase(batch, num_steps=100), worse)
    check_followed(machine, asked, (1,), max(1, ROUNDS // batch))


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(
    ("after", "num_steps"),
    [(compute_bound(0.05).slower(2.0), STEPS_TO_FOLLOW), (compute_bound(0.1), STEPS_TO_RESUME)],
    ids=["slower", "steeper"],
)
def test_it_follows_a_machine_that_changes(
    after: VirtualMachine, num_steps: int, batch: int
) -> None:
    """Twice as slow, soon; rows that became twice as dear, once many steps showed it."""
    served, before = populations.chat(), compute_bound(0.05)
    begin = 2000 * batch
    machine = before.becoming(after, begin, begin)
    window = 4 * WINDOW if batch == 1 else WINDOW
    phases = (Phase(batch, num_tokens=begin), Phase(batch, num_steps=num_steps + window))
    ours = run(machine, served.through(*phases), adaptive(), 2)
    ratio = ours.rate(1, num_steps, num_steps + window) / best_rate(after, served, batch)
    assert ratio >= LEAST_AFTER_CHANGE, f"{ratio:.3f} of the best on the changed machine"
