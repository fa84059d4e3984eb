"""Server: answers of a running server, whose settings are fields of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specdec.errors import ContextLengthExceeded, SpecdecError, UsageError
from specdec.evals.acceptance.answer import Measured, Reply
from specdec.evals.acceptance.asker import Question
from specdec.evals.acceptance.edited import with_edits
from specdec.evals.acceptance.setting import SERVER, Setting
from specdec.evals.acceptance.step_counts import StepCounts
from specdec.evals.client.endpoint import Endpoint
from specdec.evals.client.exchange import Exchange
from specdec.limits import NO_LIMITS

_OFF = {"enabled": False}
_PROBE = "1 2 3 4 1 2 3 4 1 2 3 4 1 2 3"
_PROBE_TOKENS = 16


class Server:
    """Answers with an OpenAI-compatible server, of which only one that is ours takes settings.

    A server is ours if it drafts nothing when it is told so and says it. Others get the prompt
    alone, under the one setting "server".

    Example: `with Server.open("http://127.0.0.1:8000", settings) as server: ...`
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        endpoint: Endpoint,
        model: str,
        settings: Sequence[Setting],
        *,
        is_chat: bool = True,
    ) -> None:
        self._runner, self._endpoint = runner, endpoint
        self._is_chat = is_chat
        self.model = model
        self.is_ours = self._takes_settings()
        if not self.is_ours:
            settings = [
                item for item in settings if item.drafter == SERVER and item.limits == NO_LIMITS
            ]
        if not settings:
            raise UsageError(
                f"{endpoint.root} takes no drafters: its answers have no "
                "metrics.speculative_decoding, or count drafts that were switched off; "
                "leave out --drafter, --node-budget and --depth"
            )
        self.settings = settings
        for setting in settings:
            self._check(setting)

    @classmethod
    @contextmanager
    def open(
        cls,
        url: str,
        settings: Sequence[Setting],
        *,
        api_key: str | None = None,
        model: str | None = None,
        is_chat: bool = True,
    ) -> Iterator[Server]:
        """Ask who is there, and whether every setting can be had, by a chat or by a bare prompt.

        Raises UsageError with the server's own words if not.
        """
        endpoint = Endpoint(url, api_key=api_key)
        with asyncio.Runner() as runner:
            runner.run(endpoint.__aenter__())
            try:
                name = model or runner.run(endpoint.model())
                yield cls(runner, endpoint, name, settings, is_chat=is_chat)
            finally:
                runner.run(endpoint.__aexit__(None, None, None))

    def ask(self, question: Question, setting: Setting, plain: Reply | None) -> Reply:
        """See Asker."""
        route, body = self._body(question, setting)
        if setting.needs_answer and plain is not None:
            text = plain.text
            if "synthetic" not in setting.drafters:
                text = _edited(text, question.seed)
            body["prediction"] = {"type": "content", "content": text}
        found = self._exchange(route, body)
        if found.exceeds_context:
            raise ContextLengthExceeded(found.error)
        if found.outcome != "ok":
            raise SpecdecError(
                f"{question.answer_id}: the server answers {found.status or 'nothing'}: "
                f"{found.error}"
            )
        if setting.is_plain and found.stats is not None and found.stats.num_draft_tokens:
            raise SpecdecError(f"{question.answer_id}: the server drafted when it was told not to")
        return Reply(found.text, found.token_ids, _measured(found))

    def recorded(self, question: Question, reply: Reply) -> dict[str, Any]:
        """See Asker."""
        sample = question.sample
        if sample.prompt_ids is not None and reply.token_ids is not None:
            said: dict[str, Any] = {
                "prompt_ids": list(sample.prompt_ids),
                "output_ids": list(reply.token_ids),
            }
        elif sample.prompt_ids is not None:
            said = {"prompt_ids": list(sample.prompt_ids), "output": reply.text}
        elif sample.text is not None:
            said = {"text": sample.text, "output": reply.text}
        else:
            said = {"messages": sample.chat(question.answers), "output": reply.text}
        return said

    def _body(self, question: Question, setting: Setting) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": question.max_tokens,
            "temperature": setting.temperature,
            "seed": question.seed,
        }
        if self.is_ours:
            body["return_token_ids"] = True
            speculation = _speculation(setting)
            if speculation:
                body["speculation"] = speculation
        sample = question.sample
        if sample.prompt_ids is not None:
            return "/completions", {**body, "prompt": list(sample.prompt_ids)}
        if sample.text is not None:
            return "/completions", {**body, "prompt": sample.text}
        return "/chat/completions", {**body, "messages": sample.chat(question.answers)}

    def _exchange(self, route: str, body: dict[str, Any]) -> Exchange:
        return self._runner.run(self._endpoint.ask(route, body))

    def _probe(self, **more: object) -> Exchange:
        body = {
            "model": self.model,
            "max_tokens": _PROBE_TOKENS,
            "temperature": 0,
            **more,
        }
        if not self._is_chat:
            return self._exchange("/completions", {**body, "prompt": _PROBE})
        messages = [{"role": "user", "content": _PROBE}]
        return self._exchange("/chat/completions", {**body, "messages": messages})

    def _takes_settings(self) -> bool:
        found = self._probe(speculation=_OFF)
        stats = found.stats
        return found.outcome == "ok" and stats is not None and not stats.num_draft_tokens

    def _check(self, setting: Setting) -> None:
        speculation = _speculation(setting)
        found = self._probe(**({"speculation": speculation} if speculation else {}))
        if found.outcome != "ok":
            raise UsageError(
                f"{self._endpoint.root} does not answer under the setting {setting.name!r}: "
                f"{found.error or found.status}"
            )


def check_settings(settings: Sequence[Setting]) -> None:
    """Raise UsageError for what a server has to be started with."""
    for setting in settings:
        if "=" in setting.drafter:
            raise UsageError(
                f"--drafter {setting.drafter}: a server is started with its drafters' files; "
                "name the drafters alone"
            )


def _speculation(setting: Setting) -> dict[str, Any]:
    """The field of a request; empty where the server decides."""
    if setting.is_plain:
        return dict(_OFF)
    found = {
        "drafters": None if setting.drafter == SERVER else list(setting.drafters),
        "max_nodes": setting.node_budget,
        "max_depth": setting.max_depth,
    }
    return {name: value for name, value in found.items() if value is not None}


def _edited(text: str, seed: int) -> str:
    """The text as somebody would have predicted it who had three places wrong, by characters."""
    if not text:
        return ""
    return "".join(text[index] for index in with_edits(range(len(text)), seed, len(text)))


def _measured(found: Exchange) -> Measured:
    first = found.ttft_s
    begun = found.end_s if first is None else first
    return Measured(
        num_prompt=found.num_prompt,
        num_output=found.num_output,
        num_first=found.arrivals[0].num_tokens if found.arrivals else found.num_output,
        prefill_s=begun,
        decode_s=found.arrivals[-1].at_s - begun if found.arrivals else 0.0,
        draft_s=None,
        finish_reason=found.finish_reason or "",
        counts=None if found.stats is None else StepCounts.of_server(found.stats),
    )
