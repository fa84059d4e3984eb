"""LatencyPlots: every figure of a report, whatever is missing in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.evals.latency.summary import BASELINE
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
    return measured(toy_settings(folder, "torch", rounds=1))


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
    for place, medians in enumerate(data["breakdown"].values()):
        widths = [bar.get_width() for bar in bars_at(whole, place)]
        assert len(widths) == 8
        parts = ("plan", "draft", "pack", "forward", "verify", "commit", "rest", "deliver")
        assert widths == pytest.approx([medians[part] for part in parts])
    assert len(small.containers) == 7


def test_a_contender_without_times_has_no_bars(data: dict[str, Any]) -> None:
    silent = dict.fromkeys(("ttft_ms", "step_ms", "token_ms"))
    names = {**data["contenders"], "silent": silent}
    panels = plots.plot_times({**data, "contenders": names}).axes
    assert len(panels) == 3
    for axes in panels:
        assert [len(bars.get_children()) for bars in axes.containers] == [
            len(data["contenders"])
        ] * 3
        assert len(axes.get_yticks()) == len(names)


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_every_prompt_has_a_panel_with_ratios(data: dict[str, Any], num_prompts: int) -> None:
    prompts = {f"task {n}": data["prompts"]["echo"] for n in range(num_prompts)}
    panels = list(plots.plot_speed({**data, "prompts": prompts}).axes)
    shown = [axes for axes in panels if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == list(prompts)
    texts = [text.get_text() for text in shown[0].texts]
    ratio = prompts["task 0"]["ratios"][f"{FIXED} / {BASELINE}"]  # of rounds, not of medians
    assert f"({ratio:.2f}x)" in texts[1] and "x" not in texts[0]


def test_a_peers_ratio_is_the_tables_turned_round() -> None:
    assert plots.over_plain({f"{BASELINE} / peer": 1.6}, "peer") == 1 / 1.6
    assert plots.over_plain({f"ours / {BASELINE}": 1.6}, "ours") == 1.6
    assert plots.over_plain({}, BASELINE) is None


def test_answers_of_one_token_have_no_steps_to_draw(data: dict[str, Any]) -> None:
    none: dict[str, Any] = {BASELINE: {}, FIXED: {}}
    assert len(plots.plot_breakdown({**data, "breakdown": none}).axes) == 2
