"""JsonText: JSON that every reader takes, which has no number that is not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.errors import SpecdecError


def json_text(data: Any, *, indent: int | None = None) -> str:
    """`data` as JSON. Raises SpecdecError that says where a number is not finite.

    Example: `json_text({"speed": 1.5}) == '{"speed": 1.5}'`.
    """
    try:
        return json.dumps(data, indent=indent, allow_nan=False)
    except ValueError:
        found = next(_not_finite(data, ""), None)
        if found is None:
            raise
        place, value = found
        raise SpecdecError(
            f"{place} was measured as {value}, which is no number: please report this as a fault"
        ) from None


def _not_finite(data: Any, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(data, float):
        if not math.isfinite(data):
            yield place or "the result", data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _not_finite(value, f"{place}.{key}" if place else str(key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _not_finite(value, f"{place}[{index}]")
