"""TransformersPeer: transformers' generate, plain or with its prompt lookup."""

from __future__ import annotations

from typing import Any

import torch

from specdec import checkpoints
from specdec.evals.latency.contender import Contender, Question, Run, Stopwatch
from specdec.evals.latency.peer_setup import PeerSetup, need_module, num_cores

LOOKUPS = (3, 10)  # tokens guessed at a time; its documentation shows both


def check(setup: PeerSetup) -> None:
    """Raise UsageError if it is not installed."""
    need_module("transformers", "transformers", "'specdec-server[evals]'")


def load(setup: PeerSetup) -> TransformersPeer:
    """Load our model in bf16."""
    return TransformersPeer(setup.model)


class TransformersPeer:
    """One model for all settings.

    Example: `TransformersPeer("smollm2-135m-instruct").contender(10)(question)`.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        folder = checkpoints.resolve(model)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._model.generation_config.eos_token_id = None  # or it would end before the others

    def contender(self, lookup: int | None) -> Contender:
        """Plain, or guessing `lookup` tokens at a time."""
        more = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}

        def run(question: Question) -> Run:
            # The engine's forward has threads of its own, and leaves PyTorch one.
            before = torch.get_num_threads()
            torch.set_num_threads(num_cores())
            torch.manual_seed(question.seed)
            try:
                return self._answer(question, more)
            finally:
                torch.set_num_threads(before)

        return run

    def _answer(self, question: Question, more: dict[str, Any]) -> Run:
        sampling: dict[str, Any] = {"do_sample": False}
        if question.temperature:
            temperature = question.temperature
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        streamer = _Streamer()
        prompt = torch.tensor([list(question.prompt_ids)])
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=question.num_tokens,
            pad_token_id=0,
            streamer=streamer,
            **sampling,
            **more,
        )
        return streamer.watch.run(output[0, len(question.prompt_ids) :].tolist())


class _Streamer:
    """What generate hands tokens to: the prompt first, then what each step brought."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self._num_puts = 0

    def put(self, token_ids: torch.Tensor) -> None:
        if self._num_puts and token_ids.numel():
            self.watch.note(self._num_puts, token_ids.numel())
        self._num_puts += 1

    def end(self) -> None:
        """See BaseStreamer."""
