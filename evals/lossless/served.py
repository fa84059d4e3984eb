"""ServedAnswers: answers from a server that speaks OpenAI's protocol, or from two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import ContextLengthExceeded, SpecdecError, UsageError
from specdec.evals.client.endpoint import Endpoint
from specdec.evals.lossless.answer import Answer
from specdec.evals.lossless.question import Asked, Question
from specdec.evals.lossless.respondent import NUM_LIKELIEST, PLAIN, Begun, Done

DEFAULT = "default"  # the setting in which the server speculates as it likes
_AS_ID = "token_id:"


class ServedAnswers:
    """A Respondent whose settings are DEFAULT and drafters that run at `url`.

    Plain answers come from `against` where there is one, else from the same server, which must know
    the request field `speculation`. Raises UsageError, before anything is asked, for servers that
    do not answer or cannot do it. `model` is the one to ask; default: each server's first.

    Example: `ServedAnswers("http://127.0.0.1:8000")`.
    """

    def __init__(
        self,
        url: str,
        *,
        against: str | None = None,
        drafters: Sequence[str] = (),
        api_key: str | None = None,
        against_key: str | None = None,
        model: str | None = None,
    ) -> None:
        self._keys = {DEFAULT: api_key, PLAIN: against_key if against else api_key}
        self._urls = {DEFAULT: url, PLAIN: against or url}
        self._has_own_plain = against is not None
        self._token_texts: dict[int, str] = {}
        self._models, running = asyncio.run(self._look(model))
        self.knows_speculation = running is not None
        if running is None and (against is None or drafters):
            raise UsageError(
                f"{url} knows no request field `speculation`, so it can only be compared with"
                " itself; name a server that does not speculate by --against, and no --drafter"
            )
        for name in (name for drafter in drafters for name in drafter.split(",")):
            if running is not None and name not in running:
                raise UsageError(
                    f"the drafter {name!r} does not run at {url}; there are: {', '.join(running)}"
                )

    def fits(self, question: Question) -> bool:
        """See Respondent; only the server knows, and says so when it is asked."""
        return True

    def ask(
        self, setting: str, asked: Sequence[Asked], concurrency: int, begun: Begun, done: Done
    ) -> None:
        """See Respondent."""
        asyncio.run(self._ask(setting, asked, concurrency, begun, done))

    def log_probs(
        self, question: Question, common: Sequence[int], tokens: Sequence[int]
    ) -> tuple[Mapping[int, float], int] | None:
        """See Respondent; None from a server that does not take token ids, or gives none."""
        try:
            return asyncio.run(self._log_probs(question, common, tokens))
        except (UsageError, LookupError, TypeError, ValueError):
            return None

    def draws_known_noise(self) -> bool:
        """See Respondent: a server that knows our field is one of ours."""
        return self.knows_speculation

    def token_text(self, token_id: int) -> str:
        """See Respondent; what a server told with its log-probabilities."""
        return self._token_texts.get(token_id, "")

    def facts(self) -> dict[str, Any]:
        """See Respondent."""
        return {
            "url": self._urls[DEFAULT],
            "against": self._urls[PLAIN] if self._has_own_plain else None,
            "model": self._models[DEFAULT],
        }

    def _endpoint(self, setting: str) -> Endpoint:
        side = setting if setting in self._urls else DEFAULT
        return Endpoint(self._urls[side], api_key=self._keys[side])

    async def _look(self, model: str | None) -> tuple[dict[str, str], list[str] | None]:
        """Each side's model, and the drafters of the server if it says which run."""
        models = {}
        for side in self._urls:
            async with self._endpoint(side) as endpoint:
                first = await endpoint.model()  # also where a name is given: is it there at all?
                models[side] = model or first
        async with self._endpoint(DEFAULT) as endpoint:
            try:
                load = await endpoint.get_json("/debug/load")
                return models, [str(name) for name in load["drafters"]]
            except (UsageError, LookupError, TypeError):
                return models, None

    async def _ask(
        self, setting: str, asked: Sequence[Asked], concurrency: int, begun: Begun, done: Done
    ) -> None:
        room = asyncio.Semaphore(concurrency)
        async with self._endpoint(setting) as endpoint:

            async def one(item: Asked) -> None:
                async with room:
                    begun(item.question)
                    done(item.question, await self._answer(endpoint, setting, item))

            await asyncio.gather(*map(one, asked))

    async def _answer(self, endpoint: Endpoint, setting: str, item: Asked) -> Answer:
        question = item.question
        route, body = self._body(setting, question)
        if self.knows_speculation and item.predicted_text:
            body["prediction"] = {"type": "content", "content": item.predicted_text}
        exchange = await endpoint.ask(route, body)
        if exchange.exceeds_context:
            raise ContextLengthExceeded(f"{question.name}: {exchange.error}")
        if exchange.outcome != "ok":
            raise SpecdecError(
                f"{question.name}: the server answers {exchange.status or 'nothing'}: "
                f"{exchange.error}"
            )
        stats = exchange.stats
        return Answer(
            exchange.text,
            exchange.token_ids,
            exchange.finish_reason or "",
            stats.num_steps if stats else 0,
            stats.num_accepted if stats else 0,
        )

    def _body(self, setting: str, question: Question) -> tuple[str, dict[str, Any]]:
        """The route below /v1 and the body of a request."""
        sample = question.sample
        body: dict[str, Any] = {
            "model": self._models.get(setting, self._models[DEFAULT]),
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "return_token_ids": True,
        }
        if setting == PLAIN and not self._has_own_plain:
            body["speculation"] = {"enabled": False}
            body["cache_salt"] = f"plain {question.key}"  # its prompt is computed, not found
        elif setting not in (PLAIN, DEFAULT):
            body["speculation"] = {"drafters": setting.split(",")}
        if sample.prompt_ids is not None:
            return "/completions", {**body, "prompt": list(sample.prompt_ids)}
        if sample.text is not None:
            return "/completions", {**body, "prompt": sample.text}
        return "/chat/completions", {**body, "messages": sample.chat(question.answers)}

    async def _log_probs(
        self, question: Question, common: Sequence[int], tokens: Sequence[int]
    ) -> tuple[dict[int, float], int]:
        async with self._endpoint(PLAIN) as endpoint:
            route, body = self._body(PLAIN, question)
            answer = await endpoint.post_json(f"/v1{route}", {**body, "max_tokens": 1})
            ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
            context = [*ids, *common]
            asked = {
                **{name: value for name, value in body.items() if name != "messages"},
                "prompt": context,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": NUM_LIKELIEST,
                "return_tokens_as_token_ids": True,
            }
            found: dict[int, float] = {}
            for token in tokens:
                # Nothing but the token is allowed, so that its own log-probability is told.
                one = await endpoint.post_json(
                    "/v1/completions", {**asked, "allowed_token_ids": [token]}
                )
                choice = one["choices"][0]
                self._token_texts[token] = choice["text"]
                for name, value in choice["logprobs"]["top_logprobs"][0].items():
                    found[int(name.removeprefix(_AS_ID))] = float(value)
                found[token] = float(choice["logprobs"]["token_logprobs"][0])
            return found, len(context)
