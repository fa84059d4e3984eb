"""LatencyPlots: every figure of a report, whatever is missing in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.evals.latency.answer_summary import BASELINE
from tests.evals.latency_case import measured, toy_settings
from tests.evals.toy_folder import write_toy

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from specdec.evals.latency import plots

FIXED = "specdec, ngram"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_toy(tmp_path_factory.mktemp("plots") / "model")
    return measured(toy_settings(folder, "torch", rounds=1, temperatures=(0.0, 0.9)))


def bars_at(axes: Axes, place: int) -> list[Rectangle]:
    """The pieces of the place-th bar."""
    found = [bars.get_children()[place] for bars in axes.containers]
    return [bar for bar in found if isinstance(bar, Rectangle)]


def test_the_floor_and_every_context_have_a_line(data: dict[str, Any]) -> None:
    cells = [{**c, "floor_ms": 1.0, "floor_with_kv_ms": 1.0 + c["context"]} for c in data["steps"]]
    data = {**data, "steps": cells}
    [axes] = plots.plot_steps(data).axes
    legend = axes.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[:2] == ["20 tokens of context", "40 tokens of context"]
    assert labels[2].startswith("floor: reading the weights")
    drawn = {tuple(np.asarray(line.get_ydata()).tolist()) for line in axes.lines}
    for context in (20, 40):
        cells = [cell for cell in data["steps"] if cell["context"] == context]
        assert tuple(cell["step_ms"]["p50"] for cell in cells) in drawn
        assert (cells[0]["floor_with_kv_ms"],) * 2 in drawn


def test_the_bars_of_a_step_add_up_to_it(data: dict[str, Any]) -> None:
    whole, small = plots.plot_breakdown(data).axes
    every = [medians for found in data["temperatures"] for medians in found["breakdown"].values()]
    for place, medians in enumerate(every):
        widths = [bar.get_width() for bar in bars_at(whole, place)]
        assert len(widths) == 8
        parts = ("plan", "draft", "pack", "forward", "verify", "commit", "rest", "deliver")
        assert widths == pytest.approx([medians[part] for part in parts])
    assert len(small.containers) == 7


def test_a_contender_without_times_has_no_bars(data: dict[str, Any]) -> None:
    silent = dict.fromkeys(("ttft_ms", "step_ms", "token_ms"))
    found = data["temperatures"][0]
    names = {**found["contenders"], "silent": silent}
    panels = plots.plot_times(data, {**found, "contenders": names}).axes
    assert len(panels) == 3
    for axes in panels:
        assert [len(bars.get_children()) for bars in axes.containers] == [
            len(found["contenders"])
        ] * 3
        assert len(axes.get_yticks()) == len(names)


def test_every_task_has_a_panel_with_speeds_and_ratios(data: dict[str, Any]) -> None:
    panels = [axes for axes in plots.plot_speed(data).axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["chat", "echo", "all prompts"]
    found = data["temperatures"][0]
    ratio = found["ratios"][f"{FIXED} / {BASELINE}"]
    for axes, value in (
        (panels[0], ratio["tasks"]["chat"]),
        (panels[1], ratio["tasks"]["echo"]),
        (panels[2], ratio["all"]["value"]),
    ):
        texts = [text.get_text() for text in axes.texts]
        assert any(text.endswith(f"  {value:.2f}x") for text in texts)
        assert "x" not in texts[0]  # ours against itself
    # A bar each for ours, plain decoding, the other side, the peer, and the best of its settings.
    for axes in panels:
        bars = [bar for bars in axes.containers for bar in bars.get_children()]
        assert len(bars) == 2 * 5


def test_ratios_have_a_mark_for_each_task(data: dict[str, Any]) -> None:
    panels = plots.plot_ratios(data).axes
    names = ["no drafts", "echo", "echo:lookup, best"]
    assert [text.get_text() for text in panels[0].get_yticklabels()] == names
    for axes, found in zip(panels, data["temperatures"], strict=True):
        ratios = found["ratios"]
        drawn = {tuple(np.asarray(line.get_xdata()).tolist()) for line in axes.lines}
        for other in (BASELINE, "echo", "echo:lookup"):
            ratio = ratios[f"{FIXED} / {other}"]
            assert {(value,) for value in ratio["tasks"].values()} < drawn
            assert (ratio["all"]["value"],) * 2 in drawn
        low, high = axes.get_xlim()
        values = np.concatenate([np.asarray(line.get_xdata(), float) for line in axes.lines])
        assert low <= min(values) and max(values) <= high


def test_answers_of_one_token_have_no_steps_to_draw(data: dict[str, Any]) -> None:
    none = [{**found, "breakdown": {BASELINE: {}, FIXED: {}}} for found in data["temperatures"]]
    assert len(plots.plot_breakdown({**data, "temperatures": none}).axes) == 2
