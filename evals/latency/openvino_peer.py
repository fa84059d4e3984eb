"""OpenVinoPeer: OpenVINO GenAI's pipeline, plain or with its prompt lookup."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from specdec.errors import UsageError
from specdec.evals.latency.contender import Contender, Question, Run, Stopwatch
from specdec.evals.latency.peer_setup import PeerSetup, need_module, num_cores

EXPORT = "optimum-cli export openvino --task text-generation-with-past --weight-format fp16"
# Tokens guessed at a time. Every step pays for all of them, found or not: few are best for free
# text, many for copies.
LOOKUPS = (3, 5, 8, 10, 15)
MAX_NGRAM = 4  # tokens that must match, fewer if none do; as good as 2 and 3, or better


def check(setup: PeerSetup) -> None:
    """Raise UsageError if its package or its model is missing."""
    _folder(setup)
    need_module("openvino_genai", "openvino", "'specdec-server[peers]'")


def load(setup: PeerSetup) -> OpenVinoPeer:
    """Read nothing yet: plain answers and lookups need pipelines of their own."""
    return OpenVinoPeer(_folder(setup))


class OpenVinoPeer:
    """At most two pipelines, loaded when they are first asked for.

    Example: `OpenVinoPeer(Path("exported")).contender(5)(question)`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pipelines: dict[bool, Any] = {}

    def contender(self, lookup: int | None) -> Contender:
        """Plain, or guessing `lookup` tokens at a time."""
        import openvino_genai

        class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]  # it has no types
            def __init__(self) -> None:
                super().__init__()
                self.watch = Stopwatch()
                self.num_writes = 0

            def write(self, token_ids: int | list[int]) -> Any:
                self.num_writes += 1
                self.watch.note(
                    self.num_writes, 1 if isinstance(token_ids, int) else len(token_ids)
                )
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        pipeline = self._pipeline(with_lookup=lookup is not None)

        def run(question: Question) -> Run:
            streamer = Streamer()
            result = pipeline.generate(*asked(question, lookup), streamer)
            return streamer.watch.run(result.tokens[0])

        return run

    def _pipeline(self, *, with_lookup: bool) -> Any:
        import openvino_genai

        if with_lookup not in self._pipelines:
            # What it chooses by itself, but that a prompt asked again is not found in a cache.
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            scheduler.max_num_batched_tokens = sys.maxsize
            self._pipelines[with_lookup] = openvino_genai.LLMPipeline(
                str(self._folder),
                "CPU",
                scheduler_config=scheduler,
                **properties(with_lookup=with_lookup),
            )
        return self._pipelines[with_lookup]


def properties(*, with_lookup: bool) -> dict[str, Any]:
    """Of a pipeline on this processor."""
    pinned = {"INFERENCE_NUM_THREADS": num_cores(), "ENABLE_CPU_PINNING": True}  # quicker than not
    return {**pinned, "prompt_lookup": True} if with_lookup else pinned


def asked(question: Question, lookup: int | None) -> tuple[Any, Any]:
    """The prompt, and how it is to be answered: plain, or guessing `lookup` tokens at a time."""
    import numpy as np
    import openvino
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.ignore_eos = True
    config.max_new_tokens = question.num_tokens
    config.do_sample = question.temperature > 0
    if question.temperature:
        config.temperature, config.top_p = question.temperature, 1.0
        config.rng_seed = question.seed
    if lookup is not None:
        config.num_assistant_tokens, config.max_ngram_size = lookup, MAX_NGRAM
    return openvino.Tensor(np.array([question.prompt_ids], dtype=np.int64)), config


def _folder(setup: PeerSetup) -> Path:
    folder = setup.openvino_model
    if folder is None or not (folder / "openvino_model.xml").is_file():
        where = "" if folder is None else f" with openvino_model.xml, which {folder} has not"
        raise UsageError(
            f"--vs openvino needs --openvino-model FOLDER{where}; "
            f"write one once: {EXPORT} --model MODEL FOLDER"
        )
    return folder
