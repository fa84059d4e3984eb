"""Peers: other libraries that answer the same prompts on the same cores."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from specdec import checkpoints
from specdec.errors import UsageError
from specdec.evals.latency.contender import Contender, Run

EXPORT = "optimum-cli export openvino --task text-generation-with-past --weight-format fp16"


@dataclass(frozen=True)
class PeerSetup:
    """What peers may need: our model, the longest context, and models in formats of their own."""

    model: str
    max_len: int
    openvino_model: Path | None = None
    gguf: Path | None = None


def make_peers(names: Sequence[str], setup: PeerSetup) -> dict[str, Contender]:
    """Load the peers of these names.

    Raises UsageError for an unknown one, one that is not installed, or one whose model is missing.
    """
    return {name: PEERS[name](setup) for name in names}


def check_peers(names: Sequence[str], setup: PeerSetup) -> None:
    """Raise, before anything is loaded, what `make_peers` would, but for what is not installed."""
    for name in names:
        if name not in PEERS:
            raise UsageError(f"unknown peer {name!r}; choose from {', '.join(PEERS)}")
    if "openvino" in names:
        _openvino_folder(setup)
    if "llama.cpp" in names:
        _gguf_file(setup)


def _transformers(setup: PeerSetup) -> Contender:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise _missing("transformers", "'specdec-server[evals]'") from None
    folder = checkpoints.resolve(setup.model)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    peer.generation_config.eos_token_id = None  # or it would end before the others

    def run(prompt_ids: Sequence[int], num_tokens: int) -> Run:
        # The engine's forward has threads of its own, and leaves PyTorch one.
        before = torch.get_num_threads()
        torch.set_num_threads(_num_cores())
        started = time.perf_counter()
        prompt = torch.tensor([list(prompt_ids)])
        output = peer.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        total_s = time.perf_counter() - started
        torch.set_num_threads(before)
        return Run(tuple(output[0, len(prompt_ids) :].tolist()), total_s)

    return run


def _openvino(setup: PeerSetup) -> Contender:
    folder = _openvino_folder(setup)
    try:
        import numpy as np
        import openvino
        import openvino_genai
    except ImportError:
        raise _missing("openvino", "openvino-genai") from None
    # What the pipeline chooses by itself, but that a prompt asked again is not found in a cache.
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = sys.maxsize
    pipeline = openvino_genai.LLMPipeline(
        str(folder), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=_num_cores()
    )

    def run(prompt_ids: Sequence[int], num_tokens: int) -> Run:
        started = time.perf_counter()
        prompt = openvino.Tensor(np.array([prompt_ids], dtype=np.int64))
        result = pipeline.generate(
            prompt, max_new_tokens=num_tokens, ignore_eos=True, do_sample=False
        )
        total_s = time.perf_counter() - started
        return Run(tuple(result.tokens[0]), total_s)

    return run


def _openvino_folder(setup: PeerSetup) -> Path:
    folder = setup.openvino_model
    if folder is None or not (folder / "openvino_model.xml").is_file():
        where = "" if folder is None else f" with openvino_model.xml, which {folder} has not"
        raise UsageError(
            f"--vs openvino needs --openvino-model FOLDER{where}; "
            f"write one once: {EXPORT} --model MODEL FOLDER"
        )
    return folder


def _llama_cpp(setup: PeerSetup) -> Contender:
    file = _gguf_file(setup)
    try:
        from llama_cpp import Llama
    except ImportError:
        raise _missing("llama.cpp", "llama-cpp-python") from None
    peer = Llama(
        str(file),
        n_ctx=setup.max_len,
        n_threads=_num_cores(),
        n_threads_batch=_num_cores(),
        logits_all=False,
        verbose=False,
    )

    def run(prompt_ids: Sequence[int], num_tokens: int) -> Run:
        started = time.perf_counter()
        peer.reset()  # or the prompt asked before would be found in its cache
        tokens = peer.generate(list(prompt_ids), top_k=1, temp=0.0)
        found = tuple(islice(tokens, num_tokens))
        return Run(found, time.perf_counter() - started)

    return run


def _gguf_file(setup: PeerSetup) -> Path:
    if setup.gguf is None or not setup.gguf.is_file():
        where = "" if setup.gguf is None else f"; there is no {setup.gguf}"
        raise UsageError(f"--vs llama.cpp needs --gguf FILE, the same model as a GGUF file{where}")
    return setup.gguf


def _missing(peer: str, package: str) -> UsageError:
    return UsageError(f"--vs {peer} needs a package: pip install {package}")


def _num_cores() -> int:
    """Those that this process may use: as many threads as the engine's forward has."""
    return len(os.sched_getaffinity(0))


PEERS: dict[str, Callable[[PeerSetup], Contender]] = {
    "transformers": _transformers,
    "openvino": _openvino,
    "llama.cpp": _llama_cpp,
}
