"""A generation whose engine is a list of outputs: streams without processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, cast

from specdec.metrics import SpeculationStats
from specdec.request import RejectedNode, Request, TokenRecord
from specdec.server.answering import _events, _whole
from specdec.server.generation import Generation, Preparation, prepare
from specdec.server.messages import Output, Ready, Submit
from specdec.server.parsing import parse_body
from specdec.server.protocol import ChatBody, CompletionBody
from specdec.server.responses import ChatReply, CompletionReply, Reply
from specdec.server.sse import DONE, to_json
from specdec.server.templates import RenderedChat
from specdec.text import StopMatcher
from specdec.tokenizer import Tokenizer

MAX_MODEL_LEN = 2**15


def outputs_of(
    submit: Submit, token_ids: Sequence[int], bursts: Iterable[int], tokenizer: Tokenizer
) -> list[Output]:
    """What an engine sends whose drafters are right about as many tokens as `bursts` say."""
    params = submit.params
    request = Request(submit.request_id, submit.prompt_ids, params)
    if params.stop:
        request.stop_matcher = StopMatcher(
            tokenizer,
            params.stop,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )
    outputs, waiting = [Output(submit.request_id)], list(token_ids)
    for step, burst in enumerate(bursts):
        first = len(request.output)
        for depth in range(1, burst + 1):
            if waiting and not request.is_finished:
                token_id = waiting.pop(0)
                sources = ("target",) if depth == burst else ("script",)
                logprob, top = -0.5, ((token_id, -0.5), (1, -1.5))[: params.logprobs]
                if params.logprobs is None:
                    record = TokenRecord(token_id, sources, depth, step)
                else:
                    record = TokenRecord(token_id, sources, depth, step, logprob, top)
                request.append(record, tokenizer.eos_token_ids)
        kept = request.output[first:]
        request.stats.observe_step((("script",),) * burst, (("script",),) * (len(kept) - 1))
        rejected = [RejectedNode(7, ("script",), 1, step)] if submit.keeps_rejected else []
        outputs.append(Output(submit.request_id, tokens=kept, rejected=rejected))
        if request.is_finished:
            outputs[-1].finish_reason = request.finish_reason
            outputs[-1].stats = request.stats.as_wire()
            return outputs
    raise ValueError("the tokens must end the request")


class ListedEngine:
    """Gives the outputs of all requests in turn; so many of them at a time are fetched late."""

    def __init__(self, outputs: Sequence[Sequence[Output]], num_merged: int = 1) -> None:
        turns = [[list(own) for own in outputs][i][k] for k, i in _turns(outputs)]
        self._outputs = turns if num_merged == 1 else _merged(turns, num_merged)

    def submit(self, submits: Sequence[Submit]) -> ListedEngine:
        return self

    async def __aiter__(self) -> AsyncIterator[Output]:
        while self._outputs:
            yield await anext(self)

    async def __anext__(self) -> Output:
        return self._outputs.pop(0)

    def close(self) -> None:
        """Nothing runs."""


def _turns(outputs: Sequence[Sequence[Output]]) -> list[tuple[int, int]]:
    return sorted((k, i) for i, own in enumerate(outputs) for k in range(len(own)))


def _merged(turns: list[Output], num_merged: int) -> list[Output]:
    merged: list[Output] = []
    for start in range(0, len(turns), num_merged):
        of: dict[str, Output] = {}
        for output in turns[start : start + num_merged]:
            if output.request_id in of:
                of[output.request_id].merge(output)
            else:
                of[output.request_id] = output
        merged += of.values()
    return merged


def prepared(
    fields: dict[str, Any], tokenizer: Tokenizer
) -> tuple[ChatBody | CompletionBody, Reply, Preparation]:
    """A body with these fields, a chat's if it has messages, made ready."""
    raw = json.dumps({"model": "m", **fields}).encode()
    ready = Ready("m", "", "suffix", MAX_MODEL_LEN, tokenizer.vocab_size, tokenizer.eos_token_ids)
    if "messages" in fields:
        chat = parse_body(raw, ChatBody)
        reply: Reply = ChatReply(chat, fingerprint="fp_1")
        rendered = RenderedChat(str(chat.messages[0].content))
        return (
            chat,
            reply,
            prepare(chat, reply_id="r", tokenizer=tokenizer, ready=ready, chat=rendered),
        )
    body = parse_body(raw, CompletionBody)
    reply = CompletionReply(body, fingerprint="fp_1")
    return body, reply, prepare(body, reply_id="r", tokenizer=tokenizer, ready=ready)


def answers(
    fields: dict[str, Any],
    token_ids: Sequence[int],
    bursts: Sequence[int],
    tokenizer: Tokenizer,
    num_merged: int = 1,
) -> tuple[list[bytes], dict[str, Any]]:
    """The lines of the stream, without `[DONE]`, and the whole answer."""

    def generation(preparation: Preparation, merged: int) -> Generation:
        outputs = [outputs_of(s, token_ids, bursts, tokenizer) for s in preparation.submits]
        engine = cast(Any, ListedEngine(outputs, merged))
        return Generation(engine, preparation, on_close=lambda _: None)

    async def run() -> tuple[list[bytes], Any]:
        _, reply, preparation = prepared(fields, tokenizer)
        lines = [line async for line in _events(generation(preparation, num_merged), reply)]
        _, reply, preparation = prepared(fields, tokenizer)
        return lines, await _whole(generation(preparation, 1), reply)

    lines, whole = asyncio.run(run())
    assert lines.pop() == DONE
    return lines, json.loads(to_json(whole))


def empty_stats() -> dict[str, Any]:
    """The figures of an answer without steps."""
    return SpeculationStats().as_wire()
