"""Prompts written for this project, one per kind of work."""

from __future__ import annotations

from specdec.evals.data.sample import Sample

_CODE = """def load_config(path):
    with open(path) as handle:
        lines = handle.readlines()
    config = {}
    for line in lines:
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, value = line.split("=", 1)
        config[key.strip()] = value.strip()
    return config


def save_config(path, config):
    with open(path, "w") as handle:
        for key, value in sorted(config.items()):
            handle.write(key + "=" + value + "\\n")
"""


def _sample(name: str, text: str) -> Sample:
    return Sample(name, name, ({"role": "user", "content": text},))


PROMPTS = (
    _sample("chat", "Why does the sea look blue on some days and grey on others?"),
    _sample(
        "code edit",
        "Rename the function load_config to read_config and return the complete code, "
        f"otherwise unchanged:\n```python\n{_CODE}```",
    ),
)
