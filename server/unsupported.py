"""Fields that clients know and this server cannot honour yet: refused by name, never dropped."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from specdec.errors import InvalidRequest

# Each with the values that ask for nothing; null always does. A field that one of the endpoints
# has is refused by the other.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # tools, and answers of a given form
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": ("",),
    "stop_regex": ("", []),
    "logits_processors": ([],),
    # other kinds of input and output
    "prompt_embeds": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "thinking_token_budget": (),
    # what is kept or where it runs
    "store": (False,),
    "service_tier": ("auto", "default"),
    "kv_transfer_params": ({},),
    "session_params": ({},),
    "lora_path": (),
    "id_slot": (-1,),
    "cache_prompt": (True,),
    "extra_key": ("",),
    "rid": (),
    # how tokens are chosen
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "samplers": (),
    "typical_p": (1.0, 1),
    "top_a": (0.0, 0),
    "mirostat": (0,),
    "n_predict": (),
    "repetition_detection": (),
    "no_stop_trim": (False,),
    "vllm_xargs": ({},),
    "custom_params": ({},),
    # what is told besides the text
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "timings_per_token": (False,),
    "return_progress": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    # of one endpoint only
    "echo": (False,),
    "suffix": ("",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "reasoning_effort": (),
    "top_logprobs": (0,),
}


def check_supported(fields: Mapping[str, Any], known: Container[str] = ()) -> None:
    """Raise InvalidRequest naming the first field that asks for what the server cannot do.

    Fields that are `known` are another's to check.
    Example: `{"suffix": "end"}` is refused; `{"suffix": ""}` and `{"suffix": null}` are not.
    """
    for name in sorted(UNSUPPORTED.keys() & fields):
        value = fields[name]
        is_asking = value is not None and not any(_is_same(value, off) for off in UNSUPPORTED[name])
        if is_asking and name not in known:
            raise InvalidRequest(f"{name} is not supported here", param=name)


def _is_same(value: object, off: object) -> bool:
    return type(value) is type(off) and value == off
