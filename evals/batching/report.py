"""Report: steps, seconds and used slots of each policy, as a table and as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec.evals.batching.policies import Schedule
from specdec.evals.report.compared import Compared
from specdec.evals.report.intervals import Interval
from specdec.evals.report.report import Report
from specdec.evals.report.tables import Table

if TYPE_CHECKING:  # drawn only into a folder, and matplotlib is an extra
    from matplotlib.figure import Figure

NAME = "batching"
POLICIES = ("static", "dynamic", "continuous")
_MOST_PANELS = 3
_SHOWN = 4.0  # longest requests that the picture of slots shows

Row = Mapping[str, Any]
Schedules = Mapping[tuple[int, str], Schedule]  # by slots and policy


def report_of(head: Mapping[str, Any], rows: Sequence[Row], schedules: Schedules) -> Report:
    """The report of a simulation. head: its settings, the first entries."""
    data = {**head, "rows": rows, "compared": [entry.as_json() for entry in _compared(rows)]}
    return Report(
        NAME,
        "Static, dynamic and continuous batching",
        data,
        list(_lines(data)),
        [_table(data)],
        {
            "slots": partial(draw_slots, data, schedules),
            "steps": partial(draw_steps, data),
        },
    )


def _compared(rows: Sequence[Row]) -> Iterator[Compared]:
    for row in rows:
        of = f"{row['policy']}, {row['slots']} slots"
        yield Compared(of, "steps", Interval(row["steps"]), is_higher_better=False)
        if row["seconds"] is not None:
            yield Compared(of, "seconds", Interval(row["seconds"]), is_higher_better=False)


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    arrivals = f"{data['rate']:g} arrivals per step" if data["rate"] else "all there at once"
    yield (
        f"{data['num_requests']} requests of {data['shortest']} to {data['longest']} tokens, "
        f"{data['tokens']} in all; {data['generator']}'s generator, seed {data['seed']}; {arrivals}"
    )
    if data["config"] is not None:
        yield (
            f"seconds are by the measured step costs of {data['config']['model']}, without prompts"
        )


def _table(data: Mapping[str, Any]) -> Table:
    is_priced = data["config"] is not None
    columns: tuple[str, ...] = (
        *("slots", "policy", "steps", "idle", "utilisation %", "static / this"),
        *("wait mean", "wait p99", "latency mean", "latency p99"),
    )
    if is_priced:
        columns += ("seconds", "tokens/s", "static s / this")
    static = {row["slots"]: row for row in data["rows"] if row["policy"] == "static"}
    rows = []
    for row in data["rows"]:
        base = static[row["slots"]]
        cells: tuple[object, ...] = (
            *(row["slots"], row["policy"], row["steps"], row["idle_steps"]),
            *(100 * row["utilisation"], base["steps"] / row["steps"]),
            *(row["wait_steps"]["mean"], row["wait_steps"]["p99"]),
            *(row["latency_steps"]["mean"], row["latency_steps"]["p99"]),
        )
        if is_priced:
            ratio = base["seconds"] / row["seconds"]
            cells += (row["seconds"], row["tokens_per_second"], ratio)
        rows.append(cells)
    return Table("policies", columns, rows, "waits and latencies are in steps, from arrival on:")


def draw_slots(data: Mapping[str, Any], schedules: Schedules) -> Figure:
    """Slots in use, step by step, from the first on; a panel for each number of slots."""
    from specdec.evals.report.style import line_style, new_figure, tidy

    chosen = list(dict.fromkeys(num_slots for num_slots, _ in schedules))[:_MOST_PANELS]
    figure = new_figure("Slots in use, step by step", data, width=9, height=1.3 + 2.8 * len(chosen))
    panels = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    end = int(_SHOWN * data["longest"])
    for axes, num_slots in zip(panels, chosen, strict=True):
        for index, policy in enumerate(POLICIES):
            schedule = schedules[num_slots, policy]
            used = schedule.active[:end]
            style = line_style(index) | {"marker": "", "linewidth": 2.4 - 0.7 * index}
            label = (
                f"{policy}: {schedule.num_steps} steps, {100 * schedule.utilisation:.0f} % in use"
            )
            axes.step(range(len(used)), used, where="post", label=label, **style)
        axes.set(ylim=(0, 1.06 * num_slots), ylabel=f"of {num_slots} slots")
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, frameon=False
        )
        tidy(axes)
    panels[-1].set_xlabel("step, of the first ones")
    return figure


def draw_steps(data: Mapping[str, Any]) -> Figure:
    """Steps of each policy by the number of slots, and beside them seconds where there are any."""
    from specdec.evals.report.style import bar_style, new_figure, tidy

    parts = [("steps", "steps with a request")]
    if data["config"] is not None:
        parts.append(("seconds", "seconds at this machine's step costs"))
    numbers = list(dict.fromkeys(row["slots"] for row in data["rows"]))
    figure = new_figure("What all requests take", data, width=8 if len(parts) == 1 else 12)
    panels = figure.subplots(1, len(parts), squeeze=False)[0]
    for axes, (key, label) in zip(panels, parts, strict=True):
        for index, policy in enumerate(POLICIES):
            found = [row[key] for row in data["rows"] if row["policy"] == policy]
            places = [place + (index - 1) * 0.27 for place in range(len(numbers))]
            axes.bar(places, found, 0.25, label=policy, **bar_style(index))
        axes.set_xticks(range(len(numbers)), numbers)
        axes.set(xlabel="slots", ylabel=label)
        tidy(axes)
        axes.grid(visible=False, axis="x")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    return figure
