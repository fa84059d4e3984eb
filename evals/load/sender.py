"""Sender: makes a level's prompts into requests that the server takes, and sends them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from specdec.errors import UsageError
from specdec.evals.client.endpoint import Endpoint
from specdec.evals.client.exchange import Exchange
from specdec.evals.load.level import Level
from specdec.evals.load.loops import Send
from specdec.evals.load.prompts import Ask, Prompts
from specdec.evals.load.sweep import Series

COUNTS = "continuous_usage_stats"
OPTIONAL = ("ignore_eos", "cache_salt", COUNTS)
_REFUSED = (400, 422)


class Sender:
    """Knows which of the fields that others than OpenAI take this server refuses.

    Levels do not find each other's prompts in the server's cache where it takes `cache_salt`:
    prompts have one salt per run, series, level and round over the samples.

    Example:
        sender = Sender(endpoint, "my-model", prompts, temperature=0.0)
        await sender.find_out()
        run = await run_level(level, sender.of(series, level), extent)
    """

    def __init__(
        self, endpoint: Endpoint, model: str, prompts: Prompts, temperature: float
    ) -> None:
        self.refused: tuple[str, ...] = ()
        self._endpoint, self._model, self._prompts = endpoint, model, prompts
        self._temperature = temperature
        self._run = os.urandom(4).hex()

    async def find_out(self) -> None:
        """Ask until the server takes a request; UsageError, with its words, if it takes none."""
        if await self._takes(()):
            return
        plain = await self._try(OPTIONAL, {})
        if plain.outcome != "ok":
            raise UsageError(f"{self._endpoint.root} refuses to answer: {_words(plain)}")
        self.refused = tuple(
            [
                name
                for name in OPTIONAL
                if not await self._takes([other for other in OPTIONAL if other != name])
            ]
        )
        self._endpoint.asks_counts = COUNTS not in self.refused

    async def check(self, series: Series) -> None:
        """One short answer of a series; UsageError, with the server's words, if it is refused."""
        found = await self._try(self.refused, series.fields)
        if found.outcome != "ok":
            raise UsageError(f"{series.label or self._endpoint.root}: {_words(found)}")

    def of(self, series: Series, level: Level) -> Send:
        """Sends the index-th request of a level."""

        async def send(index: int) -> Exchange:
            salt = f"{self._run} {series.label} {level.name} {self._prompts.visit(index)}"
            ask = self._prompts.ask(level.name, index)
            body = self._body(ask, series.fields, salt, self.refused)
            return await self._endpoint.ask(ask.route, body)

        return send

    async def _takes(self, without: Sequence[str]) -> bool:
        found = await self._try(without, {})
        if found.outcome != "ok" and found.status not in _REFUSED:
            raise UsageError(f"{self._endpoint.root} does not answer: {_words(found)}")
        return found.outcome == "ok"

    async def _try(self, without: Sequence[str], fields: Mapping[str, Any]) -> Exchange:
        """One short answer to a prompt that no level has."""
        ask = self._prompts.ask("trial", 0)
        self._endpoint.asks_counts = COUNTS not in without
        short = {"max_tokens": min(8, ask.body["max_tokens"])}
        body = self._body(ask, {**fields, **short}, f"{self._run} trial", without)
        return await self._endpoint.ask(ask.route, body)

    def _body(
        self,
        ask: Ask,
        fields: Mapping[str, Any],
        salt: str,
        without: Sequence[str],
    ) -> dict[str, Any]:
        body = {
            "model": self._model,
            "temperature": self._temperature,
            "cache_salt": salt,
            **ask.body,
            **fields,
        }
        return {name: value for name, value in body.items() if name not in without}


def _words(exchange: Exchange) -> str:
    """The server's own, where they can be found."""
    text = exchange.error
    with suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return f"{exchange.status} {text}" if exchange.status else text
