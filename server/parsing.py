"""Parsing: from the bytes of a request to its body, or to one line on what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, inspect

from specdec.errors import InvalidRequest
from specdec.server.protocol import GenerationBody
from specdec.server.unsupported import UNSUPPORTED, check_supported

MAX_NAME_LEN = 64  # characters of a field's name that a client made up

Parsed = TypeVar("Parsed", bound=Struct)
Body = TypeVar("Body", bound=GenerationBody)


def parse_body(raw: bytes, kind: type[Body], *, strict: bool = False) -> Body:
    """Decode and check the body of a generation.

    Raises InvalidRequest: malformed JSON, a wrong type, fields that contradict each other, or one
    that is known but unsupported. Unknown fields are ignored unless `strict`, which refuses them.
    Example: `parse_body(b'{"model":"m","prompt":"a"}', CompletionBody)`.
    """
    fields = parse_json(raw)
    body = _typed(raw, kind)
    check_supported(fields, kind.__struct_fields__)
    if strict:
        check_known(fields, kind, also=UNSUPPORTED)
    body.check()
    return body


def parse_struct(raw: bytes, kind: type[Parsed], *, strict: bool = False) -> Parsed:
    """Decode and check the body of any other request; raises as `parse_body` does."""
    fields = parse_json(raw)
    parsed = _typed(raw, kind)
    if strict:
        check_known(fields, kind)
    return parsed


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object that the bytes are; raises InvalidRequest for anything else.

    Repeated keys are refused: readers differ in which of them counts.
    """
    try:
        text = raw.decode()
        value = msgspec.json.decode(raw)  # stricter than json on numbers and surrogates
        if not isinstance(value, dict):
            raise InvalidRequest("the body must be a JSON object")
        json.loads(text, object_pairs_hook=_without_repeats)
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (msgspec.DecodeError, ValueError) as error:  # also an integer of thousands of digits
        reason = " ".join(str(error).split())
        raise InvalidRequest(f"the body is not valid JSON: {reason}"[:200]) from None
    return value


def check_known(
    fields: Mapping[str, Any], kind: type[Struct], *, also: Container[str] = ()
) -> None:
    """Raise InvalidRequest naming the first field, at any depth, that `kind` does not have.

    Example: `check_known({"modle": "m"}, ChatBody)` is refused with the param "modle".
    """
    for name in _unknown(fields, _fields_of(kind), ""):
        if name not in also:
            shown = name[:MAX_NAME_LEN]
            raise InvalidRequest(
                f"unknown field {shown!r}; this server refuses those (--strict-params)", param=shown
            )


def _typed(raw: bytes, kind: type[Parsed]) -> Parsed:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        message, param = locate(str(error))
        raise InvalidRequest(message, param=param) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}"[:200]) from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = name[:MAX_NAME_LEN]
                raise InvalidRequest(f"the body holds {shown!r} more than once", param=shown)
            seen.add(name)
    return found


@cache
def _fields_of(kind: type[Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _unknown(value: Any, kind: inspect.Type, where: str) -> Iterator[str]:
    """Paths of the fields that a type does not have. Dictionaries may hold anything."""
    kind = _structured(kind)
    if isinstance(kind, inspect.ListType) and isinstance(value, list):
        for idx, item in enumerate(value):
            yield from _unknown(item, kind.item_type, f"{where}[{idx}]")
    elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
        types = {field.encode_name: field.type for field in kind.fields}
        for name, item in value.items():
            path = f"{where}.{name}" if where else name
            if name in types:
                yield from _unknown(item, types[name], path)
            else:
                yield path


def _structured(kind: inspect.Type) -> inspect.Type:
    """The part of a type that has fields: a struct or a list of them; else AnyType."""
    if isinstance(kind, inspect.StructType):
        return kind
    if isinstance(kind, inspect.ListType):
        has_fields = not isinstance(_structured(kind.item_type), inspect.AnyType)
        return kind if has_fields else inspect.AnyType()
    options = kind.types if isinstance(kind, inspect.UnionType) else ()
    found = (_structured(option) for option in options)
    return next((o for o in found if not isinstance(o, inspect.AnyType)), inspect.AnyType())


def locate(message: str) -> tuple[str, str | None]:
    """Split a msgspec message into what is wrong and the field that it is about.

    Example: "Expected `int`, got `str` - at `$.n`" gives ("n: Expected `int`, got `str`", "n").
    """
    what, _, path = message.partition(" - at `$")
    missing = re.search(r"missing required field `(\w+)`", what)
    names = [path.rstrip("`").lstrip(".")] + ([missing.group(1)] if missing else [])
    param = ".".join(name for name in names if name).removesuffix("[...]")
    return (f"{param}: {what}" if param and not missing else what)[:400], param or None
