"""InProcess: answers from engines in this process, all over one loaded model."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.evals.lossless.answer import Answer
from specdec.evals.lossless.question import Asked, Question
from specdec.evals.lossless.respondent import NUM_LIKELIEST, PLAIN, Begun, Done
from specdec.evals.report.machine import target
from specdec.generation import generate
from specdec.loading import LoadedModel, load_model
from specdec.params import SamplingParams
from specdec.request import Request

_numbers = count()


class InProcess:
    """A Respondent whose settings are drafters as `--drafter` takes them.

    Plain answers come from an engine of their own that drafts nothing and, unless
    `caches_prompts`, computes every prompt anew. Engines of `settings` are made at once, so that a
    drafter that cannot be had is told before anything is asked. `loaded` replaces what the
    configuration names.

    Example: `InProcess(EngineConfig()).ask("ngram", asked, 4, begun, done)`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        caches_prompts: bool = False,
        settings: Sequence[str] = (),
        loaded: LoadedModel | None = None,
    ) -> None:
        self._config = config
        self.loaded = loaded or load_model(config)
        plain = replace(
            config,
            drafter="none",
            node_budget=0,
            control="fixed",
            verification="coupled",
            prefix_cache=caches_prompts,
        )
        self._engines = {PLAIN: Engine(plain, loaded=self.loaded)}
        for setting in settings:
            self._engine(setting)

    def fits(self, question: Question) -> bool:
        """See Respondent. Raises UsageError for tokens that the model does not have."""
        loaded = self.loaded
        question.sample.check_vocabulary(loaded.model.config.vocab_size, loaded.name)
        return len(self._prompt(question)) < loaded.max_model_len

    def ask(
        self, setting: str, asked: Sequence[Asked], concurrency: int, begun: Begun, done: Done
    ) -> None:
        """See Respondent."""
        engine = self._engine(setting)
        waiting = deque(asked)
        running: dict[str, tuple[Question, Request]] = {}
        while waiting or running:
            while waiting and len(running) < concurrency:
                item = waiting.popleft()
                begun(item.question)
                request = self._request(item)
                engine.add(request)
                running[request.request_id] = item.question, request
            for output in engine.step():
                if output.finish_reason is not None:
                    question, request = running.pop(output.request_id)
                    done(question, self._answer(question, request))

    def log_probs(
        self, question: Question, common: Sequence[int], tokens: Sequence[int]
    ) -> tuple[Mapping[int, float], int]:
        """See Respondent: a request for one token each, which nothing but that token can be."""
        context = [*self._prompt(question), *common]
        found: dict[int, float] = {}
        for token in tokens:
            params = SamplingParams(
                max_tokens=1, logprobs=NUM_LIKELIEST, allowed_token_ids=frozenset([token])
            )
            record = generate(self._engines[PLAIN], context, params).tokens[0]
            assert record.logprob is not None
            found |= dict(record.top_logprobs)
            found[token] = record.logprob
        return found, len(context)

    def draws_known_noise(self) -> bool:
        """See Respondent."""
        return True

    def token_text(self, token_id: int) -> str:
        """See Respondent; special tokens are shown."""
        tokenizer = self._engines[PLAIN].tokenizer
        return tokenizer.decode([token_id], skip_special_tokens=False)

    def facts(self) -> dict[str, Any]:
        """See Respondent."""
        config = self._config
        return {
            **target(config, self.loaded.model),
            "node_budget": config.node_budget,
            "control": config.control,
            "verification": config.verification,
        }

    def _engine(self, setting: str) -> Engine:
        """The setting's engine; at most one is held beside the plain one."""
        if setting not in self._engines:
            for other in [name for name in self._engines if name != PLAIN]:
                self._engines.pop(other).close()
            config = replace(self._config, drafter=setting)
            self._engines[setting] = Engine(config, loaded=self.loaded)
        return self._engines[setting]

    def _prompt(self, question: Question) -> list[int]:
        tokenizer = self._engines[PLAIN].tokenizer
        return question.sample.encode(tokenizer, question.answers)

    def _request(self, item: Asked) -> Request:
        question = item.question
        params = SamplingParams(
            max_tokens=question.max_tokens, temperature=question.temperature, seed=question.seed
        )
        return Request(
            f"lossless-{next(_numbers)}",
            tuple(self._prompt(question)),
            params,
            prediction_ids=item.predicted_ids,
        )

    def _answer(self, question: Question, request: Request) -> Answer:
        if request.error is not None:
            raise SpecdecError(f"{question.name}: {request.error}")
        token_ids = tuple(request.output_ids)
        return Answer(
            self._engines[PLAIN].tokenizer.decode(token_ids),
            token_ids,
            str(request.finish_reason),
            request.stats.num_steps,
            request.stats.num_accepted,
            tuple(f"{'+'.join(token.sources)} {token.depth}" for token in request.output),
        )
