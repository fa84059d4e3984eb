"""Fields that clients know and this server cannot honour yet: refused by name, never dropped."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from specdec.errors import InvalidRequest

# Each with the values that ask for nothing; null always does.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": ("",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}


def check_supported(fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise InvalidRequest naming the first field that asks for what the server cannot do.

    Example: `{"echo": true}` is refused; `{"echo": false}` and `{"echo": null}` are not.
    """
    for name in sorted(UNSUPPORTED.keys() & fields):
        value = msgspec.json.decode(fields[name])
        if value is not None and not any(_is_same(value, off) for off in UNSUPPORTED[name]):
            raise InvalidRequest(f"{name} is not supported by this server", param=name)


def _is_same(value: object, off: object) -> bool:
    return type(value) is type(off) and value == off
