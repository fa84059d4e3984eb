"""Libraries as peers: transformers itself, and stand-ins of those that are not installed"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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


class FakeVllm(ModuleType):
    """vLLM's interface as documented, answering 100, 101, ... in steps of 1, 2, 1, 2, ... tokens;
    with speculation in steps of 3. Two steps without news come first."""

    def __init__(self) -> None:
        super().__init__("vllm")
        self.made: list[dict[str, Any]] = []
        self.asked: list[tuple[str, Any, Any]] = []
        self.SamplingParams = lambda **fields: SimpleNamespace(**fields)
        self.LLM = self.make

    def make(self, **options: Any) -> SimpleNamespace:
        self.made.append(options)
        engine = FakeVllmEngine(self.asked, 3 if "speculative_config" in options else None)
        return SimpleNamespace(llm_engine=engine)


@dataclass
class FakeVllmEngine:
    asked: list[tuple[str, Any, Any]]
    size: int | None
    done: list[int] = field(default_factory=list)
    num_steps: int = 0
    known_ids: set[str] = field(default_factory=set)

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        assert request_id not in self.known_ids
        self.known_ids.add(request_id)
        self.asked.append((request_id, prompt, params))
        self.done, self.num_steps = [], 0

    def has_unfinished_requests(self) -> bool:
        return len(self.done) < int(self.asked[-1][2].max_tokens)

    def step(self) -> list[SimpleNamespace]:
        self.num_steps += 1
        if self.num_steps == 1:
            return []
        if self.num_steps == 2:
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=())])]
        size = min(
            self.size or 2 - self.num_steps % 2, self.asked[-1][2].max_tokens - len(self.done)
        )
        self.done += range(100 + len(self.done), 100 + len(self.done) + size)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(self.done))])]


def test_vllm_is_asked_by_its_documented_interface(folder: Path) -> None:
    fake = FakeVllm()
    setup = PeerSetup(str(folder), 321)
    with patch.dict(sys.modules, {"vllm": fake}):
        plain, drafted = (make(name, setup) for name in ("vllm", "vllm:ngram"))
        asked = Question((7, 8), 7, temperature=0.5, seed=4)
        answer = plain["vllm"](asked)
        again = drafted["vllm:ngram=5"](replace(asked, num_tokens=7))
    assert answer.token_ids == again.token_ids == tuple(range(100, 107))
    assert [arrival.num_tokens for arrival in answer.arrivals] == [1, 2, 1, 2, 1]
    assert [arrival.num_tokens for arrival in again.arrivals] == [3, 3, 1]
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    common = {"model": str(folder), "dtype": "bfloat16", "max_model_len": 321}
    common["enable_prefix_caching"] = False
    assert fake.made == [common, {**common, "speculative_config": config}]
    _, prompt, params = fake.asked[0]
    assert prompt == {"prompt_token_ids": [7, 8]}
    assert vars(params) == {
        "temperature": 0.5,
        "seed": 4,
        "max_tokens": 7,
        "ignore_eos": True,
        "detokenize": False,
    }


def fake_openvino() -> dict[str, ModuleType]:
    """OpenVINO GenAI's interface as far as it is used: single tokens, then vectors of them."""
    openvino, genai = ModuleType("openvino"), ModuleType("openvino_genai")
    genai.made, genai.asked = [], []  # type: ignore[attr-defined]

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

    openvino.Tensor = lambda array: array.tolist()  # type: ignore[attr-defined]
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
            contender(Question((7, 8), 6))
    assert found.token_ids == tuple(range(6)) and sampled.num_tokens == 1
    assert [arrival.num_tokens for arrival in found.arrivals] == [1, 2, 1, 2]
    assert len(genai.made) == 2  # one for the lookups together
    assert "prompt_lookup" not in genai.made[0][2] and genai.made[1][2]["prompt_lookup"] is True
    assert not genai.made[0][2]["scheduler_config"].enable_prefix_caching
    greedy, warm, *others = genai.asked
    assert greedy[0] == [[7, 8]]
    assert greedy[1] == {"ignore_eos": True, "max_new_tokens": 6, "do_sample": False}
    assert warm[1]["do_sample"] and (warm[1]["temperature"], warm[1]["rng_seed"]) == (0.5, 4)
    assert [config["num_assistant_tokens"] for _, config in others] == [3, 5, 10]


def fake_llama() -> dict[str, ModuleType]:
    """llama-cpp-python's interface as far as it is used: each forward brings two tokens where it
    drafts, one where it does not."""
    llama_cpp, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    llama_cpp.made = []  # type: ignore[attr-defined]

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

    llama_cpp.Llama = Llama  # type: ignore[attr-defined]
    speculative.LlamaPromptLookupDecoding = SimpleNamespace  # type: ignore[attr-defined]
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
    assert drafting.options["logits_all"] is True
    reset, seed, (tokens, sampling, _) = model.calls
    assert (reset, seed, tokens, sampling["temp"]) == ("reset", 4, [7, 8], 0.5)
    assert (sampling["top_k"], sampling["top_p"], sampling["min_p"]) == (0, 1.0, 0.0)
    assert [call[2] for call in drafting.calls if isinstance(call, tuple)] == [2, 10]
