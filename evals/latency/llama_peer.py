"""LlamaPeer: llama.cpp through llama-cpp-python, plain or with its prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from specdec.errors import UsageError
from specdec.evals.latency.contender import Contender, Question, Run, Stopwatch
from specdec.evals.latency.peer_setup import PeerSetup, need_module, num_cores

LOOKUPS = (2, 5, 10)  # tokens guessed at a time; its documentation has 2 for CPUs, 10 for GPUs


def check(setup: PeerSetup) -> None:
    """Raise UsageError if its package or its model is missing."""
    _file(setup)
    need_module("llama_cpp", "llama.cpp", "'specdec-server[peers]'")


def load(setup: PeerSetup) -> LlamaPeer:
    """Read nothing yet: lookups need a model of their own, which keeps all logits."""
    return LlamaPeer(_file(setup), setup.max_len)


class LlamaPeer:
    """At most two models, loaded when they are first asked for.

    Example: `LlamaPeer(Path("model.gguf"), 4096).contender(2)(question)`.
    """

    def __init__(self, file: Path, max_len: int) -> None:
        self._file, self._max_len = file, max_len
        self._models: dict[bool, Any] = {}

    def contender(self, lookup: int | None) -> Contender:
        """Plain, or guessing `lookup` tokens at a time."""
        model = self._model(lookup)

        def run(question: Question) -> Run:
            if lookup is not None:
                model.draft_model.num_pred_tokens = lookup
            model.reset()  # or the prompt asked before would be found in its cache
            model.set_seed(question.seed)
            sampling: dict[str, Any] = {"top_k": 1, "temp": 0.0}
            if question.temperature:
                sampling = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": question.temperature}
            model.num_evals = 0
            watch, found = Stopwatch(), list[int]()
            tokens = model.generate(list(question.prompt_ids), **sampling)
            for token in islice(tokens, question.num_tokens):
                found.append(token)
                watch.note(model.num_evals)
            return watch.run(found)

        return run

    def _model(self, lookup: int | None) -> Any:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        class CountedLlama(Llama):  # type: ignore[misc]  # it has no types
            """Tells which of its forwards a token came from."""

            num_evals = 0

            def eval(self, tokens: Sequence[int]) -> None:
                self.num_evals += 1
                super().eval(tokens)

        with_lookup = lookup is not None
        if with_lookup not in self._models:
            self._models[with_lookup] = CountedLlama(
                str(self._file),
                n_ctx=self._max_len,
                n_threads=num_cores(),
                n_threads_batch=num_cores(),
                flash_attn=True,  # quicker than its default without
                logits_all=with_lookup,  # or there is no room for those of drafts
                draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
                verbose=False,
            )
        return self._models[with_lookup]


def _file(setup: PeerSetup) -> Path:
    if setup.gguf is None or not setup.gguf.is_file():
        where = "" if setup.gguf is None else f"; there is no {setup.gguf}"
        raise UsageError(f"--vs llama.cpp needs --gguf FILE, the same model as a GGUF file{where}")
    return setup.gguf
