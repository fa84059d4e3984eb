"""Generation: one HTTP request's choices on their way through the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from specdec.errors import InvalidRequest
from specdec.server.choice import Choice, Delta
from specdec.server.engine_client import EngineClient
from specdec.server.messages import Output, Ready, Submit
from specdec.server.protocol import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    Speculation,
    choice_params,
    sampling_params,
)
from specdec.server.responses import Metrics, Usage
from specdec.tokenizer import Tokenizer


@dataclass(frozen=True)
class Preparation:
    """A body made ready for the engine: one submission and one choice per answer asked for.

    Choice `p * n + i` is the i-th answer to the p-th prompt.
    """

    submits: tuple[Submit, ...]
    choices: tuple[Choice, ...]
    num_prompt: int
    num_choices: int  # per prompt
    has_prediction: bool = False


def prepare(
    body: ChatBody | CompletionBody, *, reply_id: str, tokenizer: Tokenizer, ready: Ready
) -> Preparation:
    """Tokenise and validate a body; CPU work that belongs in a thread.

    Raises InvalidRequest naming the field, ContextLengthExceeded.
    """
    if isinstance(body, ChatBody):
        name, prompts = "messages", [tokenizer.encode_chat(body.template_messages())]
    else:
        name, prompts = "prompt", body.prompts(tokenizer)
    if len(prompts) * body.num_choices > MAX_CHOICES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_CHOICES}", param="n")
    speculation = (body.speculation or Speculation()).limits(ready.drafters)
    prediction_ids = _prediction_ids(body, tokenizer, ready)
    submits: list[Submit] = []
    choices: list[Choice] = []
    for prompt_ids in prompts:
        if not prompt_ids:
            raise InvalidRequest(f"{name} must hold at least one token", param=name)
        if not (min(prompt_ids) >= 0 and max(prompt_ids) < ready.vocab_size):
            raise InvalidRequest(
                f"{name}: token ids must be at least 0 and below {ready.vocab_size}", param=name
            )
        params = sampling_params(
            body,
            encoder=tokenizer,
            num_prompt=len(prompt_ids),
            max_model_len=ready.max_model_len,
        )
        params.check_vocab(ready.vocab_size)
        for i in range(body.num_choices):
            choice = Choice(len(choices), tokenizer, params, ready.eos_token_ids)
            submit = Submit(
                f"{reply_id}-{choice.index}",
                tuple(prompt_ids),
                choice_params(params, i),
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                speculation=speculation,
                prediction_ids=prediction_ids,
            )
            submits.append(submit)
            choices.append(choice)
    num_prompt = sum(map(len, prompts))
    return Preparation(
        tuple(submits),
        tuple(choices),
        num_prompt,
        body.num_choices,
        has_prediction=body.prediction is not None,
    )


def _prediction_ids(
    body: ChatBody | CompletionBody, tokenizer: Tokenizer, ready: Ready
) -> tuple[int, ...]:
    """Tokens of the predicted text: those that the target can write, as many as its context holds.

    They are never refused: at worst they guess wrong.
    """
    if body.prediction is None:
        return ()
    ids = tokenizer.encode(body.prediction.text, add_special_tokens=False)
    return tuple(x for x in ids[: ready.max_model_len] if x < ready.vocab_size)


@dataclass(frozen=True)
class Progress:
    """What an output did for one choice."""

    choice: Choice
    delta: Delta
    is_first: bool
    is_last: bool


class Generation:
    """Runs a preparation; `close()` ends it, aborting what has not finished.

    Example:
        generation = Generation(engine, preparation, on_close=active.discard)
        await generation.accepted()
        async for progress in generation.progress(): ...
    Raises EngineStopped when the engine is not ready.
    """

    def __init__(
        self,
        engine: EngineClient,
        preparation: Preparation,
        *,
        on_close: Callable[[Generation], object],
    ) -> None:
        self.preparation = preparation
        self._choice_of = {
            submit.request_id: choice
            for submit, choice in zip(preparation.submits, preparation.choices, strict=True)
        }
        self._early: list[Output] = []
        self._on_close = on_close
        self._stream = engine.submit(preparation.submits)

    async def accepted(self) -> None:
        """Wait until the engine has taken every request; raises the error if it refuses one.

        This comes before the first byte of the answer, so a refusal still has its HTTP status.
        """
        unanswered = set(self._choice_of)
        while unanswered:
            output = await anext(self._stream)
            unanswered.discard(output.request_id)
            if output.error is not None and not output.tokens:
                self._choice_of[output.request_id].take(output)  # raises
            self._early.append(output)

    async def progress(self) -> AsyncIterator[Progress]:
        """Every choice's deltas as they come; raises SpecdecError if the engine fails."""
        opened: set[int] = set()
        while self._early:
            output = self._early.pop(0)
            if progress := self._take(output, opened):
                yield progress
        async for output in self._stream:
            if progress := self._take(output, opened):
                yield progress

    def _take(self, output: Output, opened: set[int]) -> Progress | None:
        choice = self._choice_of[output.request_id]
        delta = choice.take(output)
        is_last = output.finish_reason is not None
        if not (output.tokens or is_last):
            return None
        is_first = choice.index not in opened
        opened.add(choice.index)
        return Progress(choice, delta, is_first, is_last)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        preparation = self.preparation
        return Usage.of(
            preparation.num_prompt,
            preparation.choices,
            preparation.num_choices,
            has_prediction=preparation.has_prediction,
        )

    @property
    def metrics(self) -> Metrics:
        """Acceptance figures, complete once the generation is."""
        return Metrics.of(self.preparation.choices)

    def close(self) -> None:
        """Abort what has not finished; safe to call more than once."""
        self._stream.close()
        self._on_close(self)
