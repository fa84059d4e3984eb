"""Lookup: the pretrained drafter of a target, by name."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import UsageError
from specdec.loading import LoadedModel

_FOLDER = Path(__file__).parent


def pretrained(target: LoadedModel, name: str) -> Path:
    """The folder of the drafter `name` for this target. Raises UsageError if there is none."""
    folder = _FOLDER / target.name / name
    if not is_pretrained(target.name, name):
        known = ", ".join(sorted(path.parent.name for path in _FOLDER.glob(f"*/{name}"))) or "none"
        raise UsageError(
            f"no {name} drafter comes with {target.name} (there are for: {known}); give one with"
            f" --drafter {name}=FOLDER, or train one with `specdec train {name}`"
        )
    return folder


def is_pretrained(model: str, name: str) -> bool:
    """Whether the drafter `name` comes with this model, by the name that it is loaded by.

    Example: `is_pretrained("smollm2-135m-instruct", "medusa")`.
    """
    return "/" not in model and (_FOLDER / model / name).is_dir()
