"""InProcess: engines of our own over one loaded model, one for each drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import ContextLengthExceeded, SpecdecError
from specdec.evals.acceptance.answer import Measured, Reply
from specdec.evals.acceptance.asker import Question
from specdec.evals.acceptance.edited import with_edits
from specdec.evals.acceptance.setting import PLAIN, Setting
from specdec.evals.acceptance.step_counts import StepCounts
from specdec.generation import Generation, generate
from specdec.loading import LoadedModel, load_model
from specdec.params import SamplingParams

_WARM_UP_TOKENS = 8


class InProcess:
    """Answers with the engine itself, so that every step has its record.

    Prompts are computed anew for every answer: a prefix hit would make the later ones cheaper.
    Under adaptive control, which learns, each setting has an engine of its own. Without
    `uses_noise` drafters rank as if all requests were greedy.

    Example: `InProcess(EngineConfig(control="fixed"), Sweep(("suffix",)).settings())`.
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: Sequence[Setting],
        *,
        uses_noise: bool = True,
        loaded: LoadedModel | None = None,
    ) -> None:
        self.settings = settings
        self.loaded = loaded or load_model(config)
        self._config = replace(config, prefix_cache=False)
        self._uses_noise = uses_noise
        self._engines: dict[object, Engine] = {}
        for setting in settings:
            self._warm_up(setting)

    def ask(self, question: Question, setting: Setting, plain: Reply | None) -> Reply:
        """See Asker."""
        prompt_ids = self._prompt_ids(question)
        engine = self._engine(setting)
        room = engine.max_model_len - len(prompt_ids)
        if room < question.max_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt_ids)} tokens, of a context of {engine.max_model_len}"
            )
        params = SamplingParams(
            max_tokens=question.max_tokens, temperature=setting.temperature, seed=question.seed
        )
        before = _draft_s(engine)
        found = generate(
            engine,
            prompt_ids,
            params,
            prediction_ids=_prediction(setting, plain, question.seed, engine.vocab_size),
            speculation=setting.limits,
            keeps_steps=True,
        )
        if found.stats.disabled_drafters:
            names = ", ".join(found.stats.disabled_drafters)
            raise SpecdecError(
                f"{question.answer_id}: the drafter {names} failed; the log says why"
            )
        return Reply(found.text, found.token_ids, _measured(found, _draft_s(engine) - before))

    def recorded(self, question: Question, reply: Reply) -> dict[str, Any]:
        """See Asker."""
        return {
            "prompt_ids": self._prompt_ids(question),
            "output_ids": list(reply.token_ids or ()),
        }

    def _prompt_ids(self, question: Question) -> list[int]:
        return question.sample.encode(self._engine(self.settings[0]).tokenizer, question.answers)

    def _engine(self, setting: Setting) -> Engine:
        """The engine that answers under a setting; a request's own limits do the rest."""
        is_fixed = setting.is_plain or self._config.control == "fixed"
        key = setting.drafter if is_fixed else setting
        if key not in self._engines:
            own_budget = 0 if is_fixed else setting.node_budget
            config = replace(
                self._config,
                drafter=setting.drafter,
                control="fixed" if is_fixed else "adaptive",
                node_budget=own_budget or self._largest_budget(),
            )
            engine = Engine(config, loaded=self.loaded)
            for drafter in engine.drafter.drafters:
                drafter.uses_noise &= self._uses_noise
            self._engines[key] = engine
        return self._engines[key]

    def _largest_budget(self) -> int:
        return max((setting.node_budget or 0 for setting in self.settings), default=0)

    def _warm_up(self, setting: Setting) -> None:
        """A first request maps memory and fills tables, which is no setting's fault."""
        engine = self._engine(setting)
        prompt_ids = [token % engine.vocab_size for token in range(4)] * 4
        params = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True, seed=0)
        generate(engine, prompt_ids, params, speculation=setting.limits)


def _prediction(
    setting: Setting, plain: Reply | None, seed: int, vocab_size: int
) -> tuple[int, ...]:
    """What the caller is to have expected: the answer itself, or with a few places wrong."""
    if setting.drafter == PLAIN or not setting.needs_answer:
        return ()
    assert plain is not None and plain.token_ids is not None, "plain decoding comes first"
    if "synthetic" in setting.drafters:
        return plain.token_ids
    return with_edits(plain.token_ids, seed, vocab_size)


def _draft_s(engine: Engine) -> float:
    return sum(engine.drafter.seconds.values())


def _measured(found: Generation, draft_s: float) -> Measured:
    return Measured(
        num_prompt=found.num_prompt_tokens,
        num_output=len(found.tokens),
        num_first=found.num_first,
        prefill_s=found.ttft_s,
        decode_s=found.total_s - found.ttft_s,
        draft_s=draft_s,
        finish_reason=found.finish_reason,
        counts=StepCounts.of(found.steps, found.finish_reason, found.stats.drafted_by_source),
    )
