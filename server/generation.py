"""Generation: one HTTP request's choices on their way through the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from specdec.errors import ContextLengthExceeded, InvalidRequest, SpecdecError
from specdec.server.choice import Choice, Delta, Telling
from specdec.server.messages import Output, Ready, Submit
from specdec.server.protocol import MAX_CHOICES, ChatBody, CompletionBody, Speculation
from specdec.server.sampling_fields import choice_params, least_room, sampling_params
from specdec.server.supervisor import Supervisor
from specdec.server.templates import RenderedChat
from specdec.server.usage import Metrics, Usage
from specdec.tokenizer import Tokenizer

MAX_TOKEN_LEN = 256  # characters; vocabularies have runs of up to 128 spaces


@dataclass(frozen=True)
class Preparation:
    """A body made ready for the engine: one submission and one choice per answer asked for.

    Choice `p * n + i` is the i-th answer to the p-th prompt. There is nothing to submit where
    nothing but the prompts is asked for.
    """

    submits: tuple[Submit, ...]
    choices: tuple[Choice, ...]
    num_prompt: int
    num_choices: int  # per prompt
    has_prediction: bool = False


def prepare(
    body: ChatBody | CompletionBody,
    *,
    reply_id: str,
    tokenizer: Tokenizer,
    ready: Ready,
    chat: RenderedChat | None = None,
) -> Preparation:
    """Tokenise and validate a body; CPU work that belongs in a thread.

    `chat` is a ChatBody's conversation as `Service.templates` rendered it.

    Raises InvalidRequest naming the field, ContextLengthExceeded.
    """
    if isinstance(body, ChatBody):
        assert chat is not None, "a chat is rendered before it is encoded"
        _check_shown(body, tokenizer)
        name, prompts = "messages", [tokenizer.encode_rendered(chat.text, chat.mark)]
    else:
        _check_lens(body, ready.max_model_len)
        name, prompts = "prompt", body.prompts(tokenizer)
    if len(prompts) * body.num_choices > MAX_CHOICES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_CHOICES}", param="n")
    speculation = (body.speculation or Speculation()).limits(ready.drafters)
    prediction_ids = _prediction_ids(body, tokenizer, ready)
    is_asked = not (isinstance(body, CompletionBody) and body.is_echo_alone)
    submits: list[Submit] = []
    choices: list[Choice] = []
    num_prompt = 0
    for index, given_ids in enumerate(prompts):
        prompt_ids = _kept(body, given_ids, ready.max_model_len)
        num_prompt += len(prompt_ids)
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
            eos_token_ids=ready.eos_token_ids,
        )
        params.check_vocab(ready.vocab_size)
        telling = Telling(
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            infos=body.includes_token_info,
            rejected=body.includes_rejected,
            stop=bool(body.include_stop_str_in_output),
            echo=_echo(
                body,
                index,
                prompt_ids,
                is_cut=len(prompt_ids) < len(given_ids),
                tokenizer=tokenizer,
            ),
        )
        for i in range(body.num_choices):
            choice = Choice(
                len(choices), tokenizer, params, ready.eos_token_ids, telling, prompt_ids
            )
            choices.append(choice)
            if is_asked:
                submit = Submit(
                    f"{reply_id}-{choice.index}",
                    tuple(prompt_ids),
                    choice_params(params, i),
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt or "",
                    speculation=speculation,
                    prediction_ids=prediction_ids,
                    keeps_rejected=body.includes_rejected,
                )
                submits.append(submit)
    return Preparation(
        tuple(submits),
        tuple(choices),
        num_prompt,
        body.num_choices,
        has_prediction=body.prediction is not None,
    )


def _check_lens(body: CompletionBody, max_model_len: int) -> None:
    """Raise ContextLengthExceeded for texts that are too long, whatever their tokens would be."""
    longest = MAX_TOKEN_LEN * max_model_len
    for given in body.given_prompts:
        if isinstance(given, str) and len(given) > longest:
            raise ContextLengthExceeded(
                f"the prompt has {len(given)} characters, more than the model's context of "
                f"{max_model_len} tokens can hold",
                param="prompt",
            )


def _check_shown(body: ChatBody, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest for documents, or an effort, that no template would show."""
    own = tokenizer.templates.sources.values()
    sources = own if body.chat_template is None else [body.chat_template]
    asked = {"documents": body.documents, "reasoning_effort": body.reasoning_effort}
    for name, value in asked.items():
        if value and not any(name in source for source in sources):
            raise InvalidRequest(
                f"{name}: this model's chat template has no place for it", param=name
            )


def _kept(body: ChatBody | CompletionBody, ids: list[int], max_model_len: int) -> list[int]:
    """What `truncate_prompt_tokens` leaves of a prompt; -1 is as much as fits beside the output."""
    num_kept = body.truncate_prompt_tokens
    if num_kept is None:
        return ids
    if num_kept == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens"
        )
    if num_kept == -1:
        num_kept = max(1, max_model_len - max(1, least_room(body)))
    if len(ids) <= num_kept:
        return ids
    return ids[:num_kept] if body.truncation_side == "right" else ids[len(ids) - num_kept :]


def _echo(
    body: ChatBody | CompletionBody,
    index: int,
    prompt_ids: Sequence[int],
    *,
    is_cut: bool,
    tokenizer: Tokenizer,
) -> str:
    """The text of a prompt that the answer repeats: as it was given, unless it was cut."""
    if not (isinstance(body, CompletionBody) and body.echo):
        return ""
    given = body.given_prompts[index]
    if isinstance(given, str) and not is_cut:
        return given
    return tokenizer.decode(prompt_ids, skip_special_tokens=body.skip_special_tokens is not False)


def _prediction_ids(
    body: ChatBody | CompletionBody, tokenizer: Tokenizer, ready: Ready
) -> tuple[int, ...]:
    """Tokens of the predicted text: those that the target can write, as many as its context holds.

    They are never refused: at worst they guess wrong.
    """
    if body.prediction is None:
        return ()
    text = body.prediction.text[: MAX_TOKEN_LEN * ready.max_model_len]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return tuple(x for x in ids[: ready.max_model_len] if x < ready.vocab_size)


@dataclass(frozen=True)
class Progress:
    """What an output did for one choice: a delta for each token."""

    choice: Choice
    deltas: Sequence[Delta]
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
        engine: Supervisor,
        preparation: Preparation,
        *,
        on_close: Callable[[Generation], object],
    ) -> None:
        self.preparation = preparation
        submits = preparation.submits
        self._choice_of = {
            submit.request_id: choice
            for submit, choice in zip(submits, preparation.choices, strict=bool(submits))
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
                Choice.check(output)
            self._early.append(output)

    async def progress(self) -> AsyncIterator[Progress]:
        """Every choice's deltas as they come; raises SpecdecError if the engine fails."""
        opened: set[int] = set()
        if not self._choice_of:
            for choice in self.preparation.choices:
                yield Progress(choice, choice.echo(), is_first=True, is_last=True)
        while (output := await self._next()) is not None:
            if progress := self._take(output, opened):
                yield progress
            Choice.check(output)  # after what came before it

    async def _next(self) -> Output | None:
        if self._early:
            return self._early.pop(0)
        return await anext(aiter(self._stream), None)

    def _take(self, output: Output, opened: set[int]) -> Progress | None:
        choice = self._choice_of[output.request_id]
        deltas = choice.take(output)
        is_last = output.finish_reason in ("stop", "length")
        if not (output.tokens or is_last):
            return None
        is_first = choice.index not in opened
        opened.add(choice.index)
        return Progress(choice, deltas, is_first, is_last)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self.usage_at(None)

    def usage_at(self, num_output: int | None) -> Usage:
        """Token counts where only so many output tokens have been sent; None: all there are."""
        preparation = self.preparation
        return Usage.of(
            preparation.num_prompt,
            preparation.choices,
            preparation.num_choices,
            has_prediction=preparation.has_prediction and num_output is None,
            num_output=num_output,
        )

    @property
    def metrics(self) -> Metrics:
        """Acceptance figures, complete once the generation is."""
        return Metrics.of(self.preparation.choices)

    def fail(self, error: SpecdecError) -> None:
        """End what has not finished with this error, as at a deadline; the engine goes on."""
        self._stream.fail(str(error), type(error).__name__)

    def close(self) -> None:
        """Abort what has not finished; safe to call more than once."""
        self._stream.close()
        self._on_close(self)
