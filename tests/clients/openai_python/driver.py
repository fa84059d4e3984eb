"""Driver of the official Python client: whole, streamed and through `.stream()`, sync and async."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

Json = dict[str, Any]
CANCEL_S = 0.5  # of a request that is not streamed


def run(task: Json, seen: Json) -> None:
    if task["mode"].startswith("async "):
        asyncio.run(_run_async(task, seen))
        return
    with openai.OpenAI(**_client(task)) as client:
        create: Any = client.chat.completions.create
        match task["mode"]:
            case "create":
                try:
                    _take_whole(create(**_fields(task)), seen)
                except openai.APITimeoutError:
                    assert task["cancels"]
            case "create stream":
                with create(**_fields(task), **_streamed(task)) as chunks:
                    for chunk in chunks:
                        _take_chunk(chunk, seen)
                        if task["cancels"] and seen["deltas"]:
                            return
            case "stream":
                with client.chat.completions.stream(**_fields(task), **_usage(task)) as events:
                    for event in events:
                        _take_event(event, seen)
                        if task["cancels"] and seen["deltas"]:
                            return
                    try:
                        _take_whole(events.get_final_completion(), seen)
                    except openai.LengthFinishReasonError as error:
                        _take_whole(error.completion, seen)


async def _run_async(task: Json, seen: Json) -> None:
    async with openai.AsyncOpenAI(**_client(task)) as client:
        create: Any = client.chat.completions.create
        match task["mode"]:
            case "async create":
                asking = asyncio.ensure_future(create(**_fields(task)))
                if task["cancels"]:
                    await asyncio.wait((asking,), timeout=CANCEL_S)
                    asking.cancel()
                    await asyncio.wait((asking,))
                    assert asking.cancelled()
                else:
                    _take_whole(await asking, seen)
            case "async create stream":
                async with await create(**_fields(task), **_streamed(task)) as chunks:
                    async for chunk in chunks:
                        _take_chunk(chunk, seen)
                        if task["cancels"] and seen["deltas"]:
                            return
            case "async stream":
                helper = client.chat.completions.stream(**_fields(task), **_usage(task))
                async with helper as events:
                    async for event in events:
                        _take_event(event, seen)
                        if task["cancels"] and seen["deltas"]:
                            return
                    try:
                        _take_whole(await events.get_final_completion(), seen)
                    except openai.LengthFinishReasonError as error:
                        _take_whole(error.completion, seen)


def _client(task: Json) -> Json:
    return {
        "base_url": task["url"],
        "api_key": task["key"],
        "max_retries": task["retries"],
        "timeout": CANCEL_S if task["cancels"] and task["mode"] == "create" else 20,
    }


def _fields(task: Json) -> Json:
    return {**task["body"], "extra_body": task["extra"]}


def _streamed(task: Json) -> Json:
    return {"stream": True, **_usage(task)}


def _usage(task: Json) -> Json:
    return {"stream_options": {"include_usage": True}} if task["usage"] else {}


def _take_whole(answer: Any, seen: Json) -> None:
    seen["texts"] = [choice.message.content or "" for choice in answer.choices]
    seen["finish"] = [choice.finish_reason for choice in answer.choices]
    if answer.choices[0].logprobs is not None:
        seen["logprobs"] = [_entry(entry) for entry in answer.choices[0].logprobs.content]
    _take_usage(answer.usage, seen)


def _take_chunk(chunk: Any, seen: Json) -> None:
    for choice in chunk.choices:
        while len(seen["texts"]) <= choice.index:
            seen["texts"].append("")
            seen["finish"].append(None)
        if choice.delta.content:
            seen["texts"][choice.index] += choice.delta.content
            if choice.index == 0:
                seen["deltas"].append(choice.delta.content)
        if choice.logprobs is not None:
            entries = [_entry(entry) for entry in choice.logprobs.content]
            seen["logprobs"] = seen.get("logprobs", []) + entries
        if choice.finish_reason is not None:
            seen["finish"][choice.index] = choice.finish_reason
    _take_usage(chunk.usage, seen)


def _take_event(event: Any, seen: Json) -> None:
    """One event of the helper; its final completion replaces the texts gathered here."""
    if event.type != "chunk":
        return
    for choice in event.chunk.choices:
        if choice.index == 0 and choice.delta.content:
            seen["deltas"].append(choice.delta.content)
            seen["texts"] = ["".join(seen["deltas"])]


def _take_usage(usage: Any, seen: Json) -> None:
    if usage is None:
        return
    seen["usage"] = [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]
    if (details := usage.completion_tokens_details) is not None:
        seen["prediction"] = [
            details.accepted_prediction_tokens,
            details.rejected_prediction_tokens,
        ]


def _entry(entry: Any) -> Json:
    top = [[other.token, other.logprob] for other in entry.top_logprobs]
    return {"token": entry.token, "logprob": entry.logprob, "top": top}
