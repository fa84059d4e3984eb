"""ServerPeer: any OpenAI-compatible server as a contender, asked over HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from itertools import count
from typing import Any

from specdec.errors import SpecdecError, UsageError
from specdec.evals.client.endpoint import Endpoint
from specdec.evals.client.exchange import Exchange
from specdec.evals.latency.contender import Question, Run

CHAT = "#chat"
_NAME = re.compile(r"(?:(?P<label>(?!https?://)[^=]+)=)?(?P<url>https?://.*)")
# What servers may know besides OpenAI's fields. The salt keeps a prompt that is asked again out of
# a server's cache.
_MORE = ("ignore_eos", "return_token_ids", "cache_salt")
_PROBE = Question((1,), 1, messages=({"role": "user", "content": "Hi"},))


def is_server(name: str) -> bool:
    """Whether a name of a peer is an address, or LABEL=address."""
    return _NAME.fullmatch(name) is not None


def label(name: str) -> str:
    """What a server is called in reports: its label, or else its address.

    Example: `label("vllm ngram=http://127.0.0.1:8001") == "vllm ngram"`.
    """
    return _split(name)[0]


class ServerPeer:
    """Asks by token ids through /v1/completions, so that everybody has the same prompt; an address
    that ends in #chat is asked by messages, and applies its own template. A label and = may stand
    before it.

    Raises UsageError if no server answers there, or not as asked: one question is asked at once.

    Example: `ServerPeer("vllm=http://127.0.0.1:8000")(question).ttft_s`.
    """

    def __init__(self, name: str) -> None:
        self._name, address = _split(name)
        self._url, self.is_chat = address.removesuffix(CHAT), address.endswith(CHAT)
        self._salts = count()
        self._model, self._taken = asyncio.run(self._look())

    def __call__(self, question: Question) -> Run:
        """Ask. Raises SpecdecError for an answer that is none."""
        found = asyncio.run(self._alone(question))
        return Run(
            found.token_ids,
            found.end_s,
            found.arrivals,
            num_told=found.num_output,
            num_prefix_hit=found.num_prefix_hit,
        )

    async def _look(self) -> tuple[str, tuple[str, ...]]:
        """The model's name, and which of the further fields are taken."""
        async with Endpoint(self._url) as endpoint:
            self._model = await endpoint.model()
            plain = await self._put(endpoint, _PROBE, ())
            if plain.outcome != "ok":
                use = "" if self.is_chat else f"; or ask by messages: {self._url}{CHAT}"
                raise UsageError(f"{self._name} does not answer: {_reason(plain)}{use}")
            taken = tuple(
                [
                    field
                    for field in _MORE
                    if (await self._put(endpoint, _PROBE, (field,))).outcome == "ok"
                ]
            )
        return self._model, taken

    async def _alone(self, question: Question) -> Exchange:
        async with Endpoint(self._url) as endpoint:
            return await self._ask(endpoint, question)

    async def _ask(self, endpoint: Endpoint, question: Question) -> Exchange:
        """Raises SpecdecError for an answer that is none."""
        found = await self._put(endpoint, question, self._taken)
        if found.outcome != "ok":
            raise SpecdecError(f"{self._name} did not answer: {_reason(found)}")
        return found

    async def _put(self, endpoint: Endpoint, question: Question, more: tuple[str, ...]) -> Exchange:
        values = {
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": f"latency-{next(self._salts)}",
        }
        body: Mapping[str, Any] = {
            "model": self._model,
            "max_tokens": question.num_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            **{field: values[field] for field in more},
        }
        if self.is_chat:
            messages = list(question.messages)
            return await endpoint.ask("/chat/completions", {**body, "messages": messages})
        return await endpoint.ask("/completions", {**body, "prompt": list(question.prompt_ids)})


def _split(name: str) -> tuple[str, str]:
    """Label and address."""
    found = _NAME.fullmatch(name)
    return (name, name) if found is None else (found["label"] or found["url"], found["url"])


def _reason(found: Exchange) -> str:
    return f"{found.status or 'no connection'} {found.error}".strip()
