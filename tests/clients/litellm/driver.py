"""Driver of LiteLLM's completion and acompletion, whole and streamed."""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing it asks the network

import litellm  # type: ignore[import-not-found]  # in its own environment

litellm.suppress_debug_info = True
Json = dict[str, Any]
LOOP = asyncio.Runner()  # its clients share connections, which belong to one loop
CANCEL_S = 0.5  # of a request that is not streamed


def run(task: Json, seen: Json) -> None:
    if task["mode"].startswith("acompletion"):
        LOOP.run(_run_async(task, seen))
        return
    try:
        answer = litellm.completion(**_fields(task))
        if task["mode"] == "completion":
            _take_whole(answer, seen)
            return
    except litellm.Timeout:
        assert task["cancels"]
        return
    for chunk in answer:
        _take_chunk(chunk, seen)
        if task["cancels"] and seen["deltas"]:
            answer.completion_stream.close()  # its own wrapper has nothing to close it with
            return


async def _run_async(task: Json, seen: Json) -> None:
    asking = asyncio.ensure_future(litellm.acompletion(**_fields(task)))
    if task["mode"] == "acompletion":
        if task["cancels"]:
            await asyncio.wait((asking,), timeout=CANCEL_S)
            asking.cancel()
            await asyncio.wait((asking,))
            assert asking.cancelled()
        else:
            _take_whole(await asking, seen)
        return
    chunks = await asking
    async for chunk in chunks:
        _take_chunk(chunk, seen)
        if task["cancels"] and seen["deltas"]:
            await chunks.aclose()
            return


def _fields(task: Json) -> Json:
    streams = task["mode"].endswith("stream")
    is_timed = task["cancels"] and task["mode"] == "completion"
    return {
        **task["body"],
        "model": f"openai/{task['body']['model']}",
        "api_base": task["url"],
        "api_key": task["key"],
        "max_retries": task["retries"],
        "timeout": CANCEL_S if is_timed else 20,
        "extra_body": task["extra"],
        "stream": streams,
        **({"stream_options": {"include_usage": True}} if streams and task["usage"] else {}),
    }


def _take_whole(answer: Any, seen: Json) -> None:
    seen["texts"] = [choice.message.content or "" for choice in answer.choices]
    seen["finish"] = [choice.finish_reason for choice in answer.choices]
    _take_logprobs(answer.choices[0], seen)
    _take_usage(answer, seen)


def _take_chunk(chunk: Any, seen: Json) -> None:
    for choice in chunk.choices:
        while len(seen["texts"]) <= choice.index:
            seen["texts"].append("")
            seen["finish"].append(None)
        if choice.delta.content:
            seen["texts"][choice.index] += choice.delta.content
            if choice.index == 0:
                seen["deltas"].append(choice.delta.content)
        _take_logprobs(choice, seen)
        if choice.finish_reason is not None:
            seen["finish"][choice.index] = choice.finish_reason
    _take_usage(chunk, seen)


def _take_usage(answer: Any, seen: Json) -> None:
    usage = getattr(answer, "usage", None)
    if usage is None:
        return
    seen["usage"] = [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]
    details = usage.completion_tokens_details
    if details is not None and details.accepted_prediction_tokens is not None:
        seen["prediction"] = [
            details.accepted_prediction_tokens,
            details.rejected_prediction_tokens,
        ]


def _take_logprobs(choice: Any, seen: Json) -> None:
    logprobs = getattr(choice, "logprobs", None)
    for entry in logprobs.content if logprobs is not None else ():
        top = [[other.token, other.logprob] for other in entry.top_logprobs]
        entries = seen.setdefault("logprobs", [])
        entries.append({"token": entry.token, "logprob": entry.logprob, "top": top})
