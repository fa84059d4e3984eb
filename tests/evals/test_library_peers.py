"""Libraries as peers: transformers itself, and stand-ins of those that are not installed"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specdec.engine import Engine
from specdec.evals.latency.contender import Question, num_equal, ours
from specdec.evals.latency.peer_setup import PeerSetup
from specdec.evals.latency.peers import make_peers
from tests.evals.test_peers import make
from tests.evals.toy_folder import toy_config, write_toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("peers") / "model")


# --- libraries ---


def test_transformers_answers_like_our_fp32(folder: Path) -> None:
    """The same prompt and the same number of tokens, though to its checkpoint all end an answer."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    ends = {"eos_token_id": list(range(256))}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    config = toy_config(folder, "torch")
    asked = Question(tuple(range(40, 60)), 12)
    own = ours(Engine(replace(config, drafter="none")))(asked)
    setup = PeerSetup(str(folder), 100)
    plain = make("transformers", setup)["transformers"]
    before = torch.get_num_threads()
    answer = plain(asked)
    assert torch.get_num_threads() == before
    assert answer.num_tokens == 12
    assert num_equal(answer.token_ids or (), own.token_ids or ()) > 0  # bf16 may part from fp32
    assert [arrival.num_tokens for arrival in answer.arrivals] == [1] * 12
    assert answer.arrivals[-1].at_s <= answer.total_s


def test_transformers_lookup_brings_several_tokens_at_once(folder: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    setup = PeerSetup(str(folder), 200)
    plain = make("transformers", setup)["transformers"]
    lookups = make("transformers:lookup", setup)
    assert list(lookups) == ["transformers:lookup=3", "transformers:lookup=10"]
    answer = plain(Question((5, 6, 7), 24)).token_ids or ()
    # Its own answer twice over is what it will find in the prompt.
    asked = Question((5, 6, 7, *answer, 5, 6, 7), 24)
    for found in (contender(asked) for contender in lookups.values()):
        counts = [arrival.num_tokens or 0 for arrival in found.arrivals]
        assert sum(counts) == found.num_tokens == 24
    sampled = lookups["transformers:lookup=3"](replace(asked, temperature=1.0, seed=3))
    assert sampled.num_tokens == 24


def fake_openvino() -> dict[str, ModuleType]:
    """OpenVINO GenAI's interface as far as it is used: single tokens, then vectors of them."""
    openvino, genai = ModuleType("openvino"), ModuleType("openvino_genai")
    genai.made, genai.asked = [], []  # type: ignore[attr-defined]  # a module in the making

    class Pipeline:
        def __init__(self, folder: str, device: str, **options: Any) -> None:
            genai.made.append((folder, device, options))

        def generate(self, prompt: Any, config: Any, streamer: Any) -> SimpleNamespace:
            genai.asked.append((prompt, dict(vars(config))))
            total, tokens = config.max_new_tokens, list[int]()
            while len(tokens) < total:
                news = list(range(len(tokens), min(total, len(tokens) + 1 + len(tokens) % 3)))
                tokens += news
                streamer.write(news[0] if len(news) == 1 else news)
            streamer.end()
            return SimpleNamespace(tokens=[tokens])

    openvino.Tensor = lambda array: array.tolist()  # type: ignore[attr-defined]  # a module in the making
    for name, value in {
        "LLMPipeline": Pipeline,
        "StreamerBase": object,
        "StreamingStatus": SimpleNamespace(RUNNING=0),
        "SchedulerConfig": SimpleNamespace,
        "GenerationConfig": SimpleNamespace,
    }.items():
        setattr(genai, name, value)
    return {"openvino": openvino, "openvino_genai": genai}


def test_openvino_is_asked_as_it_wants_to_be(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").touch()
    setup = PeerSetup("model", 100, tmp_path)
    modules = fake_openvino()
    genai: Any = modules["openvino_genai"]
    with patch.dict(sys.modules, modules):
        [(_, plain), (_, lookups)] = make_peers(["openvino", "openvino:lookup"], setup, {})
        found = plain["openvino"](Question((7, 8), 6))
        sampled = plain["openvino"](Question((7, 8), 1, temperature=0.5, seed=4))
        for contender in lookups.values():
            contender(Question((7, 8), 6, temperature=0.5))
    assert found.token_ids == tuple(range(6)) and sampled.num_tokens == 1
    assert [arrival.num_tokens for arrival in found.arrivals] == [1, 2, 1, 2]
    assert len(genai.made) == 2  # one for the lookups together
    assert "prompt_lookup" not in genai.made[0][2] and genai.made[1][2]["prompt_lookup"] is True
    assert not genai.made[0][2]["scheduler_config"].enable_prefix_caching
    assert all(options["ENABLE_CPU_PINNING"] for _, _, options in genai.made)
    greedy, warm, *others = genai.asked
    assert greedy[0] == [[7, 8]]
    assert greedy[1] == {"ignore_eos": True, "max_new_tokens": 6, "do_sample": False}
    assert warm[1]["do_sample"] and (warm[1]["temperature"], warm[1]["rng_seed"]) == (0.5, 4)
    assert [config["num_assistant_tokens"] for _, config in others] == [3, 5, 8, 10, 15]
    assert all(config["max_ngram_size"] == 4 and config["do_sample"] for _, config in others)
    assert not {"num_assistant_tokens", "max_ngram_size"} & (greedy[1].keys() | warm[1].keys())


def test_each_export_is_loaded_by_itself(tmp_path: Path) -> None:
    """Once, however many ask for it."""
    for name in ("fp16", "int4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "openvino_model.xml").touch()
    modules = fake_openvino()
    texts = ["openvino@int4", "openvino:lookup=5@int4", "openvino:lookup=7@int4"]
    names = ["openvino", *(text.replace("int4", str(tmp_path / "int4")) for text in texts)]
    with patch.dict(sys.modules, modules):
        made = dict(make_peers(names, PeerSetup("model", 100, tmp_path / "fp16"), {}))
    assert [list(contenders) for contenders in made.values()] == [
        ["openvino"],
        *([n] for n in texts),
    ]
    genai: Any = modules["openvino_genai"]
    folders = [(folder, "prompt_lookup" in options) for folder, _, options in genai.made]
    fp16, int4 = (str(tmp_path / name) for name in ("fp16", "int4"))
    assert folders == [(fp16, False), (int4, False), (int4, True)]


def fake_llama() -> dict[str, ModuleType]:
    """llama-cpp-python's interface as far as it is used: each forward brings two tokens where it
    drafts, one where it does not."""
    llama_cpp, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    llama_cpp.made = []  # type: ignore[attr-defined]  # a module in the making

    class Llama:
        def __init__(self, file: str, **options: Any) -> None:
            llama_cpp.made.append(self)
            self.options, self.calls = options, list[Any]()
            self.draft_model = options["draft_model"]

        def reset(self) -> None:
            self.calls.append("reset")

        def set_seed(self, seed: int) -> None:
            self.calls.append(seed)

        def eval(self, tokens: Any) -> None:
            """A forward."""

        def generate(self, tokens: list[int], **sampling: Any) -> Iterator[int]:
            guessed = self.draft_model and self.draft_model.num_pred_tokens
            self.calls.append((tokens, sampling, guessed))
            token = 0
            while True:
                self.eval(tokens)
                for _ in range(2 if self.draft_model else 1):
                    yield token
                    token += 1

    llama_cpp.Llama = Llama  # type: ignore[attr-defined]  # a module in the making
    speculative.LlamaPromptLookupDecoding = SimpleNamespace  # type: ignore[attr-defined]  # a module in the making
    return {"llama_cpp": llama_cpp, "llama_cpp.llama_speculative": speculative}


def test_llama_tells_which_forward_a_token_came_from(tmp_path: Path) -> None:
    (file := tmp_path / "model.gguf").touch()
    modules = fake_llama()
    with patch.dict(sys.modules, modules):
        names = ["llama.cpp", "llama.cpp:lookup"]
        [(_, plain), (_, lookups)] = make_peers(names, PeerSetup("m", 99, gguf=file), {})
        alone = plain["llama.cpp"](Question((7, 8), 3, temperature=0.5, seed=4))
        pairs = [contender(Question((7, 8), 5)) for contender in lookups.values()]
    assert [arrival.num_tokens for arrival in alone.arrivals] == [1, 1, 1]
    for pair in pairs:
        assert pair.token_ids == (0, 1, 2, 3, 4)
        assert [arrival.num_tokens for arrival in pair.arrivals] == [2, 2, 1]
    model, drafting = modules["llama_cpp"].made
    assert (model.options["n_ctx"], model.options["logits_all"]) == (99, False)
    assert drafting.options["logits_all"] is drafting.options["flash_attn"] is True
    reset, seed, (tokens, sampling, _) = model.calls
    assert (reset, seed, tokens, sampling["temp"]) == ("reset", 4, [7, 8], 0.5)
    assert (sampling["top_k"], sampling["top_p"], sampling["min_p"]) == (0, 1.0, 0.0)
    assert [call[2] for call in drafting.calls if isinstance(call, tuple)] == [2, 5, 10]
