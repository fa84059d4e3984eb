"""Comparison: every figure of one or several runs against the base's, regressions first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec.errors import UsageError
from specdec.evals.compare.change import Change, Mark
from specdec.evals.compare.differences import Difference, differences
from specdec.evals.compare.run import Name, Run
from specdec.evals.report.intervals import LEVEL
from specdec.evals.report.machine import machine_line, origin
from specdec.evals.report.report import Report
from specdec.evals.report.tables import Table

NAME = "compare"


@dataclass(frozen=True)
class Pair:
    """One run beside the base. `only_base` and `only_run` are figures that the other lacks."""

    run: Run
    changes: tuple[Change, ...]
    differences: tuple[Difference, ...]
    only_base: tuple[Name, ...]
    only_run: tuple[Name, ...]

    @classmethod
    def of(cls, base: Run, run: Run, tolerance: float) -> Pair:
        """Raises UsageError if they are of different commands, or have no figure in common."""
        if base.kind != run.kind:
            raise UsageError(
                f"{base.file} is of specdec {base.kind} and {run.file} of specdec {run.kind}: "
                "compare reports of one command"
            )
        common = [name for name in base.entries if name in run.entries]
        if not common:
            raise UsageError(f"{base.file} and {run.file} have no figure in common")
        return cls(
            run,
            tuple(
                Change.between(base.entries[name], run.entries[name], tolerance) for name in common
            ),
            tuple(differences(base.data, run.data)),
            tuple(name for name in base.entries if name not in run.entries),
            tuple(name for name in run.entries if name not in base.entries),
        )


@dataclass(frozen=True)
class Comparison:
    """All runs against the base. tolerance: a share.

    Example: `Comparison.of([Run.read(a), Run.read(b)], 0.02).num_worse`.
    """

    base: Run
    pairs: tuple[Pair, ...]
    tolerance: float

    @classmethod
    def of(cls, runs: Sequence[Run], tolerance: float) -> Comparison:
        """The first run is the base. Raises UsageError as Pair.of does."""
        base, *others = runs
        return cls(base, tuple(Pair.of(base, run, tolerance) for run in others), tolerance)

    @property
    def num_worse(self) -> int:
        """Regressions of all runs."""
        return sum(change.mark is Mark.WORSE for _, change in self.ordered())

    def ordered(self) -> list[tuple[Run, Change]]:
        """Regressions first, the largest before all; then gains, then the rest as they come."""
        marks = list(Mark)

        def place(item: tuple[Run, Change]) -> tuple[int, float]:
            change = item[1]
            is_sure = change.mark in (Mark.WORSE, Mark.BETTER)
            sign = 1 if change.mark is Mark.WORSE else -1
            return marks.index(change.mark), sign * change.gain if is_sure else 0.0

        return sorted(
            ((pair.run, change) for pair in self.pairs for change in pair.changes), key=place
        )

    def report(self) -> Report:
        """With a table of all changes, and a forest plot."""
        from specdec.evals.compare.plot import forest

        data = self.as_json()
        ordered = self.ordered()
        return Report(
            NAME,
            f"specdec {self.base.kind}: {len(self.pairs) + 1} runs compared",
            data,
            tuple(self._lines()),
            (self._table(ordered),),
            {"ratios": lambda: forest(ordered, self.tolerance, data)},
        )

    def as_json(self) -> dict[str, Any]:
        """Runs, what else differs, and the changes as they are shown."""
        found = origin()
        runs = (self.base, *(pair.run for pair in self.pairs))
        return {
            "date": found["date"],
            "command": found["command"],
            "runs": [
                {
                    "file": str(run.file),
                    **{name: run.data.get(name) for name in ("date", "command", "machine")},
                }
                for run in runs
            ],
            "tolerance": self.tolerance,
            "num_worse": self.num_worse,
            "changes": [
                {"run": str(run.file), **change.as_json()} for run, change in self.ordered()
            ],
            "differences": [
                {"run": str(pair.run.file), **asdict(difference)}
                for pair in self.pairs
                for difference in pair.differences
            ],
            "missing": [
                {"file": str(file), "of": of, "figure": figure}
                for pair in self.pairs
                for file, names in (
                    (pair.run.file, pair.only_base),
                    (self.base.file, pair.only_run),
                )
                for of, figure in names
            ],
        }

    def _lines(self) -> Iterator[str]:
        yield f"base: {_described(self.base)}"
        for pair in self.pairs:
            yield f"run: {_described(pair.run)}"
            for difference in pair.differences:
                yield f"warning: not the same: {difference}"
            yield from _missing(pair.run, pair.only_base)
            yield from _missing(self.base, pair.only_run)
        ordered = self.ordered()
        counts = Counter(change.mark for _, change in ordered)
        found = ", ".join(f"{counts[mark]} {mark.value}" for mark in Mark)
        yield (
            f"{found}; marked from {100 * self.tolerance:g} % on, and only where the ratio's "
            f"{100 * LEVEL:g} % interval leaves out 1"
        )
        by_chance = len(ordered) * (1 - LEVEL) / 2
        if by_chance >= 1:
            yield f"by chance alone up to {by_chance:.0f} of {len(ordered)} would be called worse"

    def _table(self, ordered: Sequence[tuple[Run, Change]]) -> Table:
        run = ("run",) if len(self.pairs) > 1 else ()
        head = ("mark", *run, "of", "figure", "base", "value", "ratio", "low", "high", "from")
        rows = [_row(change, (str(item.file),) if run else ()) for item, change in ordered]
        return Table("changes", head, rows, "ratio: the run's figure over the base's")


def _row(change: Change, run: tuple[str, ...]) -> tuple[object, ...]:
    ratio = change.ratio
    bounds = (None, None, None) if ratio is None else (ratio.value, ratio.low, ratio.high)
    mark, named = change.mark.shown, (change.of, change.named)
    return (mark, *run, *named, change.base, change.value, *bounds, change.basis)


def _described(run: Run) -> str:
    machine: Mapping[str, Any] | None = run.data.get("machine")
    try:
        words = f"; {machine_line(dict(machine or {}))}"
    except (KeyError, AttributeError, TypeError, ValueError):
        words = ""
    return f"{run.file}, {run.data.get('date', 'no date')}{words}"


def _missing(run: Run, names: Sequence[Name]) -> Iterator[str]:
    for of, figure in names:
        yield f"not in {run.file}: {figure} of {of}"
