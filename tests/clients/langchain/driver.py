"""Driver of LangChain's ChatOpenAI: invoke, generate and stream, sync and async."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from langchain_core.messages import (  # type: ignore[import-not-found]  # in its own environment
    convert_to_messages,
)
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]  # in its own environment

Json = dict[str, Any]
LOOP = asyncio.Runner()  # its models share connections, which belong to one loop
CANCEL_S = 0.5  # of a request that is not streamed


def run(task: Json, seen: Json) -> None:
    body = dict(task["body"])
    messages = body.pop("messages")
    is_timed = task["cancels"] and task["mode"] in ("invoke", "generate")
    model = ChatOpenAI(
        base_url=task["url"],
        api_key=task["key"],
        max_retries=task["retries"],
        timeout=CANCEL_S if is_timed else 20,
        stream_usage=task["usage"],
        model_kwargs={"prediction": body.pop("prediction")} if "prediction" in body else {},
        extra_body=task["extra"] or None,
        **body,
    )
    try:
        match task["mode"]:
            case "invoke":
                _take_message(model.invoke(messages), seen)
            case "generate":
                _take_generations(model.generate([convert_to_messages(messages)]), seen)
            case "ainvoke":
                LOOP.run(_ainvoke(model, messages, task, seen))
            case "stream":
                for chunk in model.stream(messages):
                    _take_chunk(chunk, seen)
                    if task["cancels"] and seen["deltas"]:
                        return
            case "astream":
                LOOP.run(_astream(model, messages, task, seen))
    except openai.APITimeoutError:
        assert is_timed


async def _ainvoke(model: Any, messages: list[Json], task: Json, seen: Json) -> None:
    asking = asyncio.ensure_future(model.ainvoke(messages))
    if task["cancels"]:
        await asyncio.wait((asking,), timeout=CANCEL_S)
        asking.cancel()
        await asyncio.wait((asking,))
        assert asking.cancelled()
    else:
        _take_message(await asking, seen)


async def _astream(model: Any, messages: list[Json], task: Json, seen: Json) -> None:
    chunks = model.astream(messages)
    try:
        async for chunk in chunks:
            _take_chunk(chunk, seen)
            if task["cancels"] and seen["deltas"]:
                return
    finally:
        await chunks.aclose()


def _take_message(message: Any, seen: Json) -> None:
    facts = message.response_metadata
    seen["texts"], seen["finish"] = [message.content], [facts["finish_reason"]]
    _take_logprobs(facts.get("logprobs"), seen)
    _take_usage(message.usage_metadata, seen)
    _take_details(facts["token_usage"], seen)


def _take_generations(result: Any, seen: Json) -> None:
    (choices,) = result.generations
    seen["texts"] = [choice.message.content for choice in choices]
    seen["finish"] = [choice.generation_info["finish_reason"] for choice in choices]
    _take_logprobs(choices[0].generation_info.get("logprobs"), seen)
    usage = result.llm_output["token_usage"]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    seen["usage"] = [usage[name] for name in names]
    _take_details(usage, seen)


def _take_chunk(chunk: Any, seen: Json) -> None:
    if chunk.content:
        seen["deltas"].append(chunk.content)
        seen["texts"] = ["".join(seen["deltas"])]
    facts = chunk.response_metadata
    _take_logprobs(facts.get("logprobs"), seen)
    if "finish_reason" in facts:
        seen["texts"] = ["".join(seen["deltas"])]
        seen["finish"] = [*seen["finish"], facts["finish_reason"]]
    _take_usage(chunk.usage_metadata, seen)


def _take_usage(usage: Any, seen: Json) -> None:
    if usage is not None:
        names = ("input_tokens", "output_tokens", "total_tokens")
        seen["usage"] = [usage[name] for name in names]


def _take_details(usage: Json, seen: Json) -> None:
    if details := usage.get("completion_tokens_details"):
        names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
        seen["prediction"] = [details[name] for name in names]


def _take_logprobs(logprobs: Json | None, seen: Json) -> None:
    for entry in (logprobs or {}).get("content") or ():
        top = [[other["token"], other["logprob"]] for other in entry["top_logprobs"]]
        entries = seen.setdefault("logprobs", [])
        entries.append({"token": entry["token"], "logprob": entry["logprob"], "top": top})
