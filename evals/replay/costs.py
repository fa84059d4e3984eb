"""Costs: the step cost curve that turns replayed steps into predicted speed."""

from __future__ import annotations

import json
from pathlib import Path

from specdec.builtin_model import cache_folder
from specdec.errors import UsageError
from specdec.loading import LoadedModel
from specdec.step_cost import StepCost

MEASURED = "measured"


def read_cost(source: str, loaded: LoadedModel) -> tuple[str, StepCost]:
    """The curve in a file, or of "measured" the one that an engine measured here last.

    Beside it, what it is of, in words. Raises UsageError if there is none, or it is not such a
    file.

    Example: `read_cost("measured", loaded)` after `specdec generate "Hi"` with this model.
    """
    file = _newest(loaded) if source == MEASURED else Path(source)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{file} is not JSON") from None
    try:
        of = found["identity"]
        words = f"{file}, {of['model']} with {of['weights']} weights, {of['device']}"
        return words, StepCost.from_json(found["table"])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{file} holds no step costs as the engine keeps them") from None


def _newest(loaded: LoadedModel) -> Path:
    """The last file that is of this model's name and shape."""
    shape = repr(loaded.model.config)
    files = sorted(
        (cache_folder() / "step-cost").glob("*.json"), key=lambda file: -file.stat().st_mtime
    )
    for file in files:
        try:
            identity = json.loads(file.read_text(encoding="utf-8"))["identity"]
            if (identity["model"], identity["shape"]) == (loaded.name, shape):
                return file
        except (OSError, ValueError, KeyError, TypeError):
            continue
    raise UsageError(
        f"no step costs of {loaded.name} were measured here: `specdec generate` with this model"
        " measures them first, or name a FILE"
    )
