"""VllmPeer: vLLM's offline engine in this process, plain or with its n-gram speculation."""

from __future__ import annotations

from itertools import count
from typing import Any

from specdec import checkpoints
from specdec.evals.latency.contender import Contender, Question, Run, Stopwatch
from specdec.evals.latency.peer_setup import PeerSetup, need_module

LOOKUPS = (5,)  # tokens guessed at a time, its documentation's; each setting is an engine
MAX_NGRAM = 4  # its documentation's


def check(setup: PeerSetup) -> None:
    """Raise UsageError if it is not installed."""
    need_module("vllm", "vllm", "vllm")


def load(setup: PeerSetup) -> VllmPeer:
    """Load nothing yet: every setting is an engine of its own."""
    return VllmPeer(setup.model, setup.max_len)


class VllmPeer:
    """Steps its engine one by one, as its own loop does, so that it is known when tokens come.

    Example: `VllmPeer("smollm2-135m-instruct", 4096).contender(5)(question)`.
    """

    def __init__(self, model: str, max_len: int) -> None:
        self._model, self._max_len = model, max_len

    def contender(self, lookup: int | None) -> Contender:
        """Plain, or guessing `lookup` tokens at a time."""
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

        more: dict[str, Any] = {}
        if lookup is not None:
            more["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": lookup,
                "prompt_lookup_max": MAX_NGRAM,
            }
        engine = LLM(
            model=str(checkpoints.resolve(self._model)),
            dtype="bfloat16",
            max_model_len=self._max_len,
            enable_prefix_caching=False,  # or a prompt asked again would be found in its cache
            **more,
        ).llm_engine
        numbers = count()

        def run(question: Question) -> Run:
            params = SamplingParams(
                temperature=question.temperature,
                seed=question.seed,
                max_tokens=question.num_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            watch, found, num_steps = Stopwatch(), list[int](), 0
            prompt = {"prompt_token_ids": list(question.prompt_ids)}
            engine.add_request(f"latency-{next(numbers)}", prompt, params)
            while engine.has_unfinished_requests():
                num_steps += 1
                for output in engine.step():
                    token_ids = list(output.outputs[0].token_ids)  # all so far
                    if len(token_ids) > len(found):
                        watch.note(num_steps, len(token_ids) - len(found))
                        found = token_ids
            return watch.run(found)

        return run
