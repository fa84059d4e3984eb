"""Prompts written for this project: six tasks, five prompts each, in prompts/*.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

from specdec.evals.data.sample import Sample

FOLDER = Path(__file__).parent / "prompts"
TASKS = ("chat", "code edit", "extraction", "summary", "translation", "story")
QUICK_TASKS = ("chat", "code edit")  # of which the first prompts are asked: short and long copies


def read_prompts(task: str) -> list[Sample]:
    """The prompts of a task, which its file has in order.

    Example: `read_prompts("code edit")[0].sample_id` is "code edit: settings file in Python".
    """
    file = FOLDER / f"{task.replace(' ', '_')}.toml"
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["prompt"]
    return [
        Sample(f"{task}: {entry['name']}", task, ({"role": "user", "content": entry["text"]},))
        for entry in entries
    ]


PROMPTS = tuple(prompt for task in TASKS for prompt in read_prompts(task))
QUICK_PROMPTS = tuple(
    next(prompt for prompt in PROMPTS if prompt.task == task) for task in QUICK_TASKS
)
