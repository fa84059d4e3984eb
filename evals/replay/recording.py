"""Recording: a prompt and the answer that it got, as tokens, checked against the model."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.errors import InvalidRequest, UsageError
from specdec.evals.acceptance.edited import with_edits
from specdec.evals.acceptance.setting import Setting
from specdec.evals.data.sample import Sample
from specdec.loading import LoadedModel
from specdec.params import SamplingParams
from specdec.request import Request

HOW_TO_RECORD = "`specdec eval acceptance --out DIR` writes DIR/answers.jsonl with some"


@dataclass(frozen=True)
class Recording:
    """An answer that can be given again: `params` end it where it ended.

    An answer that closes with an end token ended by itself, every other one by its length.
    `answer_id` is its own, `sample_id` that of its conversation, of which it is turn `turn`.
    """

    answer_id: str
    sample_id: str
    turn: int
    task: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    params: SamplingParams

    def request(self, setting: Setting, vocab_size: int) -> Request:
        """The request that gets this answer under a setting.

        Drafters that follow a predicted text get what a live run hands them: the answer with three
        places edited, `synthetic` the answer itself.
        """
        prediction_ids: tuple[int, ...] = ()
        if "synthetic" in setting.drafters:
            prediction_ids = self.output_ids
        elif setting.needs_answer:
            prediction_ids = with_edits(self.output_ids, self.params.seed or 0, vocab_size)
        return Request(
            self.answer_id,
            self.prompt_ids,
            self.params,
            speculation=setting.limits,
            prediction_ids=prediction_ids,
        )


def recordings(
    samples: Sequence[Sample], loaded: LoadedModel, max_tokens: int | None = None
) -> list[Recording]:
    """The samples as recordings; `max_tokens` ends longer answers there.

    Raises UsageError naming the sample that has no answer, or that cannot be this model's.
    """
    for sample in samples:
        if sample.output is None and sample.output_ids is None:
            raise UsageError(
                f"sample {sample.sample_id!r} has no recorded answer to replay: {HOW_TO_RECORD}"
            )
    turns: Counter[str] = Counter()
    found = []
    for sample in samples:
        of = sample.turn_of or sample.sample_id
        found.append(_recording(sample, of, turns[of], loaded, max_tokens))
        turns[of] += 1
    return found


def _recording(
    sample: Sample, of: str, turn: int, loaded: LoadedModel, max_tokens: int | None
) -> Recording:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None, "a checkpoint has a tokenizer"
    try:
        prompt_ids = sample.encode(tokenizer)
        output_ids = sample.output_ids
        if output_ids is None:
            output_ids = tuple(tokenizer.encode(sample.output or "", add_special_tokens=False))
    except InvalidRequest as error:
        raise UsageError(f"sample {sample.sample_id!r}: {error}") from None
    _check(sample, prompt_ids, output_ids, loaded)
    ends = [at for at, token_id in enumerate(output_ids) if token_id in loaded.eos_token_ids]
    ended_by_itself = ends == [len(output_ids) - 1]
    longest = loaded.max_model_len if ended_by_itself else len(output_ids)
    seed = sample.seed
    if seed is None:
        seed = zlib.crc32(f"{of} {turn}".encode())  # that of a live run
    params = SamplingParams(
        max_tokens=min(longest, max_tokens or longest),
        ignore_eos=not ended_by_itself,
        seed=seed,
    )
    return Recording(sample.sample_id, of, turn, sample.task, tuple(prompt_ids), output_ids, params)


def _check(
    sample: Sample, prompt_ids: Sequence[int], output_ids: Sequence[int], loaded: LoadedModel
) -> None:
    name = repr(sample.sample_id)
    sample.check_vocabulary(loaded.model.config.vocab_size, loaded.name)
    if not prompt_ids or not output_ids:
        raise UsageError(f"sample {name} has an empty {'answer' if prompt_ids else 'prompt'}")
    num_tokens = len(prompt_ids) + len(output_ids)
    if num_tokens > loaded.max_model_len:
        raise UsageError(
            f"sample {name} has {num_tokens} tokens, prompt and answer, and the context holds"
            f" {loaded.max_model_len}: leave it out"
        )
