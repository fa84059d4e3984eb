"""ExplanationView: what a controller explains, as tables for a terminal or for plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 16  # characters
MAX_POINTS = 6  # of a cost curve that are told as numbers

Facts = Mapping[str, Any]


def view(facts: Facts) -> RenderableType:
    """Decisions on top, newest last; below them everything else that was explained.

    `facts` is the JSON of GET /debug/speculation. Only its list `decisions` is expected; counters
    and the cost curve get bars where they look like such, and what is not known is shown as a
    table or a line, whatever it holds.

    Example: `Console().print(view({"decisions": [], "reasons": {"off": 3}}))`.
    """
    others = {name: value for name, value in facts.items() if name != "decisions"}
    head = {name: value for name, value in others.items() if not isinstance(value, dict | list)}
    tables = [
        _SHOW.get(name, _generic)(name, value)
        for name, value in others.items()
        if isinstance(value, dict | list)
    ]
    shown = [Padding(table, (1, 0, 0, 0)) for table in (_decisions(facts["decisions"]), *tables)]
    return Group(Text(_line(head)), shown[0], Columns(shown[1:], padding=(0, 4)))


def as_text(facts: Facts, console: Console) -> str:
    """The view as lines of text, as wide as the console and without its colours and margins."""
    with console.capture() as captured:
        console.print(view(facts))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def plain(text: str) -> str:
    """The text without what could steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def _gain(value: Any) -> Text:
    """A gain over plain decoding, red where it is a loss."""
    if not _is_number(value):
        return Text(_cell(value))
    return Text(f"{value:.2f}x", "" if value >= 1 else "red")


def _microseconds(value: Any) -> Text:
    return Text(f"{1e6 * value:.0f}" if _is_number(value) else _cell(value))


def _text(value: Any) -> Text:
    return Text(_cell(value))


_COLUMNS: tuple[tuple[str, str, Callable[[Any], Text]], ...] = (
    ("step", "step", _text),
    ("reason", "reason", _text),
    ("requests", "num_requests", _text),
    ("candidates", "num_candidates", _text),
    ("nodes", "num_nodes", _text),
    ("rows", "num_rows", _text),
    ("predicted\ngain", "predicted_gain", _gain),
    ("observed\ngain", "observed_gain", _gain),
    ("decide\nus", "decide_s", _microseconds),
)


def _decisions(decisions: Sequence[Any]) -> Table:
    table = _table("decisions", {heading: heading == "reason" for heading, _, _ in _COLUMNS})
    for decision in decisions:
        known = decision if isinstance(decision, Mapping) else {"reason": decision}
        table.add_row(*(show(known.get(field)) for _, field, show in _COLUMNS))
    return table


def _counters(name: str, value: Any) -> RenderableType:
    """Counts by name, each with its share of them all as a bar."""
    if not (isinstance(value, Mapping) and all(map(_is_number, value.values()))):
        return _generic(name, value)
    table = _table(name, {"": True, "steps": False, "share": True})
    total = sum(value.values())
    for key, count in value.items():
        table.add_row(_text(key), _text(count), _bar(count, total))
    return table


def _cost(name: str, value: Any) -> RenderableType:
    """Milliseconds of a forward by its rows, a line for each kind of forward, and other costs."""
    forwards = value.get("forwards") if isinstance(value, Mapping) else None
    if not (isinstance(forwards, list) and forwards and all(map(_is_forward, forwards))):
        return _generic(name, value)
    kinds = list(dict.fromkeys(key for forward in forwards for key in forward if key != _CURVE))
    points = list(dict.fromkeys(rows for forward in forwards for rows in forward[_CURVE]))
    points = [points[i] for i in _spread(len(points), MAX_POINTS)]
    columns = {_label(key): False for key in kinds} | {f"{_label(x)} rows": False for x in points}
    table = _table(f"{name}, ms by rows", {**columns, "curve": True})
    for forward in forwards:
        curve = forward[_CURVE]
        cells = [forward.get(key) for key in kinds] + [curve.get(point) for point in points]
        table.add_row(*map(_text, cells), _Sparkline(list(curve.values())))
    others = {key: item for key, item in value.items() if key != "forwards"}
    table.caption, table.caption_justify = Text(_line(others)), "left"
    return table


_CURVE = "rows_ms"


def _is_forward(value: Any) -> bool:
    curve = value.get(_CURVE) if isinstance(value, Mapping) else None
    return isinstance(curve, Mapping) and bool(curve) and all(map(_is_number, curve.values()))


class _Sparkline:
    """Numbers from 0 to their largest as one character each."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        levels = "01234567" if options.ascii_only else "▁▂▃▄▅▆▇█"
        top = max(self._values) or 1
        last = len(levels) - 1
        yield Text("".join(levels[max(0, round(last * x / top))] for x in self._values))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(len(self._values), len(self._values))


_SHOW = {"reasons": _counters, "cost": _cost}


def _generic(name: str, value: Any) -> RenderableType:
    """A table of anything: a row for each entry of a list, or for each key of a mapping."""
    if isinstance(value, Mapping):
        table = _table(name, {"": True, "value": False})
        for key, item in value.items():
            table.add_row(Text(_label(key)), _text(item))
        return table
    entries = [item if isinstance(item, Mapping) else {name: item} for item in value]
    keys = list(dict.fromkeys(key for entry in entries for key in entry))
    words = {key for entry in entries for key, item in entry.items() if isinstance(item, str)}
    table = _table(name, {_label(key): key in words for key in keys})
    for entry in entries:
        table.add_row(*(_text(entry.get(key)) for key in keys))
    return table


def _table(name: str, columns: Mapping[str, bool]) -> Table:
    """An empty table with a column for each heading; those that hold text stand to the left."""
    table = Table(
        title=Text(_label(name), "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,  # nine columns and their headings fit 80 characters
    )
    for heading, is_text in columns.items():
        table.add_column(Text(heading), justify="left" if is_text else "right", vertical="bottom")
    return table


def _bar(part: float, whole: float) -> ProgressBar:
    return ProgressBar(total=whole or 1, completed=part, width=BAR_WIDTH)


def _spread(num: int, most: int) -> list[int]:
    """At most `most` of `num` indices, evenly from the first to the last.

    Example: `_spread(100, 4)` is [0, 33, 66, 99].
    """
    if num <= most:
        return list(range(num))
    return [i * (num - 1) // (most - 1) for i in range(most)]


def _line(facts: Facts) -> str:
    """Names and values in one line."""
    return ", ".join(
        f"{_label(name)}: {_line(value) or '-'}"
        if isinstance(value, Mapping)
        else f"{_label(name)} {_cell(value)}"
        for name, value in facts.items()
    )


def _label(name: str) -> str:
    return plain(name).replace("_", " ")


def _cell(value: Any) -> str:
    """A value in short: four digits of a number, text as it is, anything deeper as JSON."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
